"""LoRA on experts that transformers has spread over ranks (`target_parameters` of PEFT).

PEFT makes one adapter for all experts of a layer, of any parameter [experts, ...]:

    lora_A  [experts * r, in], by expert       lora_B  [out, r * experts], by number in r

and adds its product to the parameter while the layer runs. On a rank that has some experts only,
the two do not fit. So the adapter is spread as its experts are:

1. `ExpertAdapters` gives all ranks rank 0's values, and leaves each the rows and columns of its
   own experts, as DTensors on the mesh of the expert group. PEFT saves these whole, and a whole
   adapter is read into them. An optimizer that was made before gets them (`put_into`). An adapter
   that PEFT adds later is spread at once; ranks with the same experts get the values of the first
   of them when the model is attached again.
2. In a forward, `SpreadParamWrapper` adds the product to what FSDP2 has gathered of the rank's
   experts.
3. `ExpertAdapters.averaged` sums gradients over the ranks that have the same experts, and divides
   them by the number of all ranks, as FSDP2 does with those of other parameters. An expert serves
   the tokens of its whole expert group, so its rank's gradient is a sum over that group already.

Rejected: an adapter of all experts on every rank, of which each uses its own part. It needs as
many times the memory for weights, gradients and the optimizer as an expert group has ranks.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hf_flexseq.base.patches import Patch
from hf_flexseq.base.versions import SPREAD_ADAPTERS_FROM, is_older, needs
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.reduction import averaged_gradients, local
from hf_flexseq.distributed.transport import RankGroup
from hf_flexseq.hf.model.experts import ADAPTED, adapted_experts, is_spread
from hf_flexseq.hf.model.facts import EXPERT_GROUP
from hf_flexseq.hf.model.sharding import expert_group_size

_ADDED_TO = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FORMER = "_flexseq_former_weight"  # where a layer keeps the parameter that was replaced


class SpreadParamWrapper(ParamWrapper):
    """PEFT's wrapper of a parameter of experts, of which this rank has some."""

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter, and leave this rank its part of it; of one without values yet, and
        beside experts that FSDP2 has gathered, `ExpertAdapters` does."""
        super().update_layer(adapter_name, *args, **kwargs)
        mesh = _expert_group(self)
        for linear, placement in _parts(self, adapter_name):
            if mesh is not None and not linear.weight.is_meta:
                _leave_own_part(linear, mesh, placement)

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """Add adapters to the parameter while the layer inside runs its forward, when FSDP2 has
        gathered the rank's experts."""
        names = [name for name in active_adapters if name in self.lora_A]
        layer = self.get_base_layer()
        forward = layer.forward

        def adapted(*args: Any, **kwargs: Any) -> Any:
            gathered = layer._parameters[self.parameter_name]
            layer._parameters[self.parameter_name] = self._adapted(gathered, names)
            try:
                return forward(*args, **kwargs)
            finally:
                layer._parameters[self.parameter_name] = gathered

        with Patch(layer, forward=adapted):
            yield

    def _adapted(self, gathered: torch.Tensor, names: list[str]) -> torch.Tensor:
        """Return this rank's experts with adapters: [own experts, ...]."""
        weight = local(gathered)
        for name in names:
            if not isinstance(self.lora_A[name].weight, DTensor):
                raise ValueError(
                    f"the adapter {name!r} was added after the model was attached: attach the "
                    "model again, as a Trainer does when it trains or evaluates"
                )
            a = local(self.lora_A[name].weight).to(weight.dtype)  # [own experts * r, in]
            b = local(self.lora_B[name].weight).to(weight.dtype)  # [out, r * own experts]
            a = a.reshape(len(weight), -1, a.shape[-1])  # [own experts, r, in]
            b = b.reshape(len(b), -1, len(weight)).permute(2, 0, 1)  # [own experts, out, r]
            # [own experts, out, in], or transposed, as the layer has it
            left, right = (b, a) if self._did_swap_in_out_features else (a.mT, b.mT)
            with torch.autocast(device_type=weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, left, right, alpha=self.scaling[name])
        return weight

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            f"an adapter on {self.parameter_name} of experts that DistributedConfig has spread "
            "over ranks is not merged there: save the adapter, load it with the model in one "
            "process, and merge it there"
        )


# By this name PEFT knows a wrapper that takes a further adapter.
SpreadParamWrapper.__name__ = ParamWrapper.__name__


def unsuitable_adapters(model: nn.Module) -> str | None:
    """Return why an adapter on spread experts of `model` would not be exact; None if all would."""
    for name in adapted_experts(model):
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part != ADAPTED:
                continue
            wrapper = model.get_submodule(".".join(parts[:place]))
            reason = unsuitable_adapter(wrapper)
            if reason is None and is_older("peft", SPREAD_ADAPTERS_FROM):
                reason = f"to save it, {needs('peft', SPREAD_ADAPTERS_FROM)}"
            if reason is not None:
                layer = ".".join(one for one in parts[:place] if one != ADAPTED)
                adapted = getattr(wrapper, "parameter_name", parts[-1])
                return (
                    f"ep_size={expert_group_size(model)} with an adapter on {layer}.{adapted}: "
                    f"{reason}; leave it out, or set ep_size=1"
                )
    return None


