"""Find parameters that transformers has put together in a wrong order while it sharded a model.

Checkpoints of some families (Kimi Linear, OLMo Hybrid, Bailing) have a parameter in parts, which
transformers concatenates at load. Where FSDP shards the parameter along the same dimension, each
rank concatenates its shards of the parts. For parts a and b on two ranks the whole parameter is

    a0 b0 a1 b1        instead of        a0 a1 b0 b1

so that the model computes something else than its checkpoint, without an error.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import Concatenate, WeightConverter


def misplaced_parts(model: nn.Module) -> str | None:
    """Return which parameter of `model` has its parts in a wrong order; None if none has."""
    # transformers keeps the conversions that the checkpoint needed, to save in the same form.
    for conversion in getattr(model, "_weight_conversions", None) or ():
        if not isinstance(conversion, WeightConverter) or len(conversion.source_patterns) < 2:
            continue
        for operation in conversion.operations:
            if not isinstance(operation, Concatenate):
                continue
            name = _sharded_along(model, operation.dim, conversion.target_patterns[0])
            if name is not None:
                return (
                    f"transformers has mixed up the rows of {name}: the checkpoint has it in "
                    f"{len(conversion.source_patterns)} parts, and every rank has joined its "
                    "shards of them; load the model without distributed_config once, save it by "
                    "save_pretrained(folder, save_original_format=False), and load it from there"
                )
    return None


def _sharded_along(model: nn.Module, dim: int, pattern: str) -> str | None:
    """Return the first parameter with `pattern` in its name that is sharded along `dim`."""
    for name, parameter in model.named_parameters():
        data: Any = parameter.data
        if pattern not in name or not isinstance(data, DTensor):
            continue
        for mesh_dim, placement in enumerate(data.placements):
            shards = data.device_mesh.size(mesh_dim)
            if shards > 1 and getattr(placement, "dim", None) == dim % data.ndim:
                return name
    return None
