"""Models with Liger's norms, MLPs and rotary embeddings, under Triton's interpreter on a CPU:
packs under random plans of two ranks have the loss and gradients of one process without Liger.

    pip install "liger-kernel>=0.8" && pytest -m kernels tests/hf/test_liger.py

Liger's kernels write over what they are given: gradients behind norms and rotary embeddings, and
both inputs of an MLP's product. A rotary embedding reads a row of its table for each token of a
pack, in which positions restart.

What `use_liger_kernel=True` gives to Liger is tried without its package. Left to a GPU: Liger's
tiles for Blackwell, and its other backends.
"""

import importlib
import logging
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
from transformers.models.llama import modeling_llama

from hf_flexseq.hf.model import liger as liger_module
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.liger import LOSSES, liger_kernels
from hf_flexseq.hf.trainer import checks as refusals
from tests.hf import objectives
from tests.hf.test_checks import fresh_accelerate, make_trainer  # noqa: F401
from tests.hf.test_exactness import gradients_under_random_plans
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.tiny import any_choices, refused, tiny_llama
from tests.hf.trainers import weights_apart
from tests.kernels import interpreter
from tests.ranks import run_cases

INSTALL = 'needs pip install "liger-kernel>=0.8"'
LAYERS = 2  # of the models
FLOAT32 = 2e-6  # relative error of the loss or of a gradient, against float64
CASES = [  # family, sharding, checkpointing, whether plans choose memory and tiles of MLPs
    ("Llama", "ddp", False, True),
    ("Llama", "fsdp2", True, False),
    ("Qwen3", "fsdp2", False, False),  # norms of heads
    ("Gemma", "ddp", True, False),  # weights with an offset, and another product
]
KERNELS = {"_triton_rope", "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"}


def errors_with_liger(rank, world_size, family, sharding, checkpointing, chooses):
    """The largest relative errors of two random plans, in float32 with Liger against float64
    without; and the kernels that ran."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    launch = executor.__call__
    launched = set()

    def noted(self, *arguments, **named):
        launched.add(self.fn.__name__)
        return launch(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as put_in:
        keep_float64(patch)
        interpreter.liger(patch)
        patch.setattr(executor, "__call__", noted)
        with any_choices(LAYERS, tiles=(2, 3)) if chooses else nullcontext():
            worst = gradients_under_random_plans(
                rank,
                world_size,
                sharding,
                checkpointing,
                torch.float32,
                2,
                make=partial(make_model, family),
                attention="eager",
                patched=lambda model: put_in.enter_context(liger_kernels(model, {})),
            )
    return worst, launched


@pytest.mark.kernels
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_packs_have_the_loss_and_gradients_of_one_process_without_liger():
    pytest.importorskip("liger_kernel", reason=INSTALL)
    for case, by_rank in zip(
        CASES, run_cases(errors_with_liger, 2, CASES, seconds=500), strict=True
    ):
        for worst, launched in by_rank:
            assert max(worst.values()) < FLOAT32, (case, worst)
            assert launched > KERNELS
            assert len(launched) == len(KERNELS) + 2  # and those of the product


# ---- trainers


def losses_of(folder, model, **settings):
    trainer = make_trainer(folder, model=model, max_steps=2, logging_steps=1, **settings)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    return losses, trainer


@pytest.mark.kernels
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_trainer_s_losses_are_those_without_liger_and_again_when_it_trains_on(
    monkeypatch, tmp_path
):
    pytest.importorskip("liger_kernel", reason=INSTALL)
    interpreter.liger(monkeypatch)
    wanted, stock = losses_of(tmp_path / "without", make_model("Llama").float())
    found, trainer = losses_of(
        tmp_path / "with", make_model("Llama").float(), use_liger_kernel=True
    )
    assert found == pytest.approx(wanted, rel=FLOAT32)
    norm = trainer.model.model.norm
    assert norm._get_name() == "LlamaRMSNorm"
    names = []
    hook = norm.register_forward_hook(lambda module, *_: names.append(module._get_name()))
    evaluated = [each.evaluate(each.train_dataset)["eval_loss"] for each in (stock, trainer)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=FLOAT32)
    assert set(names) == {"LigerRMSNorm"}
    hook.remove()
    for each in (stock, trainer):
        each.train()
    again = [each.state.log_history[-2]["loss"] for each in (stock, trainer)]
    assert again[1] == pytest.approx(again[0], rel=FLOAT32)
    assert trainer.args.use_liger_kernel


@pytest.mark.kernels
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_pairs_and_their_reference_have_the_weights_without_liger(monkeypatch, tmp_path):
    pytest.importorskip("liger_kernel", reason=INSTALL)
    interpreter.liger(monkeypatch)
    objectives.save_inputs(tmp_path)
    runs = []
    for settings in ({}, {"use_liger_kernel": True}):
        options = {"flexseq": {"max_tokens_per_rank": 300}, "settings": settings}
        case = objectives.Case(kind="dpo", steps=1, batch=1, dtype=torch.float32, **options)
        runs.append(objectives.run_case(case, True, tmp_path))
    assert weights_apart(*runs) < FLOAT32


# ---- without the package


@pytest.fixture
def put_in(monkeypatch):
    """In the place of transformers' function: the options it was called with."""
    calls = []

    def apply(model, options):
        calls.append(options)
        if options.get("rope") is not False:
            modeling_llama.apply_rotary_pos_emb = rotate
            modeling_llama.LlamaMLP = OtherMlp
            model.model.norm.eps = 0.5
            model.model.norm.forward = model.model.norm.forward

    monkeypatch.setattr(liger_module, "apply_liger_kernel", apply)
    monkeypatch.setattr(refusals, "is_liger_kernel_available", lambda: True)
    return calls