def unsuitable_adapter(wrapper: nn.Module) -> str | None:
    """Return why `wrapper`, which PEFT has put around spread experts, is none that is spread; None
    if it is one."""
    if not isinstance(wrapper, ParamWrapper):
        return f"PEFT's {type(wrapper).__name__} does not know that ranks have different experts"
    parameter = wrapper.get_param()
    if parameter.ndim != 3:
        return "an adapter of a bias has no part of its own for each expert"
    if parameter.dtype not in _ADDED_TO:
        return f"nothing can be added to experts that are quantized ({parameter.dtype})"
    return None


# ---- the adapters of a model


class ExpertAdapters:
    """The adapters on spread experts of one model."""

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        """Spread those that are not spread yet. Collective over the world."""
        self._communicator = communicator
        self._weights: list[Any] = []
        self._replaced: dict[nn.Parameter, Any] = {}  # weights of now, by those of before
        self._group: RankGroup | None = None  # ranks that have the same experts
        for module in model.modules():
            if isinstance(module, ParamWrapper) and _expert_group(module) is not None:
                self._spread(module, _expert_group(module))

    def _spread(self, wrapper: Any, mesh: DeviceMesh) -> None:
        """Leave a rank its part of the adapters of a parameter. mesh: of its expert group."""
        wrapper.__class__ = SpreadParamWrapper
        self._group = _ranks_of_same_experts(mesh.size(), self._communicator)
        for name in wrapper.lora_A:
            for linear, placement in _parts(wrapper, name):
                self._make_alike(linear.weight.data)
                if not isinstance(linear.weight, DTensor):
                    _leave_own_part(linear, mesh, placement)
                self._replaced[vars(linear)[_FORMER]] = linear.weight
                self._weights.append(linear.weight)

    def _make_alike(self, weight: torch.Tensor) -> None:
        """Give all ranks rank 0's values of a whole weight, and ranks with the same experts the
        same ones of a spread weight. Collective over the world."""
        is_whole = not isinstance(weight, DTensor)
        ranks = self._communicator.open_world() if is_whole else self._group
        if ranks is not None:
            ranks.broadcast(local(weight))

    def put_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the spread weights to an optimizer that was made before they were spread."""
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(one, one) for one in group["params"]]

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context for a step; afterwards gradients are those of all ranks' losses,
        divided by the number of ranks. Collective over the world."""
        trained = [weight for weight in self._weights if weight.requires_grad]
        return averaged_gradients(trained, self._group, self._communicator.world_size)


def _expert_group(wrapper: Any) -> DeviceMesh | None:
    """Return the mesh of the ranks over which a wrapped parameter's experts lie; None if they are
    not spread."""
    data: Any = wrapper.get_param().data
    if isinstance(data, DTensor) and is_spread(data):
        return data.device_mesh[EXPERT_GROUP]
    return None


def _ranks_of_same_experts(ep_size: int, communicator: Communicator) -> RankGroup | None:
    """Return the group of the ranks with the same experts as this one; None if no other has them.
    Collective over the world at first."""
    world_size = communicator.world_size
    if ep_size == world_size:
        return None
    parts = [range(first, world_size, ep_size) for first in range(ep_size)]
    return communicator.transport.open_group(parts)


def _parts(wrapper: Any, name: str) -> Iterator[tuple[nn.Linear, Placement]]:
    """Yield the two matrices of an adapter, and how each is spread."""
    yield wrapper.lora_A[name], Shard(0)
    yield wrapper.lora_B[name], _StridedShard(1, split_factor=wrapper.r[name])


def _leave_own_part(linear: nn.Linear, mesh: DeviceMesh, placement: Placement) -> None:
    """Leave a rank its part of a weight, which all ranks have whole."""
    weight = linear.weight
    with torch.no_grad():
        part = distribute_tensor(weight.data, mesh, [placement], src_data_rank=None)
        part = part.clone()  # a share of rows is a view of all
    linear.weight = nn.Parameter(part, requires_grad=weight.requires_grad)
    weight.data = weight.data.new_empty(0)
    vars(linear)[_FORMER] = weight  # an optimizer may refer to it
    linear.register_load_state_dict_pre_hook(_take_own_part)


def _take_own_part(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Replace a whole weight that is about to be loaded by this rank's part of it."""
    key = f"{prefix}weight"
    stored = state.get(key)
    if stored is None or isinstance(stored, DTensor):
        return
    own: Any = module.weight
    mesh = own.device_mesh
    state[key] = distribute_tensor(
        stored.to(mesh.device_type), mesh, own.placements, src_data_rank=None
    )
