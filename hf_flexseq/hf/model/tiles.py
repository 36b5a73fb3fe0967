"""Compute the MLPs of an attached model in as many tiles as the plan of a micro-batch says.

    find_mlps     which modules of the model's layers can be, and why others cannot
    priced_for    keeps planners from tiles that a model cannot have
    MlpTiles      replaces their forward on the instance, from the first micro-batch with tiles on

An MLP is not given the context of its micro-batch, but its layer is: a hook before the layer tells
its MLPs how many tiles there are. transformers checkpoints the forward of a layer without its
hooks, so that none runs before a replay, and another micro-batch may have run since. A replay
takes the number of the run that it repeats; `attention/remat.py` says how that is known. A run
whose plans have no tiles has neither the hook nor the forward.

Weights are there for all tiles:

    FSDP2     units are layers: a layer gathers its weights before its forward and its backward
    ZeRO-3    each linear layer gathers its own, in every call. So an MLP is made a leaf of
              DeepSpeed's, which gathers all weights inside of it at once, and what is inside is
              called without hooks. Both hold for micro-batches without tiles as well: DeepSpeed
              expects modules to run in the same order in every forward.

So the number of collectives does not depend on the number of tiles, nor on a rank's tokens.
"""

import logging
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel

from hf_flexseq.attention.remat import checkpointed_region
from hf_flexseq.base.patches import Patch
from hf_flexseq.cost import CostModel
from hf_flexseq.hf.model.facts import elements
from hf_flexseq.hf.model.mlp_trial import Place, UnknownMlps, text_layers, token_wise_places
from hf_flexseq.hf.model.noise import noise_of_module
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.memory.tiles import TokenWise, in_tiles
from hf_flexseq.plan import Plan
from hf_flexseq.steps.users_code import (
    is_known,
    users_backward_hooks,
    users_forward_hooks,
    users_modules,
)

logger = logging.getLogger(__name__)

# ---- which modules


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """A module of a layer that treats every token alone."""

    name: str
    """Its name in the text decoder."""
    layer: nn.Module
    module: nn.Module


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMlps:
    """The modules of a model that can be computed in tiles."""

    mlps: tuple[Mlp, ...]
    reasons: tuple[str, ...]
    """Why others cannot be, in words; each reason once."""


def find_mlps(model: PreTrainedModel) -> FoundMlps:
    """Return the modules of the layers of `model` that can be computed in tiles. The same on all
    ranks."""
    if _is_fsdp1(model):
        return FoundMlps(mlps=(), reasons=("FSDP version 1 puts views in the place of weights",))
    try:
        places = token_wise_places(model)
    except UnknownMlps as error:
        return FoundMlps(mlps=(), reasons=(str(error),))
    least = model.config.get_text_config().hidden_size ** 2 // 2
    mlps: list[Mlp] = []
    reasons: list[str] = []
    seen: set[nn.Module] = set()  # layers may share one
    for layer_name, layer in text_layers(model):
        for name, module in _at_places(layer, places):
            if sum(elements(parameter) for parameter in module.parameters()) < least:
                continue  # low rank: what is inside is narrow
            if module in seen:
                continue
            seen.add(module)
            reason = _reason_not_tiled(module)
            if reason is None:
                mlps.append(Mlp(name=f"{layer_name}.{name}", layer=layer, module=module))
            else:
                reasons.append(f"{name}: {reason}")
    if not mlps and not reasons:
        reasons.append("none of its layers' modules treats every token alone, but for experts")
    return FoundMlps(mlps=tuple(mlps), reasons=tuple(dict.fromkeys(reasons)))


def priced_for(cost: CostModel, model: PreTrainedModel) -> CostModel:
    """Return the cost model of a model, without tiles where none of its MLPs can have any."""
    activations = cost.activations
    if activations is None or not activations.mlp_share or find_mlps(model).mlps:
        return cost
    return replace(cost, activations=replace(activations, mlp_share=0.0))


def _is_fsdp1(model: nn.Module) -> bool:
    """Tell if FSDP version 1 has wrapped a model, or parts of it."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return True
    parameters = list(model.parameters())
    # Inside of a wrapper around all of the model they are marked, or not there.
    return not parameters or any(hasattr(one, "_fsdp_flattened") for one in parameters)


def _at_places(layer: nn.Module, places: frozenset[Place]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a layer that are of the classes of `places`, with their names in it."""
    for name, module in layer.named_modules():
        if Place(name, unsharded_class(module)) in places:
            yield name, module


def _reason_not_tiled(module: nn.Module) -> str | None:
    """Return why a module that treats tokens alone is not computed in tiles; None if it is."""
    noise = noise_of_module(module)
    if noise is not None:
        return f"it draws random numbers ({noise})"
    if any(isinstance(inner, FSDPModule) for inner in module.modules()):
        return "it is a unit of FSDP2's of its own, or has one inside"
    for find in (users_modules, users_forward_hooks, users_backward_hooks):
        for what in find(module):
            return f"code of yours would see its tiles ({what})"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks:
            return f"a hook on the gradient of {name} would see its tiles"
    for name, inner in module.named_modules():
        own = vars(inner).get("forward")
        if own is not None and not _is_own_method(own, inner):
            return f"the forward of {name or 'it'} was replaced"
    return None


