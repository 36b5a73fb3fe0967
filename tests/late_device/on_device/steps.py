"""The parts of gpu_check that need one GPU, with a rehearsal's sizes on the device."""

import importlib
import os
import re

import pytest
import torch

from hf_flexseq.kernels import choose
from hf_flexseq.kernels.fused_operations import TorchFused
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


@pytest.mark.usefixtures("in_torch")
def test_memory(monkeypatch):
    figures = part("figures")
    monkeypatch.setattr(figures, "TINY", figures.TINY | WIDER)
    assert section("figures", "memory").holds


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
