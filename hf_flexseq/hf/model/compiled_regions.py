"""torch.compile by regions: the MLPs and norms in the layers of an attached model.

Every planned step has other shapes, and attention inside of it exchanges keys between ranks, so
that a model cannot be compiled as a whole. What can are the modules around attention that take
hidden states alone. Each class of them is compiled for any number of tokens; the rest of the model
runs as it is.

The options come from accelerate's `TorchDynamoPlugin`, which the Trainer's `torch_compile` sets
as well. accelerate would compile the whole model when it prepares it, so its plugin is off while
the model is attached. Models that a trainer of TRL's has had prepared in its constructor, to ask
them beside its own, become the uncompiled ones again.
"""

import logging
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DynamoBackend,
    extract_model_from_parallel,
    has_compiled_regions,
    is_compiled_module,
)
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.patches import Patch
from hf_flexseq.hf.model.mlp_trial import takes_one_tensor, text_layers
from hf_flexseq.hf.model.quantized_layers import is_quantized
from hf_flexseq.hf.model.tiles import find_mlps

logger = logging.getLogger(__name__)

# A forward is compiled anew for another width, for one token, and without gradients. After 8
# times, torch's limit, it would run uncompiled from then on.
_MOST_VARIANTS = 64

_OTHERS = ("ref_model", "teacher_model")  # of trainers of TRL


@contextmanager
def compiled_regions(model: PreTrainedModel, accelerator: Accelerator) -> Iterator[None]:
    """Compile the MLPs and norms in the layers of a model inside the block, if `accelerator` is
    told to compile, and keep it from compiling the whole model."""
    plugin = accelerator.state.dynamo_plugin
    backend = plugin.backend
    if backend == DynamoBackend.NO:
        yield
        return
    options = plugin.to_kwargs() | {"backend": backend.value.lower(), "dynamic": True}
    regions = [module for module in _regions(model) if "forward" not in vars(module)]
    forwards: dict[type[nn.Module], Any] = {}
    for kind in map(type, regions):
        if kind not in forwards:
            forwards[kind] = torch.compile(kind.forward, **options)  # type: ignore[attr-defined]
    logger.info(
        "torch.compile: %d MLPs and norms of %s are compiled; all else runs as it is",
        len(regions),
        type(model).__name__,
    )
    limits = torch._dynamo.config
    with ExitStack() as compiled:
        compiled.callback(setattr, limits, "recompile_limit", limits.recompile_limit)
        limits.recompile_limit = max(limits.recompile_limit, _MOST_VARIANTS)
        compiled.enter_context(Patch(plugin, backend=DynamoBackend.NO))
        for module in regions:
            forward = types.MethodType(forwards[type(module)], module)
            compiled.enter_context(Patch(module, forward=forward))
        yield


def leave_others_uncompiled(trainer: Any) -> None:
    """Give a trainer back the uncompiled models that it asks besides its own, which accelerate has
    compiled as a whole: its reference or its teacher."""
    for name in _OTHERS:
        model = getattr(trainer, name, None)
        if is_compiled_module(model) or (model is not None and has_compiled_regions(model)):
            setattr(trainer, name, extract_model_from_parallel(model, keep_torch_compile=False))


def _regions(model: PreTrainedModel) -> dict[nn.Module, None]:
    """Return the modules to compile, as the keys."""
    mlps = [mlp.module for mlp in find_mlps(model).mlps]
    norms = [one for _, layer in text_layers(model) for one in layer.modules() if _is_norm(one)]
    return dict.fromkeys(
        module for module in (*mlps, *norms) if not any(map(is_quantized, module.modules()))
    )


def _is_norm(module: nn.Module) -> bool:
    """Tell if a module is a norm that transformers writes as several operations."""
    kind = type(module)
    is_of_transformers = kind.__module__.startswith("transformers.")
    return is_of_transformers and kind.__name__.endswith("Norm") and takes_one_tensor(module)
