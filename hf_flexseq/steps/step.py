"""One planned optimizer step, ready to run on this rank."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.plan.shard import Shard, make_shard, remapped
from hf_flexseq.schedule.routing import NicFigures
from hf_flexseq.steps.exchange import Columns, SourceRow
from hf_flexseq.steps.stopwatch import Stopwatch
from hf_flexseq.topology import Topology

Inputs = dict[str, Any]


class OptimizerStep:
    """The micro-batches of one plan that this rank runs, with the tokens it holds in each.

    plan: the whole step. row: what this rank itself drew. targets: tokens with a label in the
    whole step, over all ranks. micro_batches: (index in the plan, inputs of the model) pairs, in
    order, never empty.
    """

    __slots__ = ("_stopwatch", "micro_batches", "number", "plan", "row", "targets", "waited_s")

    def __init__(
        self,
        *,
        number: int,
        plan: Plan,
        row: SourceRow,
        targets: int,
        micro_batches: Sequence[tuple[int, Inputs]],
        waited_s: float,
        device: torch.device,
    ) -> None:
        self.number, self.plan, self.row, self.targets, self.waited_s = (
            number,
            plan,
            row,
            targets,
            waited_s,
        )
        self.micro_batches = tuple(micro_batches)
        self._stopwatch = Stopwatch(device)

    @property
    def tokens(self) -> int:
        """Tokens of the whole step, over all ranks."""
        return sum(self.plan.lengths)

    def run(
        self,
        forward_backward: Callable[[Inputs], torch.Tensor],
        before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> torch.Tensor:
        """Run every micro-batch and return the sum of their losses. `before_last` surrounds all
        but the last one."""
        total: torch.Tensor | None = None
        for place, (index, inputs) in enumerate(self.micro_batches):
            last = place == len(self.micro_batches) - 1
            with self._stopwatch.timing(index), nullcontext() if last else before_last():
                loss = forward_backward(inputs)
            total = loss if total is None else total + loss
        assert total is not None, "a step has at least one micro-batch on every rank"
        return total

    def measured_s(self) -> list[float]:
        """Seconds of every micro-batch on this rank, 0 where it had none; waits for the device."""
        seconds = self._stopwatch.seconds()
        return [seconds.get(index, 0.0) for index in range(len(self.plan.micro_batches))]


class StepItem(dict[str, Any]):
    """One of the items that the Trainer counts. `step` is the whole step on the last item, None on
    the empty ones."""

    step: OptimizerStep | None = None


def step_items(step: OptimizerStep, num_batches: int) -> list[StepItem]:
    """`num_batches` items; the last holds the step and this rank's own tokens, for the Trainer's
    token counters."""
    items = [StepItem(input_ids=torch.empty(1, 0, dtype=torch.int64)) for _ in range(num_batches)]
    own = step.row.columns.get("input_ids", torch.empty(0, dtype=torch.int64))
    items[-1]["input_ids"] = own.unsqueeze(0)
    items[-1].step = step
    return items


def shards_of(plan: Plan, rank: int, topology: Topology) -> list[Shard]:
    """What `rank` holds, by micro-batch."""
    shards = [make_shard(micro_batch, plan.lengths, rank) for micro_batch in plan.micro_batches]
    return [
        remapped(shard, micro_batch, plan.lengths, topology) if micro_batch.remap else shard
        for shard, micro_batch in zip(shards, plan.micro_batches, strict=True)
    ]


def model_inputs(
    shards: Sequence[Shard],
    columns: Sequence[Columns],
    *,
    lockstep: bool,
    communicator: Communicator,
    kernel: Kernel,
    device: torch.device,
    attention_remat: bool = True,
    deterministic: bool = False,
    links: NicFigures | None = None,
) -> list[tuple[int, Inputs]]:
    """(index, inputs) of the micro-batches that this rank runs, its tensors on `device`.

    In lockstep it runs all of them, a dummy token where it has nothing to do. Otherwise it runs
    those that hold work for it, and when none does a dummy after all: every rank takes part in the
    last gradient reduction.
    """

    def inputs(index: int) -> tuple[int, Inputs]:
        shard, found = shards[index], columns[index]
        if not shard.linear_tokens:
            shard, found = _with_dummy(shard), _dummy_columns(found)
        tensors = {
            name: value.unsqueeze(0).to(device, non_blocking=True) for name, value in found.items()
        }
        tensors["shift_labels"] = tensors["labels"]
        seq_ctx = SequenceContext(
            shard,
            communicator,
            kernel,
            device,
            attention_remat=attention_remat,
            deterministic=deterministic,
            links=links,
        )
        return index, {**tensors, "seq_ctx": seq_ctx}

    busy = [
        index
        for index, shard in enumerate(shards)
        if lockstep or shard.zones or shard.linear_tokens
    ]
    return [inputs(index) for index in busy or [len(shards) - 1]]


def _with_dummy(shard: Shard) -> Shard:
    """A shard without tokens, and one token on this rank alone: it makes every collective of the
    model happen and adds nothing to the loss or the gradients. The zones stay: a rank may compute
    for a group and hold none of it."""
    alone = MicroBatch(groups=(Group(ranks=(shard.rank,), sequences=(0,), strategy="local"),))
    return Shard(rank=shard.rank, zones=(*shard.zones, *make_shard(alone, [1], shard.rank).zones))


def _dummy_columns(like: Columns) -> Columns:
    columns = {name: value.new_zeros(1) for name, value in like.items()}
    return columns | {"labels": columns["labels"].new_full((1,), IGNORE_INDEX)}
