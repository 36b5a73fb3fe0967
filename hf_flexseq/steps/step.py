"""One planned optimizer step, ready to run on this rank.

    OptimizerStep    micro-batches, for a rank that has the whole model
    PipelineStep     chunks, for a rank that has one stage of it

The Trainer counts the batches that it draws. A step therefore goes to it as a list of items, all
but the last of them empty: `step_items`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan import Plan
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.steps.exchange import Columns
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.lookahead import DrawnStep
from hf_flexseq.steps.stopwatch import Stopwatch

PlanT = TypeVar("PlanT", bound=Plan | StepPlan)


class RankStep(Generic[PlanT]):
    """An optimizer step as one rank runs it: drawn, planned, and timed."""

    __slots__ = (
        "has_run",
        "number",
        "other_rows",
        "padding_targets",
        "passes",
        "plan",
        "remark",
        "remarks",
        "row",
        "stopwatch",
        "targets",
        "targets_of_sequences",
        "waited_s",
    )

    def __init__(
        self, drawn: DrawnStep, plan: PlanT, *, waited_s: float, device: torch.device
    ) -> None:
        """waited_s: seconds that training waited for the plan. device: runs the step."""
        self.number = drawn.number
        self.plan: PlanT = plan  # of the whole step, over all ranks
        self.row = drawn.row  # what this rank itself drew
        self.targets = sum(drawn.targets)  # tokens with a label, over all ranks
        self.targets_of_sequences = drawn.targets
        self.padding_targets = drawn.padding_targets  # left out of them
        self.other_rows = drawn.other_rows  # than the user's collator makes of a whole batch
        self.waited_s = waited_s
        self.stopwatch = Stopwatch(device)
        self.has_run = False  # forward and backward
        self.passes = 1  # over the micro-batches: forward and backward, or forward alone
        self.remark: Any = None  # a JSON value that goes to all ranks when the step is over
        self.remarks: list[Any] = []  # then those of all ranks

    @property
    def tokens(self) -> int:
        """Tokens of the whole step, over all ranks."""
        return sum(self.plan.lengths)


class OptimizerStep(RankStep[Plan]):
    """The micro-batches of one plan that this rank runs, with the tokens it holds in each."""

    __slots__ = ("_coming", "_inputs", "indices")

    def __init__(
        self,
        drawn: DrawnStep,
        plan: Plan,
        indices: Sequence[int],
        inputs: Iterator[tuple[int, Inputs]],
        *,
        waited_s: float,
        device: torch.device,
    ) -> None:
        """indices: in the plan, of the micro-batches that this rank runs, never empty.
        inputs: makes (index, inputs of the model) for each of them, when it is asked for the next.
        """
        super().__init__(drawn, plan, waited_s=waited_s, device=device)
        self.indices = tuple(indices)
        self._inputs = inputs
        # of the micro-batch to run next
        self._coming: tuple[int, Inputs] | None = next(inputs)

    def run(
        self,
        forward_backward: Callable[[Inputs], torch.Tensor],
        before_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> torch.Tensor:
        """Run every micro-batch, once, and return the sum of their losses, a scalar.

        The inputs of a micro-batch are made when all work of the one before has been launched, so
        that a device which computes on its own need not wait for them.

        before_last: surrounds every micro-batch but the last one.
        """
        losses = []
        for index in self.indices[:-1]:
            with self.stopwatch.timing(index), before_last():
                losses.append(forward_backward(self._take(index)))
            self._coming = next(self._inputs)
        last = self.indices[-1]
        with self.stopwatch.timing(last):
            losses.append(forward_backward(self._take(last)))
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    def inputs(self) -> Iterator[tuple[int, Inputs]]:
        """Yield (index in the plan, inputs of the model) of every micro-batch, once, for who runs
        them in a way of their own."""
        for index in self.indices:
            yield index, self._take(index)
            self._coming = next(self._inputs, None)

    def _take(self, index: int) -> Inputs:
        """Return the inputs of a micro-batch, which are ready, and keep them no longer."""
        coming, self._coming = self._coming, None
        assert coming is not None, "a step runs once"
        ready, inputs = coming
        assert ready == index, f"the inputs of micro-batch {ready} are ready, not those of {index}"
        return inputs

    def measured_s(self) -> list[float]:
        """Return the seconds of every micro-batch of the plan on this rank, 0 where the rank had
        none; wait for the device."""
        seconds = self.stopwatch.seconds()
        return [seconds.get(index, 0.0) for index in range(len(self.plan.micro_batches))]


class PipelineStep(RankStep[StepPlan]):
    """The chunks of one replica's plan, with their tokens: a few integers each, which every rank
    of the replica gets for all of its chunks."""

    __slots__ = ("columns", "replica")

    def __init__(
        self,
        drawn: DrawnStep,
        plan: StepPlan,
        columns: Sequence[Columns],
        *,
        replica: int,
        waited_s: float,
        device: torch.device,
    ) -> None:
        """columns: of each chunk of the replica, each [tokens]. replica: the one that this rank
        works for."""
        super().__init__(drawn, plan, waited_s=waited_s, device=device)
        self.replica = replica
        self.columns: list[Columns] = []  # of each chunk, [1, tokens] on the device
        for columns_of_chunk in columns:
            moved = {}
            for name, value in columns_of_chunk.items():
                row = value.unsqueeze(0)  # [tokens] -> [1, tokens]
                moved[name] = to_device(row, device)
            self.columns.append(moved)

    @property
    def own_plan(self) -> PipelinePlan:
        """The plan of this rank's replica."""
        return self.plan.plans[self.replica]