def _is_own_method(forward: Any, module: nn.Module) -> bool:
    """Tell if a forward on an instance is a method of a library, bound to it."""
    is_bound = isinstance(forward, types.MethodType) and forward.__self__ is module
    return is_bound and is_known(forward)


# ---- in a run


class MlpTiles:
    """The MLPs of an attached model, from the first micro-batch that has tiles on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._is_attached = False
        self._attached = ExitStack()

    def attach_for(self, plan: Plan) -> None:
        """Let the micro-batches of a plan have their tiles, if any has them. Raises
        NotImplementedError for a model none of whose MLPs can be computed in tiles."""
        choices = [micro_batch.memory for micro_batch in plan.micro_batches]
        if any(choice is not None and choice.mlp_tiles > 1 for choice in choices):
            self.attach()

    def attach(self) -> None:
        """Let micro-batches have tiles from now on; see `attach_for`. A second call does
        nothing."""
        if self._is_attached:
            return
        found = find_mlps(self._model)
        name = type(self._model).__name__
        reasons = "; ".join(found.reasons)
        if not found.mlps:
            raise NotImplementedError(f"no MLP of {name} can be computed in tiles: {reasons}")
        logger.info(
            "%s: %d MLPs are computed in tiles where a micro-batch asks for them%s",
            name,
            len(found.mlps),
            f"; others are not: {reasons}" if reasons else "",
        )
        of_layers: dict[nn.Module, list[_TiledMlp]] = {}
        for mlp in found.mlps:
            tiled = _TiledMlp(mlp.module)
            if _is_zero3(mlp.module):
                self._attached.enter_context(_leaf(mlp.module))
            self._attached.enter_context(Patch(mlp.module, forward=tiled.forward))
            of_layers.setdefault(mlp.layer, []).append(tiled)
        for layer, of_layer in of_layers.items():
            hook = layer.register_forward_pre_hook(partial(_tell, of_layer), with_kwargs=True)
            self._attached.callback(hook.remove)
        self._is_attached = True

    def detach(self) -> None:
        """Give the MLPs their own forward back. A second call does nothing."""
        self._attached.close()
        self._is_attached = False


def _tell(mlps: "list[_TiledMlp]", layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Tell the MLPs of a layer that is about to run the tiles of the micro-batch."""
    choice = getattr(kwargs.get("seq_ctx"), "memory", None)
    for mlp in mlps:
        mlp.tiles = 1 if choice is None else choice.mlp_tiles


class _TiledMlp:
    """The forward of an MLP, in tiles."""

    def __init__(self, module: nn.Module) -> None:
        self.tiles = 1
        """Those of the micro-batch whose forward runs."""
        # by checkpointed region, more than one
        self._of_regions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._module = module
        self._former: Any = vars(module).get("forward")
        self._own_forward = module.forward
        self._is_leaf = _is_zero3(module)
        self._function = TokenWise(self._compute, self._weights)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand for the forward of the module: [..., tokens, hidden] -> the same shape."""
        (hidden,) = (*args, *kwargs.values())
        tiles = self._tiles_of_run()
        if tiles == 1:
            return self._compute(hidden)
        return in_tiles(self._function, hidden, tiles)

    def _tiles_of_run(self) -> int:
        """Return the tiles of the forward, or of the replay, that runs."""
        region = checkpointed_region()
        if region is None:
            return self.tiles
        if region.replays:
            return self._of_regions.get(region.frame, 1)
        if self.tiles > 1:
            self._of_regions[region.frame] = self.tiles
        return self.tiles

    def _compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the module's own forward on hidden [..., tokens, hidden] -> the same shape."""
        if not self._is_leaf:
            result: torch.Tensor = self._own_forward(hidden)
            return result
        result = _without_hooks(self._module, self._former)(hidden)
        return result

    def _weights(self) -> list[torch.Tensor]:
        return [weight for weight in self._module.parameters() if weight.requires_grad]


# ---- under ZeRO-3

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _is_zero3(module: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def _leaf(module: nn.Module) -> ExitStack:
    """Make DeepSpeed gather all weights inside of a module at once, until the returned stack is
    closed.

    DeepSpeed learns the order of modules in the first two micro-batches, and anew when it changes.
    If the first tiles come later, weights of one MLP stay gathered from forward to backward: it
    does not forget what it had found out about when to free them.
    """
    from deepspeed.utils import set_z3_leaf_module, z3_leaf_module  # there is one here

    undone = ExitStack()
    undone.callback(set_z3_leaf_module, module, z3_leaf_module(module))
    set_z3_leaf_module(module, True)
    return undone


def _without_hooks(module: nn.Module, forward: types.MethodType | None = None) -> nn.Module:
    """Return a module with the weights and attributes of `module`, whose modules have no hooks.
    forward: a method of `module` to run instead of its class's."""
    twin: nn.Module = object.__new__(type(module))
    inside = vars(twin)
    inside.update(vars(module))
    inside.pop("forward", None)
    if forward is not None:
        inside["forward"] = types.MethodType(forward.__func__, twin)
    inside.update({kind: OrderedDict() for kind in _HOOKS})
    inside["_modules"] = {
        name: child and _without_hooks(child, vars(child).get("forward"))
        for name, child in module._modules.items()
    }
    return twin
