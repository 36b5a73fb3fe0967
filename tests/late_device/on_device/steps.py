"""Whole steps on the device: the parts of gpu_check that need one GPU, and FlexSeqTrainer."""

import contextlib
import importlib
import os

import pytest
import torch

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.kernels import choose
from hf_flexseq.kernels.fused import TorchFused
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.profiler.design import Effort
from tests.hf.tiny import documents, tiny_llama
from tests.late_device.install import ops
from tests.late_device.lanes import LateHub
from tests.programs import ROOT

CUDA = torch.device("cuda")
WIDER = {"hidden_size": 64}  # FlashAttention has head sizes from 8 on


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.fixture
def in_torch(monkeypatch):
    """Operations between kernel calls are torch's, as Triton's interpreter takes very long."""
    monkeypatch.setattr(choose, "_fused_for_cuda", TorchFused)


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


def test_kernels():
    found = section("kernels", "kernel_errors")
    assert found.holds
    assert any(line.startswith("| torch_varlen | causal") for line in found.lines)


def test_triton_s_kernels():
    assert section("fused", "fused").holds


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
@pytest.mark.usefixtures("in_torch")
def test_calibration(monkeypatch):
    figures = part("figures")
    # Estimates are those of an H100, whose milliseconds are minutes here. What is measured then
    # is noise, which the fit may refuse.
    effort = Effort(budget_s=1e-4, rounds=1, held_out=2)
    sizes = {"model_type": "llama", **figures.TINY, **WIDER}
    with contextlib.suppress(ValueError):
        figures.calibrate(sizes, dtype="bfloat16", effort=effort)
    assert ops.counts()["operations"] > 1_000


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("in_torch")
def test_training_as_the_stock_trainer_does():
    training = part("training")
    stock = training.train("stock", training.SHORT)
    flexseq = training.train("flexseq", training.SHORT, cost_model="estimate")
    assert training.losses_agree(flexseq["losses"], stock["losses"])


# ---- the trainer, on both devices


def trained(folder, *, use_cpu, **options):
    """Losses of three steps, and the parameters after them."""
    args = FlexSeqConfig(
        output_dir=str(folder),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        cost_model="estimate",
        max_tokens_per_rank=64,  # several micro-batches
        use_cpu=use_cpu,
        seed=1,
        **options,
    )
    trainer = FlexSeqTrainer(
        model=tiny_llama(torch.float32, hidden_size=32),
        args=args,
        train_dataset=documents([5, 33, 1 + 7, 21, 60, 2, 9, 17, 30, 4, 12, 50] * 2),
        data_collator=DataCollatorForFlexSeq(),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    parameters = {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}
    return losses, parameters


@pytest.mark.processes
@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_trainer_is_as_on_a_cpu(monkeypatch, tmp_path, gradient_checkpointing):
    # The same kernel on both devices, for the same numbers up to rounding.
    reference = Reference()
    for name in ("cuda", "cpu"):
        monkeypatch.setitem(choose.CANDIDATES, name, (AnyCall(reference),))
    options = {"gradient_checkpointing": gradient_checkpointing}
    losses, parameters = trained(tmp_path / "cpu", use_cpu=True, **options)
    ops.reset_counts()
    found_losses, found = trained(tmp_path / "cuda", use_cpu=False, **options)
    assert ops.counts()["copies to the device"] > 0
    assert ops.counts()["copies to the host"] == 3  # flags of what is not finite, once a step
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-4, atol=1e-5)


class AnyCall:
    """A kernel that serves every call."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __getattr__(self, name):
        return getattr(self._kernel, name)

    def reason_unsupported(self, calls):
        return None


def test_the_environment_says_so():
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert choose.choose_fused(CUDA).name != TorchFused.name
