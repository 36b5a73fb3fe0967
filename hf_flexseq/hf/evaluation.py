"""Evaluation on planned batches: what the Trainer's loop iterates over, and a loss that means
something.

The Trainer averages the means of its batches, which changes with batch size and world size. Here
the loss is summed over target tokens, and the loader does not repeat samples to fill its last
batch.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.loaders import LoaderProxy, without_repeats
from hf_flexseq.steps.step import step_items


class PlannedBatches(LoaderProxy):
    """A dataloader whose batches are planned steps."""

    def __init__(self, engine: FlexSeqEngine, dataloader: Any) -> None:
        super().__init__(dataloader)
        self._engine = engine

    def __iter__(self) -> Iterator[Any]:
        with without_repeats(self.dataloader):
            for step in self._engine.evaluation_steps(self.dataloader):
                yield from step_items(step, 1)


class EvaluationLoss:
    """Sums the losses of evaluation steps over their target tokens."""

    def __init__(self) -> None:
        self._sum = torch.zeros((), dtype=torch.float64)
        self._targets = 0

    def add(self, loss: torch.Tensor, targets: int) -> None:
        """`loss`: this rank's share of a step, scaled so that the mean over ranks is the mean over
        `targets`."""
        self._sum += loss.double().cpu() * targets
        self._targets += targets

    def mean(self, communicator: Communicator) -> float:
        """The mean over all target tokens of all ranks; nan without any. Collective."""
        if communicator.control is not None:
            dist.all_reduce(self._sum, group=communicator.control)
        return (
            float(self._sum) / communicator.world_size / self._targets
            if self._targets
            else math.nan
        )


# What accelerate's `prepare_model` may set on the model itself: its forward under mixed precision,
# the one before, and a mark that it was there.
_SET_BY_PREPARE = ("forward", "_original_forward", "_is_accelerate_prepared")


@contextmanager
def left_unprepared(trainer: Any) -> Iterator[None]:
    """Evaluation before training must not leave its mark on the model: accelerate would take it
    for prepared and never wrap it in DDP, so that every rank would train a model of its own.

    Only what was set meanwhile is taken back. `accelerator.unwrap_model` would undo too much: it
    goes on to the innermost forward, past the decorators of transformers and the forward that TRL
    puts on a model.
    """
    accelerator = trainer.accelerator
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    mine = not sharded and not accelerator._models
    model = trainer.model
    before = {name: vars(model)[name] for name in _SET_BY_PREPARE if name in vars(model)}
    try:
        yield
    finally:
        if mine and not trainer.is_in_train:
            for name in _SET_BY_PREPARE:
                vars(model).pop(name, None)
            vars(model).update(before)
            accelerator._models.clear()
