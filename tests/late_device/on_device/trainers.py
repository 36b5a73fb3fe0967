"""Trainers on the device: what they log, and the parameters that they end with, are those of a CPU
or of the stock trainer, and nothing is found."""

from types import SimpleNamespace

import pytest
import torch

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.hf.model.shared_prefixes import refuse_noise
from hf_flexseq.kernels import choose
from hf_flexseq.prove.command import prove
from tests.hf.plain import logged
from tests.hf.tiny import documents, tiny_llama
from tests.kernels.reference import Reference
from tests.late_device.install import ops
from tests.late_device.on_device.conftest import SETTINGS, AnyCall

WIDER = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
LENGTHS = [5, 33, 8, 21, 60, 2, 9, 17, 30, 4, 12, 50] * 2

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("in_torch")]


def trainer(folder, *, model=None, rows=None, callbacks=(), **options):
    """A trainer of four steps of several micro-batches each."""
    settings = SETTINGS | {"output_dir": str(folder), "max_steps": 4}
    return FlexSeqTrainer(
        model=model or tiny_llama(torch.float32),
        args=FlexSeqConfig(**settings | options),
        train_dataset=rows or documents(LENGTHS),
        eval_dataset=documents([5, 9, 30, 7], seed=3),
        data_collator=DataCollatorForFlexSeq(),
        callbacks=list(callbacks),
    )


def trained(*args, **options):
    """What a trainer has logged and made of its model."""
    made = trainer(*args, **options)
    made.train()
    history = made.state.log_history
    parameters = {name: p.detach().cpu() for name, p in made.model.named_parameters()}
    return logged(history, "loss"), logged(history, "eval_loss"), parameters


@pytest.mark.usefixtures("one_kernel")
def test_it_trains_the_same_with_activations_on_the_host(tmp_path):
    checkpointing = {"gradient_checkpointing": True, "max_steps": 2}
    losses, _, wanted = trained(tmp_path, **checkpointing)
    ops.reset_counts()
    offload = {"gradient_checkpointing_kwargs": {"offload": True}}
    found_losses, _, found = trained(tmp_path, **checkpointing, **offload)
    assert ops.counts()["copies to the host"] > 20  # a layer's input, result and log-sum-exps
    assert found_losses == losses
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_trains_in_16_bits(monkeypatch, tmp_path, precision):
    """With FlashAttention's rules, and loss scaling."""
    monkeypatch.setitem(choose.CANDIDATES, "cpu", (AnyCall(Reference()),))
    losses, *_ = trained(tmp_path / "cpu", use_cpu=True, model=tiny_llama(torch.float32, **WIDER))
    found, *_ = trained(
        tmp_path / "cuda", model=tiny_llama(torch.float32, **WIDER), **{precision: True}
    )
    assert found == pytest.approx(losses, rel=1e-2)


class Noisy(torch.nn.Linear):
    """A model of one layer, which may draw random numbers on the device."""

    device = torch.device("cuda")
    draws = False

    def forward(self, x, seq_ctx=None):
        return super().forward(torch.nn.functional.dropout(x) if self.draws else x)


def test_noise_for_tokens_that_rows_share_is_noticed_without_a_wait():
    model = Noisy(3, 3, device="cuda")
    refuse_noise(model)
    x = torch.ones(2, 3, device="cuda")
    shared = SimpleNamespace(target_counts=torch.ones(2, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    model(x, seq_ctx=shared)
    model.draws = True
    model(x)
    with pytest.raises(NotImplementedError, match="Noisy draws random numbers"):
        model(x, seq_ctx=shared)


@pytest.mark.nightly
def test_a_model_is_proven_in_bfloat16():
    found = prove("LlamaForCausalLM")
    assert (found["device"], found["dtype"], found["changes"]) == ("cuda", "bfloat16", [])
    assert found["control"]["what"] == "bfloat16 on one process, from float32"
    assert found["control"]["gradient"] > 0
    assert all(step["holds"] for step in found["steps"].values())
    assert not [line for line in found["not_proven"] if "kernels of GPUs" in line]
