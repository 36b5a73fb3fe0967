"""Draw and plan optimizer steps ahead of the one that runs, so that planning hides behind
training.

For each step:

1. draw its batches from the user's own iterator,
2. gather the lengths of all ranks,
3. hand them to the planner on rank 0,
4. when the step's turn comes, send the planner's answer to all ranks.

Every collective is called on the main thread and in the order of the steps, so that ranks cannot
disagree on what comes next; only the solving is elsewhere.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.process.client import Planner
from hf_flexseq.steps.exchange import SourceRow, source_row


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnStep:
    """An optimizer step as drawn, before it is planned."""

    number: int
    """Counts the steps of one Lookahead from 0."""

    row: SourceRow
    """What this rank drew."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, of all ranks: by the rank that drew it, then in its order."""

    sources: tuple[int, ...]
    """The rank that drew each sequence."""

    targets: int
    """Tokens with a label, of all ranks."""


class Lookahead:
    """Steps of one iterator at a time, up to `lookahead` of them drawn and being planned."""

    def __init__(
        self,
        communicator: Communicator,
        planner: Planner | None,
        lookahead: int,
        *,
        check: Callable[[Any], None],
        read: Callable[[dict[str, Any]], Any],
    ) -> None:
        """Nothing is drawn before the first `next`.

        planner: on rank 0, None elsewhere.
        lookahead: how many steps are drawn and being planned beyond the current one.
        check: raises ValueError for a plan that would compute something wrong or hang; called on
            rank 0.
        read: makes a plan of the record that rank 0 sends.
        """
        self.communicator = communicator
        self.planner = planner
        self.lookahead = lookahead
        self.waited_s = 0.0  # seconds that the last `next` waited for its plan
        self._check = check
        self._read = read
        self._iterator: Iterator[Any] | None = None
        self._exhausted = False  # no rank has anything left in the iterator
        self._drawn: deque[DrawnStep] = deque()  # being planned
        self._next_number = 0

    def next(
        self, iterator: Iterator[Mapping[str, Any]], num_batches: int
    ) -> tuple[DrawnStep, Any] | None:
        """Return the next step of `num_batches` batches per rank and its plan, or None when no
        rank has a sequence left. Collective over the world.

        Raises, on all ranks alike, PlanInfeasible, or RuntimeError with the reason why planning
        failed.
        """
        if iterator is not self._iterator:
            self._iterator = iterator
            self._exhausted = False
            self._drawn.clear()
        while not self._exhausted and len(self._drawn) <= self.lookahead:
            self._draw(iterator, num_batches)
        if not self._drawn:
            return None
        step = self._drawn.popleft()
        return step, self._plan(step.number)

    def close(self) -> None:
        """End the planner."""
        if self.planner is not None:
            self.planner.close()

    def _draw(self, iterator: Iterator[Mapping[str, Any]], num_batches: int) -> None:
        """Draw one step and submit it to the planner. Collective over the world."""
        row = source_row(list(islice(iterator, num_batches)))
        self.communicator.host.phase = f"step {self._next_number}, gathering its lengths"
        gathered = self.communicator.host.gather_ints([row.targets, *row.lengths])
        targets = 0
        lengths: list[int] = []
        sources: list[int] = []
        for rank, (targets_of_rank, *lengths_of_rank) in enumerate(gathered):
            targets += targets_of_rank
            lengths += lengths_of_rank
            sources += [rank] * len(lengths_of_rank)
        if not lengths:
            self._exhausted = True
            return
        step = DrawnStep(
            number=self._next_number,
            row=row,
            lengths=tuple(lengths),
            sources=tuple(sources),
            targets=targets,
        )
        self._next_number += 1
        self._drawn.append(step)
        if self.planner is not None:
            self.planner.submit(step.number, lengths)

    def _plan(self, number: int) -> Any:
        """Return the plan of a submitted step on every rank. Collective over the world."""
        self.communicator.host.phase = f"step {number}, sending its plan"
        began = time.perf_counter()
        kind, value = self.communicator.host.broadcast_value(self._answer(number))
        self.waited_s = time.perf_counter() - began
        if kind == "infeasible":
            raise PlanInfeasible(value)
        if kind == "failed":
            raise RuntimeError(value)
        return self._read(value)

    def _answer(self, number: int) -> tuple[str, Any]:
        """Return rank 0's plan, checked, or why there is none, in a form that can be sent."""
        if self.planner is None:
            return "elsewhere", None
        try:
            plan = self.planner.result(number)
            self._check(plan)
            return "plan", plan.to_record()
        except PlanInfeasible as error:
            return "infeasible", str(error)
        except (RuntimeError, ValueError) as error:
            return "failed", f"planning of step {number} failed: {error}"
