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
from tests.late_device.lanes import LateHub
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


def lanes_on_streams(monkeypatch, *modules):
    """Ranks that are threads have transfers on streams of their own."""
    for module in modules:
        monkeypatch.setattr(part(module), "ThreadHub", LateHub)


# ---- gpu_check


@pytest.mark.nightly
def test_kernels():
    found = section("kernels", "kernel_errors")
    assert found.holds
    assert any(line.startswith("| torch_varlen | causal") for line in found.lines)


def test_triton_s_kernels():
    assert section("fused", "fused").holds


def test_speeds():
    lines = section("kernels", "kernel_seconds").lines
    assert any(re.match(r"\| torch_varlen \| [\d.e+-]+ / [\d.e+-]+ \|", line) for line in lines)
    assert any(line.startswith("| FA3 | not run:") for line in lines)


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


@pytest.mark.nightly
@pytest.mark.usefixtures("in_torch")
def test_kinds_of_layers(monkeypatch):
    lanes_on_streams(monkeypatch, "kinds")
    assert section("kinds", "kinds").holds


@pytest.mark.nightly
@pytest.mark.usefixtures("in_torch")
def test_recurrent_layers(monkeypatch):
    lanes_on_streams(monkeypatch, "recurrent")
    assert section("recurrent", "recurrent").holds


@pytest.mark.usefixtures("in_torch")
def test_plans(monkeypatch):
    lanes_on_streams(monkeypatch, "one_device")
    assert section("one_device", "plans").holds


@pytest.mark.nightly
def test_many_plans_with_triton_s_kernels(monkeypatch):
    lanes_on_streams(monkeypatch, "one_device")
    assert section("one_device", "plans", plans=4).holds


@pytest.mark.nightly
@pytest.mark.usefixtures("in_torch")
def test_pipelines(monkeypatch):
    lanes_on_streams(monkeypatch, "one_device")
    assert section("one_device", "pipelines").holds


@pytest.mark.usefixtures("in_torch")
def test_figures(monkeypatch):
    figures = part("figures")
    monkeypatch.setattr(figures, "TINY", figures.TINY | WIDER)
    assert section("figures", "memory").holds
    host = section("figures", "host")
    assert host.holds
    assert "FAILED" not in "".join(host.lines)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("in_torch")
def test_calibration(monkeypatch):
    figures = part("figures")
    monkeypatch.setattr(figures, "TINY", figures.TINY | WIDER)
    monkeypatch.setattr("hf_flexseq.hf.synthetic_run.STEPS", 3)
    monkeypatch.setattr("hf_flexseq.hf.synthetic_run.MOST_TOKENS", 200)
    lines = section("figures", "calibration").lines
    assert "off by" in lines[0], "by how much says nothing here"
    assert ops.counts()["operations"] > 1_000


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("name", ["training", "lengths"])
def test_training_as_the_stock_trainer_does(monkeypatch, name):
    training = part("training")
    monkeypatch.setattr(training, "options_of", on_device(training.options_of))
    assert section("training", name).holds


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("in_torch")
def test_images(monkeypatch):
    images = part("images")
    monkeypatch.setattr(images, "options_of", on_device(images.options_of))
    found = section("images", "images")
    assert found.holds, found.text()


@pytest.mark.nightly
@pytest.mark.usefixtures("in_torch")
def test_scans():
    """Nothing is judged."""
    lines = section("recurrent", "scans").lines
    assert sum("| chunked |" in line for line in lines) == 3


def on_device(options_of):
    """Training arguments of a rehearsal, but for its device; costs are estimated."""

    def options(trainer, setting):
        found = options_of(trainer, setting)
        del found["use_cpu"]
        return found | ({"cost_model": "estimate"} if trainer == "flexseq" else {})

    return options


def test_the_environment_says_so():
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert choose.choose_fused(CUDA).name != TorchFused.name
