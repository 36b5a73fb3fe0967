"""Find parameters that transformers has got wrong while it sharded a model, without an error.

**Parts in a wrong order.** Checkpoints of some families (Kimi Linear, OLMo Hybrid, Bailing) have a
parameter in parts, which transformers concatenates at load. Where FSDP shards the parameter along
the same dimension, each rank concatenates its shards of the parts. For parts a and b on two ranks
the whole parameter is

    a0 b0 a1 b1        instead of        a0 a1 b0 b1

so that the model computes something else than its checkpoint.

**Tied weights whose rows the ranks do not divide.** transformers has FSDP2 shard the embedding,
and the head with the rest of the model, and ties them afterwards. So FSDP2 manages one parameter
twice. A rank with fewer rows than others has its share padded, by each of the two in a buffer of
its own. The optimizer changes one of these; the other is gathered for its module as it was loaded.

**Buffers that no checkpoint has.** transformers computes those of Falcon H1 from the
configuration, but only for models that it does not shard. In a sharded model it never writes them.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import Concatenate, WeightConverter

from hf_flexseq.base.versions import (
    SHARDED_LOAD_FROM,
    is_older,
    is_sharded_at_load,
    needs,
)
from hf_flexseq.hf.model.sharding_kind import distributed_config

_UNWRITTEN = ".mup_vector"  # how the names of such buffers end


def unknown_sharding(model: nn.Module) -> str | None:
    """Return that this version of transformers shards models that its Trainer does not train as
    such: gradients of all but the last micro-batch would be reduced, or none."""
    if not is_older("transformers", SHARDED_LOAD_FROM):
        return None
    config = distributed_config(model)
    for name in ("fsdp_size", "ep_size"):
        size = getattr(config, name, None) or 1
        if size > 1:
            return (
                f"{name}={size} of DistributedConfig: "
                f"{needs('transformers', SHARDED_LOAD_FROM)}; leave distributed_config out, and "
                "set fsdp in the training arguments"
            )
    return None


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


def unwritten_buffers(model: nn.Module) -> str | None:
    """Return which buffer of `model` was left unwritten; None if none was."""
    if not is_sharded_at_load(model):
        return None
    for name, _ in model.named_buffers():
        if name.endswith(_UNWRITTEN):
            return (
                f"transformers leaves {name} unwritten in a model that it shards at load; leave "
                "distributed_config out, and set fsdp in the training arguments"
            )
    return None


def divided_ties(model: nn.Module) -> str | None:
    """Return which tied weights of `model` FSDP2 would train in part; None if none."""
    if not is_sharded_at_load(model):
        return None
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, its_names in names.items():
        data: Any = parameter.data
        if len(its_names) == 1 or not isinstance(data, DTensor):
            continue
        for mesh_dim, placement in enumerate(data.placements):
            shards = data.device_mesh.size(mesh_dim)
            if getattr(placement, "dim", None) == 0 and data.shape[0] % shards:
                return (
                    f"its tied weights {' and '.join(its_names)} have {data.shape[0]} rows, which "
                    f"{shards} ranks do not divide, so that FSDP2 would train a part of them in "
                    "two copies; load the model without distributed_config once, call "
                    f"resize_token_embeddings(pad_to_multiple_of={shards}), save it, and load it "
                    "from there"
                )
    return None
