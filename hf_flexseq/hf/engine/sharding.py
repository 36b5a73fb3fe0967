"""FSDP2 in the steps of a whole model: the policy of each step, and the units that follow it.

1. `fsdp_figures`, when a model is attached: the cost of each policy on this machine.
2. `FsdpPolicies.of_step`, in each step: the policy that fits next to the step's plan, followed by
   the units of the model, the modules that FSDP2 gathers and reduces each on its own.

    gathers          FSDP2 frees a unit's parameters after its forward and after its backward. A
                     policy that keeps them lets it do neither before the last backward, which
                     frees all of them, so that the optimizer meets sharded parameters.
    reductions       FSDP2 scatters a unit's gradients in each backward. A policy that reduces once
                     lets whole gradients add up until the last one.
    replicas (HSDP)  scattered gradients are summed over replicas by the last micro-batch, under
                     any policy: waiting costs no memory.

All ranks must follow the same policy: its transfers are collectives.

Rejected: the Trainer's and accelerate's own contexts for accumulation. These reduce once whatever
memory there is, keep no parameters, and see one batch where a plan has several micro-batches.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import GRADIENT_BYTES, MEMORY_FRACTION
from hf_flexseq.cost.sharding import (
    PLAIN,
    TRIPS,
    FsdpFigures,
    FsdpPolicy,
    gathered_params,
    trip_seconds,
)
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.model.facts import gathered_itemsize, model_shape, trained_elements
from hf_flexseq.hf.model.sharding import expert_group_size, is_fsdp2, reduces_each_batch, replicas
from hf_flexseq.memory.device import device_memory_bytes
from hf_flexseq.plan import Plan
from hf_flexseq.steps.micro_batches import BeforeLast

logger = logging.getLogger(__name__)


def fsdp_figures(
    model: nn.Module, accelerator: Accelerator, communicator: Communicator, cost: CostModel
) -> FsdpFigures | None:
    """Return what FSDP2's policies cost for `model`; None where it does not shard the model, or
    the user asks for little memory, by `sync_each_batch` or by keeping shares on the CPU.
    Collective over the world.

    A cost model may be of another machine: memory counts as far as the device really has it.
    All ranks must choose alike, and their devices may differ: rank 0's figures count.
    """
    topology = communicator.topology
    copies = replicas(model, accelerator)
    if not is_fsdp2(model, accelerator) or copies == topology.world_size:
        return None
    if reduces_each_batch(accelerator):
        return None
    # 1. memory that the state leaves
    memory_bytes = device_memory_bytes(accelerator.device, topology.ranks_per_node)
    budget_bytes = min(cost.budget_bytes, MEMORY_FRACTION * memory_bytes)
    state_bytes = cost.state_bytes + cost.sharded_state_bytes / topology.world_size
    # 2. trips, if they are in the cost model's constant at all
    shape = model_shape(model)
    shards = topology.world_size // copies
    gathered = gathered_params(shape, shards, expert_group_size(model))
    gathered_bytes = gathered * gathered_itemsize(model, accelerator)
    reduced = trained_elements(model) * gathered // shape.params  # the trained ones of these
    trip_s = trip_seconds(
        cost,
        moved_bytes=gathered_bytes,
        topology=topology,
        replicas=copies,
    )
    if TRIPS * trip_s > cost.micro_batch_s:
        trip_s = 0.0
    own_figures = FsdpFigures(
        free_bytes=budget_bytes - state_bytes,
        parameter_bytes=float(gathered_bytes),
        gradient_bytes=float(reduced * max(GRADIENT_BYTES, shape.dtype_bytes)),
        trip_s=trip_s,
    )
    return FsdpFigures.from_record(communicator.cpu_group.broadcast_value(own_figures.to_record()))


class FsdpPolicies:
    """Chooses the policy of each step, and makes a model's units follow it."""

    def __init__(
        self,
        figures: FsdpFigures | None,
        communicator: Communicator,
        *,
        over_replicas: bool,
    ) -> None:
        """figures: None for the plain policy. over_replicas: True to sum over replicas always."""
        self.figures = figures
        self._communicator = communicator
        self._over_replicas = over_replicas
        self.taken: set[FsdpPolicy] = set()  # by the steps so far

    def of_step(
        self, plan: Plan, model: nn.Module, cost: CostModel, held_tokens: int
    ) -> AbstractContextManager[BeforeLast]:
        """Return the context of a step; the block gets the context of each micro-batch but the
        last. cost: by which the step was planned. held_tokens: tokens whose memory images take."""
        policy = self._chosen(plan, cost, held_tokens)
        units = units_of(model)
        return self.whole_step(policy, units) if units else nullcontext(nullcontext)

    @contextmanager
    def whole_step(self, policy: FsdpPolicy, units: Sequence[FSDPModule]) -> Iterator[BeforeLast]:
        """Surround a step: kept parameters are not freed after a forward. See `of_step`."""
        kept = [] if policy.regathers else freed_after_forward(units)
        for unit in kept:
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield partial(self.before_last, policy, units)
        finally:
            for unit in kept:
                unit.set_reshard_after_forward(True, recurse=False)

    @contextmanager
    def before_last(self, policy: FsdpPolicy, units: Sequence[FSDPModule]) -> Iterator[None]:
        """Surround a micro-batch before the step's last; the last one does the transfers that the
        policy does once. Afterwards units reduce and free in their backward, as FSDP2 does by
        itself."""
        over_replicas = policy.reduces_each and self._over_replicas
        for unit in units:
            unit.set_reshard_after_backward(policy.regathers, recurse=False)
            unit.set_requires_gradient_sync(policy.reduces_each, recurse=False)
            unit.set_requires_all_reduce(over_replicas, recurse=False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_reshard_after_backward(True, recurse=False)
                unit.set_requires_gradient_sync(True, recurse=False)

    def _chosen(self, plan: Plan, cost: CostModel, held_tokens: int) -> FsdpPolicy:
        """Return the policy of a step; log it when it is the first of its kind."""
        if self.figures is None:
            return PLAIN
        policy = self.figures.beside(
            plan, self._communicator.world_size, cost, held_tokens=held_tokens
        )
        if policy not in self.taken and self._communicator.rank == 0:
            logger.info(
                "FSDP2: %s in steps such as this one of %d micro-batch(es): that holds %.2f GiB "
                "between them, beside their tokens, of %.2f GiB that the state leaves",
                policy,
                len(plan.micro_batches),
                self.figures.held_bytes(policy) / 2**30,
                self.figures.free_bytes / 2**30,
            )
        self.taken.add(policy)
        return policy


def units_of(model: nn.Module) -> list[FSDPModule]:
    """Return the units of a model, outer ones first; one that FSDP2 does not shard has none."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def freed_after_forward(units: Sequence[FSDPModule]) -> list[FSDPModule]:
    """Return those of a model's units whose parameters FSDP2 frees after the forward; torch has no
    getter."""
    inner: set[nn.Module] = set()
    found = []
    for unit in units:
        state = fully_shard.state(unit)
        is_outermost = unit not in inner
        inner.update(unit.modules())
        if state._auto_reshard_after_forward and is_outermost:
            continue  # FSDP2 decides in the first forward not to free it
        if any(group.post_forward_mesh_info is not None for group in parameter_groups(state)):
            found.append(unit)
    return found


def parameter_groups(state: Any) -> list[Any]:
    """Return a unit's groups of parameters from its state; there are none without parameters."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # before torch 2.13 a unit has one group at most
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
