"""FSDP2 in the steps of a whole model: which policy each step gets, and that the units follow it.

1. `fsdp_figures`, when a model is attached: what a policy may cost on this machine.
2. `SteppedFsdp.of_step`, in each step: the policy that fits beside the step's plan, followed by
   the units of the model.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import GRADIENT_BYTES, MEMORY_FRACTION
from hf_flexseq.cost.sharding import PLAIN, TRIPS, FsdpFigures, FsdpPolicy, trip_seconds
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.model.facts import (
    gathered_itemsize,
    is_fsdp2,
    model_shape,
    replicas,
    trained_elements,
)
from hf_flexseq.plan import Plan
from hf_flexseq.profiler.estimate import device_memory_bytes
from hf_flexseq.steps.sharding import FsdpUnits

logger = logging.getLogger(__name__)

BeforeLast = Callable[[], AbstractContextManager[Any]]  # surrounds a micro-batch


def reduces_each_batch(accelerator: Accelerator) -> bool:
    """Return whether the user wants gradients reduced in every micro-batch, for the sake of memory
    (accelerate's `sync_each_batch`)."""
    return bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))


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
    # 1. memory beside the state
    memory_bytes = device_memory_bytes(accelerator.device, topology.ranks_per_node)
    budget_bytes = min(cost.budget_bytes, MEMORY_FRACTION * memory_bytes)
    state_bytes = cost.state_bytes + cost.sharded_state_bytes / topology.world_size
    # 2. trips, if they are in the cost model's constant at all
    shape = model_shape(model)
    trip_s = trip_seconds(
        cost,
        moved_bytes=shape.params * shape.dtype_bytes,
        topology=topology,
        replicas=copies,
    )
    if TRIPS * trip_s > cost.micro_batch_s:
        trip_s = 0.0
    own_figures = FsdpFigures(
        free_bytes=budget_bytes - state_bytes,
        token_bytes=cost.token_bytes,
        parameter_bytes=float(shape.params * gathered_itemsize(model, accelerator)),
        gradient_bytes=float(trained_elements(model) * max(GRADIENT_BYTES, shape.dtype_bytes)),
        trip_s=trip_s,
    )
    return FsdpFigures.from_record(communicator.host.broadcast_value(own_figures.to_record()))


class SteppedFsdp:
    """Chooses the policy of each step, and makes a model's units follow it."""

    def __init__(
        self, figures: FsdpFigures | None, communicator: Communicator, *, over_replicas: bool
    ) -> None:
        """figures: None for the plain policy in every step. over_replicas: whether every
        micro-batch is to sum its gradients over replicas, too."""
        self.figures = figures
        self._communicator = communicator
        self._over_replicas = over_replicas
        self.taken: set[FsdpPolicy] = set()  # by the steps so far
        # of the model that the last step ran: to find them is a walk through all of its modules
        self._units: tuple[nn.Module, FsdpUnits] | None = None

    @contextmanager
    def of_step(self, plan: Plan, model: nn.Module) -> Iterator[BeforeLast]:
        """Surround all micro-batches of a step; the block gets what surrounds each of them but
        the last. A model without units is left alone."""
        units = self._units_of(model)
        policy = self._chosen(plan)
        with units.whole_step(policy):
            yield partial(units.before_last, policy, over_replicas=self._over_replicas)

    def forget_model(self) -> None:
        """Let go of the model that the last step ran."""
        self._units = None

    def _units_of(self, model: nn.Module) -> FsdpUnits:
        """Return the units of a model."""
        if self._units is None or self._units[0] is not model:
            self._units = (model, FsdpUnits(model))
        return self._units[1]

    def _chosen(self, plan: Plan) -> FsdpPolicy:
        """Return the policy of a step; log it when it is the first of its kind."""
        if self.figures is None:
            return PLAIN
        policy = self.figures.beside(plan, self._communicator.world_size)
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
