"""Evaluation on planned batches: a loader for the Trainer's loop, and a loss that means something.

The Trainer averages the means of its batches, which changes with batch size and world size. Here
the loss is summed over target tokens, and the loader does not repeat samples to fill its last
batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine.loaders import (
    BEFORE_END,
    LoaderProxy,
    as_drawn,
    batches_on_host,
    without_repeats,
)
from hf_flexseq.steps.prefetch import Step
from hf_flexseq.steps.step_items import StepItem, step_items

# Yields every batch of a loader as a step, until no rank has data left.
PlanSteps = Callable[[Iterable[Mapping[str, Any]]], Iterator[Step]]


def once_each(dataloader: Any, plan_steps: PlanSteps) -> Iterator[Step]:
    """Yield the batches of a loader as steps, every sample once. Collective over the world."""
    with without_repeats(dataloader), batches_on_host(dataloader):
        yield from plan_steps(dataloader)


class PlannedBatches(LoaderProxy):
    """A dataloader whose batches are planned steps. Their losses are no samples', of which
    accelerate would cut repeats off where a rank's own loader ends."""

    def __init__(self, dataloader: Any, plan_steps: PlanSteps, accelerator: Accelerator) -> None:
        super().__init__(dataloader)
        self._plan_steps = plan_steps
        self._accelerator = accelerator

    def __iter__(self) -> Iterator[StepItem]:
        for step in once_each(self.dataloader, self._plan_steps):
            with as_drawn(BEFORE_END, self._accelerator):
                yield from step_items(step, 1)


class EvaluationLoss:
    """Sums the losses of evaluation steps over their target tokens."""

    def __init__(self) -> None:
        # of loss x targets, on this rank: first on the host, then where the losses are
        self._sum = torch.zeros((), dtype=torch.float64)
        self._targets = 0  # of all ranks

    def add(self, loss: torch.Tensor, targets: int) -> None:
        """Add this rank's share of a step's loss, a scalar. targets: of all ranks."""
        self._sum = self._sum + loss.double() * targets
        self._targets += targets

    def mean(self, communicator: Communicator) -> float:
        """Return the mean loss over all targets of all ranks. Collective over the world."""
        total = self._sum.cpu().clone()  # asked again, it is still of this rank
        communicator.cpu_group.all_reduce(total)  # [] -> []
        if not self._targets:
            return math.nan
        return float(total) / communicator.world_size / self._targets


# What accelerate's `prepare_model` may set on the model itself: its forward under mixed precision,
# the previous one, and a mark of the preparation.
_SET_BY_PREPARE = ("forward", "_original_forward", "_is_accelerate_prepared")


@contextmanager
def left_unprepared(trainer: Any) -> Iterator[None]:
    """Take back, after this block, the attributes that an evaluation before training leaves on the
    model: accelerate would take the model for prepared and never wrap it in DDP, so that every
    rank would train a model of its own.

    Only attributes set meanwhile are taken back. `accelerator.unwrap_model` would undo too much:
    it goes on to the innermost forward, past the decorators of transformers and the forward that
    TRL puts on a model.
    """
    accelerator = trainer.accelerator
    is_sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    is_first = not is_sharded and not accelerator._models  # nothing was prepared for training yet
    attributes = vars(trainer.model)
    before = {name: attributes[name] for name in _SET_BY_PREPARE if name in attributes}
    try:
        yield
    finally:
        if is_first and not trainer.is_in_train:
            for name in _SET_BY_PREPARE:
                attributes.pop(name, None)
            attributes.update(before)
            accelerator._models.clear()
