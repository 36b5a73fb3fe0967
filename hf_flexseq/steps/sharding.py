"""Make FSDP2 follow a policy during the micro-batches of one step.

    gathers          FSDP2 frees a unit's parameters after its forward and after its backward. A
                     policy that keeps them lets it do neither before the last backward, which
                     frees all of them, so that the optimizer meets sharded parameters.
    reductions       FSDP2 scatters a unit's gradients in each backward. A policy that reduces once
                     lets gradients add up, whole, until the last one.
    replicas (HSDP)  scattered gradients are summed over replicas by the last micro-batch, under
                     any policy: waiting costs no memory, since they take the place of the sums.

All ranks must follow the same policy: its trips are collectives.

Rejected: leaving a step to the Trainer's and accelerate's own contexts for accumulation. These
reduce once whatever memory there is, know no parameters that are kept, and see one batch where a
plan has several micro-batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_flexseq.cost.sharding import FsdpPolicy


class FsdpUnits:
    """The modules of a model that FSDP2 gathers and reduces each on its own."""

    __slots__ = ("_outermost", "_units")

    def __init__(self, model: nn.Module) -> None:
        """Find the units; a model that FSDP2 does not shard has none."""
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        inner: set[nn.Module] = set()
        for unit in self._units:
            inner.update(module for module in unit.modules() if module is not unit)
        self._outermost = [unit for unit in self._units if unit not in inner]

    @contextmanager
    def whole_step(self, policy: FsdpPolicy) -> Iterator[None]:
        """Surround all micro-batches of a step: parameters that are kept are not freed after a
        forward."""
        kept: list[FSDPModule] = []
        if not policy.regathers:
            kept = [unit for unit in self._units if self._frees_after_forward(unit)]
        for unit in kept:
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit in kept:
                unit.set_reshard_after_forward(True, recurse=False)

    def _frees_after_forward(self, unit: FSDPModule) -> bool:
        """Return whether FSDP2 frees the unit's parameters after its forward. torch has a public
        way to set this, and none to read it."""
        state = fully_shard.state(unit)
        if state._auto_reshard_after_forward and unit in self._outermost:
            return False  # so FSDP2 decides in the first forward
        return any(group.post_forward_mesh_info is not None for group in parameter_groups(state))

    @contextmanager
    def before_last(self, policy: FsdpPolicy, *, over_replicas: bool = False) -> Iterator[None]:
        """Surround a micro-batch that is not the step's last: what the policy does once is left
        to that one. Afterwards units reduce and free in their backward, as FSDP2 does by itself.

        over_replicas: whether this micro-batch, too, sums scattered gradients over replicas, as
        the user may ask.
        """
        for unit in self._units:
            unit.set_reshard_after_backward(policy.regathers, recurse=False)
            unit.set_requires_gradient_sync(policy.reduces_each, recurse=False)
            unit.set_requires_all_reduce(policy.reduces_each and over_replicas, recurse=False)
        try:
            yield
        finally:
            for unit in self._units:
                unit.set_reshard_after_backward(True, recurse=False)
                unit.set_requires_gradient_sync(True, recurse=False)


def parameter_groups(state: Any) -> list[Any]:
    """Return a unit's groups of parameters from its state; there are none without parameters."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # before torch 2.13 a unit has one group at most
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
