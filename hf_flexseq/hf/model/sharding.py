"""How a model is divided between ranks, by accelerate, by transformers, or by the user; whether
all ranks run every micro-batch together (lockstep) or meet in their groups alone; and what
transformers gets wrong while it shards a model, without an error.

Experts over ranks need lockstep: each of their layers exchanges tokens between all ranks of an
expert group (docs/architecture.md says why). transformers shards every such model by FSDP2, since
`ep_size` divides `fsdp_size` x `tp_size`, and models with tp_size > 1 are refused.

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

**Buffers that no checkpoint has.** transformers computes Falcon H1's from the configuration, but
only for models that it does not shard. In a sharded model it never writes them.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import Concatenate, WeightConverter

from hf_flexseq.base.patches import Patch
from hf_flexseq.base.versions import (
    SHARDED_LOAD_FROM,
    is_older,
    is_sharded_at_load,
    needs,
)
from hf_flexseq.config import FlexSeqArguments


def zero_stage(model: nn.Module, accelerator: Accelerator) -> int:
    """Return how much of the model's state is sharded, in DeepSpeed's numbering: 3 for FSDP."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return int(accelerator.state.deepspeed_plugin.zero_stage)
    if is_fully_sharded(model, accelerator):
        return 3
    return 0


def is_zero3(accelerator: Accelerator) -> bool:
    """Tell whether DeepSpeed shards parameters, too."""
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return is_deepspeed and accelerator.state.deepspeed_plugin.zero_stage == 3


def gather_experts_at_once(model: nn.Module, accelerator: Accelerator) -> None:
    """Have ZeRO-3 gather all parameters of a layer's experts at once. Called before accelerate
    prepares the model.

    DeepSpeed decides by counts of module calls when it frees parameters. Experts that run one by
    one call their activation once per chosen expert, and ranks choose others: one rank would
    gather parameters again that another has kept, and both would wait for ever.
    """
    if is_zero3(accelerator):
        _mark_experts(model)


def _mark_experts(model: nn.Module) -> None:
    from deepspeed.utils import set_z3_leaf_module

    for module in model.modules():
        if is_experts(module):
            set_z3_leaf_module(module, True)


def is_experts(module: nn.Module) -> bool:
    """Tell if a module holds all experts of a layer, by the name that transformers gives it."""
    return type(module).__name__.endswith("Experts")


def gathering_experts_at_once(args: Any) -> AbstractContextManager[None]:
    """Have ZeRO-3 do so with every model, too, that DeepSpeed prepares inside a block, as TRL has
    it prepare a reference while a trainer is made. args: the TrainingArguments."""
    if getattr(args, "deepspeed_plugin", None) is None:
        return nullcontext()
    import deepspeed

    initialize = deepspeed.initialize

    def with_marked_experts(args: Any = None, model: Any = None, **named: Any) -> Any:
        _mark_experts(model)
        return initialize(args, model, **named)

    return Patch(deepspeed, initialize=with_marked_experts)


def experts_gathered_apart(model: nn.Module) -> set[str]:
    """Return the classes of experts that ZeRO-3, which has prepared the model, does not gather at
    once."""
    from deepspeed.utils import z3_leaf_module

    found, modules = set(), [model]
    while modules:
        module = modules.pop()
        if z3_leaf_module(module):
            continue
        if is_experts(module):
            found.add(f"{type(module).__module__}.{type(module).__name__}")
        modules += module.children()
    return found


def is_fully_sharded(model: nn.Module, accelerator: Accelerator) -> bool:
    """Tell whether FSDP shards the model: by accelerate, by transformers, or by the user."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return True
    return has_sharded_modules(model)


def has_sharded_modules(model: nn.Module) -> bool:
    """Tell whether FSDP2 shards parts of the model already."""
    return any(hasattr(module, "set_requires_gradient_sync") for module in model.modules())


def is_fsdp2(model: nn.Module, accelerator: Accelerator) -> bool:
    """Tell whether FSDP2 shards, or will shard, the model, and keeps its share on the device."""
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        return plugin.fsdp_version == 2 and not is_offloaded
    # transformers may have made FSDP2 keep its share in the memory of the CPU.
    is_offloaded = getattr(distributed_config(model), "fsdp_cpu_offload", False)
    return has_sharded_modules(model) and not is_offloaded


def distributed_config(model: nn.Module) -> Any:
    """Return the DistributedConfig that transformers has loaded the model with, or None."""
    return getattr(getattr(model, "config", None), "distributed_config", None)


def replicas(model: nn.Module, accelerator: Accelerator) -> int:
    """Return the number of copies of the model's sharded state: 1, or the replicas of HSDP."""
    if accelerator.distributed_type == DistributedType.FSDP:
        parallelism = getattr(accelerator, "parallelism_config", None)
        return getattr(parallelism, "dp_replicate_size", 1) or 1
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            sizes = []
            for dimension, placement in enumerate(parameter.placements):
                if placement.is_replicate():
                    sizes.append(parameter.device_mesh.size(dimension))
            return math.prod(sizes)
    return 1


def expert_group_size(model: nn.Module) -> int:
    """Return how many neighbouring ranks hold the model's experts together; 1 if each has, or
    gathers, all of them."""
    return getattr(distributed_config(model), "ep_size", None) or 1


def is_tensor_parallel(model: nn.Module) -> bool:
    """Tell whether transformers has cut the layers themselves over ranks."""
    return (getattr(model, "tp_size", None) or 1) > 1


def stages(model: nn.Module) -> int:
    """Return into how many stages of a pipeline transformers has cut the model."""
    return getattr(distributed_config(model), "pp_size", None) or 1


def unsharded_class(module: nn.Module) -> type[Any]:
    """Return the class that `module` had before `fully_shard`, which makes FSDPLinear of
    Linear."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def reduces_each_batch(accelerator: Accelerator) -> bool:
    """Return True if gradients are to be reduced in every micro-batch (`sync_each_batch`)."""
    return bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))


# ---- lockstep


def resolve_sync(
    args: FlexSeqArguments,
    model: nn.Module,
    accelerator: Accelerator,
    *,
    lockstep: bool,
    is_ordered: bool,
) -> bool:
    """Return True if all ranks run every micro-batch together. Raises ValueError if sync='free'
    forbids it. lockstep: True if users' code needs it. is_ordered: True if transfers run in launch
    order."""
    reason = None
    is_sharded = is_fully_sharded(model, accelerator) or zero_stage(model, accelerator) >= 2
    if is_sharded or reduces_each_batch(accelerator) or lockstep:
        reason = (
            "needs ranks that run different numbers of micro-batches, but here they meet in every "
            "one (FSDP, experts over ranks, ZeRO-2/3, sync_each_batch, or a compute_loss of your "
            "own)"
        )
    elif is_ordered and _reduces_by_itself(accelerator):
        reason = (
            "needs one place in the plan where all ranks reduce gradients, but here each does so "
            "in its own last micro-batch (DeepSpeed, or a DDP comm_hook), which can hang on NCCL"
        )
    if reason is not None and args.sync == "free":
        raise ValueError(f"sync='free' {reason}: use sync='auto'")
    return reason is not None or args.sync == "lockstep"


def _reduces_by_itself(accelerator: Accelerator) -> bool:
    """Return True if DeepSpeed or a DDP hook reduces gradients, instead of `reduction.py`."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return True
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    return bool(hook != DDPCommunicationHookType.NO)


# ---- what transformers gets wrong


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
