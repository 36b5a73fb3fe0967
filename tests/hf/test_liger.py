"""Models with Liger's norms, MLPs and rotary embeddings, under Triton's interpreter on a CPU:
packs under random plans of two ranks have the loss and gradients of one process without Liger.

    pip install "liger-kernel>=0.8" && pytest -m kernels tests/hf/test_liger.py

Liger's kernels write over what they are given: gradients behind norms and rotary embeddings, and
both inputs of an MLP's product. A rotary embedding reads a row of its table for each token of a
pack, in which positions restart.

`use_liger_kernel=True` is refused, since it replaces the model's forward. Liger's functions stand
in the modules of transformers from the first call on, and need numbers; so a model is attached
first, and tried without them. Under a trainer that is done when training has begun. Left to a GPU:
Liger's tiles for Blackwell, and its other backends.
"""

import importlib
from functools import partial
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback
from transformers.models.llama import modeling_llama

from tests.hf.test_checks import fresh_accelerate, make_trainer  # noqa: F401
from tests.hf.test_exactness import gradients_under_random_plans
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.tiny import refused
from tests.kernels import interpreter
from tests.ranks import run_cases

pytestmark = [pytest.mark.kernels, pytest.mark.processes, pytest.mark.timeout(600)]

INSTALL = 'needs pip install "liger-kernel>=0.8"'
FLOAT32 = 2e-6  # relative error of the loss or of a gradient, against float64
CASES = [  # family, sharding, checkpointing
    ("Llama", "ddp", False),
    ("Llama", "fsdp2", True),
    ("Qwen3", "fsdp2", False),  # norms of heads
    ("Gemma", "ddp", True),  # weights with an offset, and another product
]
KERNELS = {"_triton_rope", "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"}


class PutLigerIn(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        patch_by_liger(model)


def patch_by_liger(model):
    """Give an attached model Liger's norms, MLPs and rotary embeddings."""
    functions = importlib.import_module("liger_kernel.transformers.monkey_patch")
    patch = getattr(functions, f"apply_liger_kernel_to_{model.config.model_type}")
    patch(fused_linear_cross_entropy=False, model=model)


def errors_with_liger(rank, world_size, family, sharding, checkpointing):
    """The largest relative errors of two random plans, in float32 with Liger against float64
    without; and the kernels that ran."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    launch = executor.__call__
    launched = set()

    def noted(self, *arguments, **named):
        launched.add(self.fn.__name__)
        return launch(self, *arguments, **named)

    modeling = importlib.import_module(type(make_model(family)).__module__)
    # Liger's own stand in the module from the first call on: all of it is put back
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(vars(modeling)):
        keep_float64(patch)
        interpreter.liger(patch)
        patch.setattr(executor, "__call__", noted)
        worst = gradients_under_random_plans(
            rank,
            world_size,
            sharding,
            checkpointing,
            torch.float32,
            2,
            make=partial(make_model, family),
            attention="eager",
            patched=patch_by_liger,
        )
    return worst, launched


@pytest.fixture
def liger(monkeypatch):
    """Liger in Llamas, for one test."""
    pytest.importorskip("liger_kernel", reason=INSTALL)
    interpreter.liger(monkeypatch)
    with mock.patch.dict(vars(modeling_llama)):
        yield


def test_a_trainer_s_losses_are_those_without_liger_if_it_comes_when_training_begins(
    liger, tmp_path
):
    losses = {}
    for name, callbacks in (("without", []), ("with", [PutLigerIn()])):
        trainer = make_trainer(
            tmp_path / name,
            model=make_model("Llama").float(),
            trainer={"callbacks": callbacks},
            max_steps=2,
            logging_steps=1,
        )
        trainer.train()
        losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses["with"]) == 2
    assert losses["with"] == pytest.approx(losses["without"], rel=FLOAT32)
    assert trainer.model.model.norm._get_name() == "LigerRMSNorm"
    with refused("put into its modules: do so in the callback event on_train_begin"):
        trainer.train()
    with refused("put into its modules"):
        trainer.evaluate(trainer.train_dataset)


def test_packs_have_the_loss_and_gradients_of_one_process_without_liger():
    pytest.importorskip("liger_kernel", reason=INSTALL)
    for case, by_rank in zip(
        CASES, run_cases(errors_with_liger, 2, CASES, seconds=500), strict=True
    ):
        for worst, launched in by_rank:
            assert max(worst.values()) < FLOAT32, (case, worst)
            assert launched > KERNELS
            assert len(launched) == len(KERNELS) + 2  # and those of the product