def targets_of(step: RankStep[Plan], indices: Sequence[int]) -> list[int]:
    """Return the tokens with a label, over all ranks, of some of a step's micro-batches.

    indices: of the micro-batches, in the plan.
    """
    counts = []
    for index in indices:
        groups = step.plan.micro_batches[index].groups
        sequences = [sequence for group in groups for sequence in group.sequences]
        counts.append(sum(step.targets_of_sequences[sequence] for sequence in sequences))
    return counts


class StepItem(dict[str, Any]):
    """A batch to the Trainer, which counts these. It is read-only: its tokens were sent to the
    ranks of the plan before."""

    step: RankStep[Any] | None = None  # the whole step on its last item, None on the others
    _versions: dict[str, int] | None = None  # None for a copy that a user's code has made

    @classmethod
    def of(cls, ids: torch.Tensor, step: RankStep[Any] | None) -> "StepItem":
        """Return the item with token ids [1, tokens]."""
        item = cls(input_ids=ids, attention_mask=torch.ones_like(ids))
        item.step = step
        item._versions = item._versions_now()
        return item

    @property
    def is_as_made(self) -> bool:
        """True for an item of `step_items` whose tensors nothing has changed."""
        return self._versions == self._versions_now()

    def _versions_now(self) -> dict[str, int]:
        return {name: value._version for name, value in self.items()}

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "the inputs of training_step are a planned step, which is read-only and has no labels "
            f"(it has {', '.join(self)}): change samples in the dataset or the data_collator, or "
            "put FlexSeqMixin in front of the class, which then gets each micro-batch"
        )

    __missing__ = __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def step_items(step: RankStep[Any], num_batches: int) -> list[StepItem]:
    """Return `num_batches` items, of which the last one holds the step.

    Their `input_ids` and `attention_mask` are for the Trainer's token counters: this rank's own
    tokens [1, tokens] on the last item, [1, 0] on the others. Without the mask a token that has
    the id of padding would not count.
    """
    nothing = torch.empty(1, 0, dtype=torch.int64)
    own = step.row.columns.get("input_ids", nothing[0]).unsqueeze(0)  # [tokens] -> [1, tokens]
    return [*(StepItem.of(nothing, None) for _ in range(num_batches - 1)), StepItem.of(own, step)]
