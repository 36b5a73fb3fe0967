"""Experts that transformers has spread over ranks (`DistributedConfig(ep_size=...)`).

Each rank of an expert group holds some experts of every layer. Ranks of one group are neighbours,
[g * ep_size, (g + 1) * ep_size), and FSDP shards a rank's experts over the efsdp_size groups of a
replica. A layer sends its tokens to the ranks of their experts, and gets the results back. It
takes different tokens from each rank, so groups that share sequences, and ranks without tokens,
need no change in it.

    spreads_experts         tells whether a model's are
    unsuitable_experts      says why a model would not be exact
    adapted_experts         names those that PEFT has put adapters around (`expert_adapters.py`)
    right_gradients         corrects the gradients of experts where torch divides them twice

An expert's gradient is a sum over all ranks, which transformers has FSDP2 divide by their number.
torch does so twice where FSDP2 has nothing to scatter, one expert group to a replica, and reduces
in another dtype than float32 and bfloat16: `foreach_reduce` divides before and after the reduction
in such dtypes, and once more for a group of one rank. The square root of the number, applied
twice, is right there. A trial finds out whether the installed torch does this.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_flexseq.hf.model.facts import EXPERT_GROUP
from hf_flexseq.hf.model.sharding import distributed_config, expert_group_size

_SAME_EXPERTS = "efsdp"  # transformers' name of a dimension of meshes
ADAPTED = "base_layer"  # PEFT's name for the layer that an adapter wraps
_TRIED_FACTOR = 4.0

_divides_twice: dict[tuple[str, torch.dtype], bool] = {}  # trials by type of device and dtype


def spreads_experts(model: nn.Module) -> bool:
    """Tell if transformers has spread the experts of `model` over ranks."""
    return expert_group_size(model) > 1 and next(_spread_parameters(model), None) is not None


def unsuitable_experts(model: PreTrainedModel) -> str | None:
    """Return why `model`, as transformers has spread it over ranks, would not be exact; None if it
    would be."""
    ep_size = expert_group_size(model)
    if ep_size == 1 or spreads_experts(model):
        return None
    rules = [f"{name}: {style}" for name, style in model.ep_plan.items()]
    return (
        f"ep_size={ep_size}: its ep_plan ({', '.join(rules)}) has no ep_dispatch_experts "
        "for a module of the model, so no tokens would be exchanged; give DistributedConfig such "
        "an ep_plan, or set ep_size=1"
    )


def adapted_experts(model: nn.Module) -> list[str]:
    """Return the names of spread parameters that PEFT has put an adapter around."""
    return [name for name, _ in _spread_parameters(model) if ADAPTED in name.split(".")]


def _spread_parameters(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Yield the parameters, with their names, whose experts are spread over ranks: [experts, ...]
    as a whole. Adapters on them are not among these."""
    for name, parameter in model.named_parameters():
        data: Any = parameter.data
        if isinstance(data, DTensor) and is_spread(data):
            yield name, data


def is_spread(data: DTensor) -> bool:
    """Tell if transformers has spread the experts of a parameter over ranks."""
    names = data.device_mesh.mesh_dim_names or ()
    return EXPERT_GROUP in names and _SAME_EXPERTS in names


# ---- gradients


@contextmanager
def right_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Let torch divide the gradients of spread experts once inside the block, where it would do so
    twice."""
    config = distributed_config(model)
    if not spreads_experts(model) or config.efsdp_size > 1:
        yield
        return
    divided: list[FSDPModule] = []
    for unit, data in _expert_units(model).items():
        # transformers' mixed precision reduces in float32
        dtype = torch.float32 if config.fsdp_mixed_precision else data.dtype
        if _is_divided_twice(data.device_mesh[_SAME_EXPERTS], dtype):
            divided.append(unit)
    for unit in divided:
        unit.set_gradient_divide_factor(math.sqrt(config.dp_size))
    try:
        yield
    finally:
        for unit in divided:
            unit.set_gradient_divide_factor(float(config.dp_size))


def _expert_units(model: nn.Module) -> dict[FSDPModule, DTensor]:
    """Return the units of FSDP2 that hold spread experts, each with one of its parameters."""
    modules = dict(model.named_modules())
    units: dict[FSDPModule, DTensor] = {}
    for name, data in _spread_parameters(model):
        owner = name
        unit: nn.Module | None = None
        while not isinstance(unit, FSDPModule):
            owner = owner.rpartition(".")[0]
            unit = modules[owner]
        units[unit] = data
    return units


def _is_divided_twice(mesh: DeviceMesh, dtype: torch.dtype) -> bool:
    """Tell whether FSDP2 divides gradients of `dtype` by its factor twice on a mesh of one rank.
    Raises RuntimeError where it does something else."""
    key = (mesh.device_type, dtype)
    if key not in _divides_twice:
        divisor = _tried_divisor(mesh, dtype)
        if divisor not in (_TRIED_FACTOR, _TRIED_FACTOR**2):
            raise RuntimeError(
                f"torch {torch.__version__} divides gradients in {dtype} by {divisor:g} where "
                f"FSDP2 is told {_TRIED_FACTOR:g}, on one rank: gradients of experts would be "
                "wrong; use another version of torch"
            )
        _divides_twice[key] = divisor != _TRIED_FACTOR
    return _divides_twice[key]


def _tried_divisor(mesh: DeviceMesh, dtype: torch.dtype) -> float:
    """Return by what FSDP2 divides a gradient of `dtype` on a mesh of one rank if it is told
    _TRIED_FACTOR."""
    # without an initialization, which would draw from the random numbers of the run
    module = nn.utils.skip_init(nn.Linear, 1, 1, bias=False, dtype=dtype, device=mesh.device_type)
    fully_shard(module, mesh=mesh)
    module.set_gradient_divide_factor(_TRIED_FACTOR)
    with torch.enable_grad():
        module(torch.ones(1, 1, dtype=dtype, device=mesh.device_type)).sum().backward()
    gradient: Any = module.weight.grad
    return 1.0 / float(gradient.full_tensor())
