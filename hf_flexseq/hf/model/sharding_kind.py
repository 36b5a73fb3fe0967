"""How a model is divided between ranks: by accelerate, by transformers, or by the user."""

import math
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor


def zero_stage(model: nn.Module, accelerator: Accelerator) -> int:
    """Return how much of the model's state is sharded, in DeepSpeed's numbering: 3 for FSDP."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return int(accelerator.state.deepspeed_plugin.zero_stage)
    if is_fully_sharded(model, accelerator):
        return 3
    return 0


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
