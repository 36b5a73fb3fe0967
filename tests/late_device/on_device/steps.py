"""The parts of gpu_check that need one GPU, with a rehearsal's sizes on the device."""

import importlib
import os
import re
import sys

import pytest
import torch

from hf_flexseq.kernels import choose
from hf_flexseq.kernels.fused_operations import TorchFused
from tests.late_device.install import ops
from tests.programs import ROOT

CUDA = torch.device("cuda")
WIDER = {"hidden_size": 64}  # FlashAttention has head sizes from 8 on


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def part(name):
    """A module of the checks."""
    return importlib.import_module(f"gpu_checks.{name}")


def section(module, name, plans=1):
    """A section of a rehearsal's sizes on the device."""

    class OnDevice(part("report").Setting):
        __slots__ = ()

        @property
        def device(self):
            return CUDA

    setting = OnDevice(rehearse=True, plans=plans)
    return getattr(part(module), f"{name}_section")(setting)


# ---- gpu_check


def test_rates():
    lines = section("rates", "rates").lines
    assert re.match(r"\| 1 x 64 \| 4 on 2 \| [\d.e+-]+ / [\d.e+-]+ \|", lines[2])
    assert "| torch_varlen |" in lines[0]


@pytest.mark.nightly
@pytest.mark.processes  # git
def test_the_page_is_kept_with_the_results_and_names_the_gpu(monkeypatch, tmp_path, capsys):
    command = importlib.import_module("gpu_check")
    found = part("report").Section(title="Kernels", lines=("fine",), holds=True)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "section_of", lambda name, setting, seconds: found)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--quick", "--parts", "kernels"])
    assert command.main() == 0
    (page,) = tmp_path.iterdir()
    assert page.read_text() == capsys.readouterr().out
    assert "1 x NVIDIA H100 80GB HBM3, driver " in page.read_text()


@pytest.mark.usefixtures("in_torch")
def test_memory(monkeypatch):
    figures = part("figures")
    monkeypatch.setattr(figures, "TINY", figures.TINY | WIDER)
    assert section("figures", "memory").holds


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("in_torch")
def test_calibration(monkeypatch):
    figures = part("figures")
    monkeypatch.setattr(figures, "TINY", figures.TINY | WIDER)
    monkeypatch.setattr("hf_flexseq.hf.trainer.synthetic_models.STEPS", 3)
    monkeypatch.setattr("hf_flexseq.hf.trainer.synthetic_models.MOST_TOKENS", 200)
    lines = section("figures", "calibration").lines
    assert "off by" in lines[0], "by how much says nothing here"
    assert ops.counts()["operations"] > 1_000


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("name", ["training", "lengths"])
def test_training_as_the_stock_trainer_does(monkeypatch, name):
    training = part("training")
    monkeypatch.setattr(training, "TINY", training.TINY | WIDER)
    for trained in ("TrainingArguments", "FlexSeqConfig"):
        monkeypatch.setattr(training, trained, on_device(getattr(training, trained)))
    found = section("training", name)
    assert found.holds, found.text()


def on_device(arguments):
    """Training arguments of a rehearsal, but for its device."""
    return lambda **options: arguments(**options | {"use_cpu": False})


def test_the_environment_says_so():
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert choose.choose_fused(CUDA).name != TorchFused.name
