"""Make a copy of a model whose parameters have no memory, to run it on fake tensors.

    own_copy      of the user's own modules: adapters, frozen weights, replaced modules, with
                  stand-ins for quantized layers
    class_copy    of the model's class and configuration, where its own modules cannot be copied,
                  such as sharded ones

A copy has no hooks, and no wrapped forward. Its weights have the dtype that they are computed
with.
"""

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from hf_flexseq.hf.model.meta_model import meta_model
from hf_flexseq.hf.model.quantized_layers import StandIn, is_quantized
from hf_flexseq.hf.model.sharding_kind import has_sharded_modules

CPU = torch.device("cpu")
"""Device that fake tensors say they are on: autocast knows it, and kernels are not asked for."""

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks"),
)


def own_copy(model: PreTrainedModel, dtype: torch.dtype, mode: FakeTensorMode) -> PreTrainedModel:
    """Return a copy of the user's own modules. Raises ValueError for sharded ones."""
    is_sharded = any(hasattr(parameter, "ds_numel") for parameter in model.parameters())
    if is_sharded or has_sharded_modules(model):
        raise ValueError("its parameters are sharded")
    return fake_copy(model, dtype, mode)


def class_copy(
    model: PreTrainedModel, dtype: torch.dtype, mode: FakeTensorMode
) -> PreTrainedModel:
    """Return a copy made from class and configuration, frozen where the model is."""
    made = meta_model(model, dtype=dtype)
    trained = {name: one.requires_grad for name, one in model.named_parameters()}
    has_frozen = not all(trained.values())
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(trained.get(name, not has_frozen))
    return fake_copy(made, dtype, mode)


def fake_copy(model: PreTrainedModel, dtype: torch.dtype, mode: FakeTensorMode) -> PreTrainedModel:
    """Return a copy in training mode, without checkpointing, made of fake tensors of a mode."""
    memo: dict[int, Any] = {}
    casts = dtype != model.dtype
    with mode:
        for module in model.modules():
            for name in _HOOKS:
                hooks = getattr(module, name)
                memo[id(hooks)] = type(hooks)()
            if is_quantized(module):
                memo[id(module)] = StandIn(module)
        for parameter in model.parameters():
            of_dtype = dtype if casts and parameter.is_floating_point() else parameter.dtype
            empty = torch.empty(parameter.shape, dtype=of_dtype, device=CPU)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CPU)
        made: PreTrainedModel = copy.deepcopy(model, memo)
    for module in made.modules():
        if not inspect.ismethod(vars(module).get("forward")):
            vars(module).pop("forward", None)  # a wrapper, of accelerate or TRL, calls the model
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    made.config.get_text_config().output_router_logits = False
    return made.train()


@contextmanager
def without_complaints() -> Iterator[None]:
    """Keep torch from logging an error for an operation that fails on fake tensors."""
    complaints = logging.getLogger("torch._subclasses.fake_tensor")
    former = complaints.disabled
    complaints.disabled = True
    try:
        yield
    finally:
        complaints.disabled = former