def rotate(q, k, cos, sin, *_, **__):
    assert q.device.type != "meta", "a kernel needs numbers"
    return q * 1.0, k * 1.0


class OtherMlp(modeling_llama.LlamaMLP):
    pass


def test_head_and_loss_stay_ours_and_everything_else_is_undone(put_in, caplog):
    own = dict(vars(modeling_llama))
    model = tiny_llama()
    places = [dict(vars(module)) for module in model.modules()]
    with liger_kernels(model, {"rms_norm": True, "cross_entropy": False}):
        assert modeling_llama.apply_rotary_pos_emb is rotate
        assert modeling_llama.LlamaMLP is not OtherMlp, "new models have their own classes"
        assert model.model.norm.eps == 0.5
        check_model(tiny_llama())  # a reference
        assert modeling_llama.apply_rotary_pos_emb is rotate
    assert put_in == [
        {"rms_norm": True, "cross_entropy": False, "fused_linear_cross_entropy": False}
    ]
    assert dict(vars(modeling_llama)) == own
    assert [dict(vars(module)) for module in model.modules()] == places
    assert not caplog.messages
    with caplog.at_level(logging.INFO), liger_kernels(make_model("Mixtral"), {"rope": False}):
        pass
    assert not any(put_in[1][name] for name in ("swiglu", "geglu", "cross_entropy"))
    assert "Liger has no kernels for MixtralForCausalLM, which stays" in caplog.text


@pytest.mark.slow
def test_trainers_give_liger_to_the_engine_and_not_to_the_trainer(put_in, tmp_path):
    args = {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}}
    _, trainer = losses_of(tmp_path, tiny_llama(torch.float32), lookahead=0, **args)
    trainer.evaluate(trainer.train_dataset)
    wanted = {"rope": False, "fused_linear_cross_entropy": False, "cross_entropy": False}
    assert put_in == [wanted] * 2
    assert trainer.args.use_liger_kernel


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_liger_are_refused(put_in, tmp_path, loss):
    with refused(f"{loss}=True in liger_kernel_config: hf_flexseq computes head", ValueError):
        make_trainer(tmp_path, use_liger_kernel=True, liger_kernel_config={loss: True})


def test_a_missing_package_is_said_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(refusals, "is_liger_kernel_available", lambda: False)
    with refused(
        "use_liger_kernel=True without the package: .*pip install liger-kernel", ImportError
    ):
        make_trainer(tmp_path, use_liger_kernel=True)
