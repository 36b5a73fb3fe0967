"""Models with Liger's norms, MLPs and rotary embeddings, under Triton's interpreter on a CPU:
packs under random plans of two ranks have the loss and gradients of one process without Liger.

    pip install "liger-kernel>=0.8" && pytest -m kernels tests/hf/test_liger.py

Liger's kernels write over what they are given: gradients behind norms and rotary embeddings, and
both inputs of an MLP's product. A rotary embedding reads a row of its table for each token of a
pack, in which positions restart.

`use_liger_kernel=True` is refused, since it replaces the model's forward. Liger's functions stand
in the modules of transformers from the first call on, and need numbers; so a model is attached
first, and tried without them. Left to a GPU: Liger's tiles for Blackwell, and its other backends.
"""

import importlib
from functools import partial
from unittest import mock

import pytest
import torch

from tests.hf.test_exactness import gradients_under_random_plans
from tests.hf.test_reach import keep_float64, make_model
from tests.kernels import interpreter
from tests.ranks import run_cases

pytestmark = [pytest.mark.kernels, pytest.mark.processes, pytest.mark.timeout(600)]

FLOAT32 = 2e-6  # relative error of the loss or of a gradient, against float64
CASES = [  # family, sharding, checkpointing
    ("Llama", "ddp", False),
    ("Llama", "fsdp2", True),
    ("Qwen3", "fsdp2", False),  # norms of heads
    ("Gemma", "ddp", True),  # weights with an offset, and another product
]
KERNELS = {"_triton_rope", "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"}


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


def test_packs_have_the_loss_and_gradients_of_one_process_without_liger():
    pytest.importorskip("liger_kernel", reason='needs pip install "liger-kernel>=0.8"')
    for case, by_rank in zip(
        CASES, run_cases(errors_with_liger, 2, CASES, seconds=500), strict=True
    ):
        for worst, launched in by_rank:
            assert max(worst.values()) < FLOAT32, (case, worst)
            assert launched > KERNELS
            assert len(launched) == len(KERNELS) + 2  # and those of the product
