"""Make an empty copy of a model on the meta device, to see what its forward does.

A meta model is made from class and configuration, in training mode. It has shapes, but neither
numbers nor memory, so that every size of model takes a tenth of a second or so.

Modules that the user has put into the model can be copied into it. Adapters and quantized layers
are not: they work on each token by itself, and may need numbers.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import deepspeed

from hf_flexseq.hf.model.sharding_kind import unsharded_class

TOKENS = 53
"""Length of the row that a meta model runs on: a prime unlike any size of features."""

# What a forward raises that needs numbers, or another kind of machine.
FAULTS: tuple[type[Exception], ...] = (
    *(RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError),
    *(NotImplementedError, ImportError, AssertionError),
)

# Packages whose modules are not copied: adapters, also ours, quantization, and what every model
# has.
NOT_COPIED = ("torch", "transformers", "peft", "hf_flexseq", "bitsandbytes")


def meta_model(
    model: PreTrainedModel,
    attention: str | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """Return an empty model of the class and configuration of `model`, whole even for a pipeline
    stage. attention: name of the implementation of attention of its text; None for that of
    `model`."""
    config = copy.deepcopy(model.config)
    if attention is not None:
        config._attn_implementation = attention_of_text(model, attention)
    with torch.device("meta"), without_sharding():
        result: PreTrainedModel = unsharded_class(model)(config)
    return result.to(dtype).train()


def copy_users_modules(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Copy the user's modules in `model` into its meta model `target`, whose configuration they
    read if they read the model's; True if there were any."""
    expected = {name: type(module) for name, module in target.named_modules()}
    copied: list[str] = []
    for name, module in model.named_modules():
        kind = unsharded_class(module)
        package = kind.__module__.partition(".")[0]
        is_inside = any(name.startswith(f"{outer}.") for outer in copied)
        has_place = name.rpartition(".")[0] in expected  # not inside of an adapter
        if is_inside or not has_place or package in NOT_COPIED or kind is expected.get(name):
            continue
        copied_module = _empty_copy(module, model.config, target.config).to(torch.bfloat16)
        target.set_submodule(name, copied_module)
        copied.append(name)
    return bool(copied)


def _empty_copy(module: nn.Module, config: Any, other: Any) -> nn.Module:
    """Return a copy of a module with empty parameters and buffers, and another configuration in
    place of its model's."""
    empty: dict[int, Any] = {
        id(config): other,
        id(config.get_text_config()): other.get_text_config(),
    }
    for parameter in module.parameters():
        shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        empty[id(parameter)] = nn.Parameter(shape, requires_grad=False)
    for buffer in module.buffers():
        empty[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(module, empty)


@contextmanager
def without_sharding() -> Iterator[None]:
    """Let models that are made inside the block be whole, also under ZeRO-3: DeepSpeed would take
    the weights of a model inside a model, such as a classifier's, off the meta device."""
    former = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = former


def attention_of_text(base: PreTrainedModel, name: str) -> Any:
    """Return an implementation of attention for the text model alone, as
    `set_attn_implementation` takes it; towers keep their own."""
    config = base.config
    text = config.get_text_config()
    if text is config:
        return name
    path = _path_to(config, text)
    if path is None:
        return name
    chosen: Any = name
    for part in reversed(path):
        chosen = {"": name, part: chosen}
    return chosen


def _path_to(config: Any, wanted: Any) -> list[str] | None:
    """Return the names of sub-configurations that lead to a configuration."""
    if config is wanted:
        return []
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is None:
            continue
        below = _path_to(inner, wanted)
        if below is not None:
            return [name, *below]
    return None
