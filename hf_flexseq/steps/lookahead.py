"""Draw and plan optimizer steps ahead of the one that runs, so that planning hides behind
training.

For each step: draw its batches from the user's own iterator, gather the lengths of all ranks, hand
them to the planner on rank 0, and, when the step's turn comes, send its answer to all. Every
collective is called on the main thread and in the order of the steps, so ranks cannot disagree on
what comes next; only the solving is elsewhere.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

from hf_flexseq.cost import CostModel
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.control import broadcast_object, gather_ints
from hf_flexseq.plan import Plan, PlanInfeasible
from hf_flexseq.planner import make_plan
from hf_flexseq.steps.exchange import SourceRow, source_row
from hf_flexseq.topology import Topology


class Planner(Protocol):
    """Plans steps, perhaps in another process."""

    def submit(self, step: int, lengths: list[int]) -> None: ...

    def result(self, step: int) -> Plan: ...

    def close(self) -> None: ...


class InlinePlanner:
    """Plans in this process, when the result is wanted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Topology, cost model and options, as for a PlannerWorker."""
        self._plan = self._planner(*args, **options)
        self._submitted: dict[int, list[int]] = {}

    def _planner(
        self, topology: Topology, cost: CostModel, **options: Any
    ) -> Callable[[list[int]], Any]:
        return partial(make_plan, topology=topology, cost=cost, **options)

    def submit(self, step: int, lengths: list[int]) -> None:
        self._submitted[step] = lengths

    def result(self, step: int) -> Any:
        return self._plan(self._submitted.pop(step))

    def close(self) -> None:
        self._submitted.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnStep:
    """One optimizer step as drawn: this rank's row, and of all ranks the lengths, who drew them,
    and the targets."""

    number: int
    row: SourceRow
    lengths: tuple[int, ...]
    sources: tuple[int, ...]
    targets: int


class Lookahead:
    """Steps of one iterator at a time, up to `lookahead` of them drawn and being planned."""

    def __init__(
        self,
        communicator: Communicator,
        planner: Planner | None,
        lookahead: int,
        *,
        check: Callable[[Any], None],
        read: Callable[[Any], Any] = Plan.from_record,
    ) -> None:
        """`planner` on rank 0, None elsewhere. check: raises ValueError for a plan that would
        compute something wrong or hang; called on rank 0. read: makes a plan of the record that
        rank 0's planner gave."""
        self.communicator, self.planner, self.lookahead = communicator, planner, lookahead
        self._check, self._read = check, read
        self.waited_s = 0.0
        self._iterator: Iterator[Any] | None = None
        self._drawn: deque[DrawnStep] = deque()
        self._exhausted = False
        self._number = 0

    def next(
        self, iterator: Iterator[Mapping[str, Any]], num_batches: int
    ) -> tuple[DrawnStep, Plan] | None:
        """The next step of `num_batches` batches per rank, or None when no rank has a sequence
        left.

        Raises, on all ranks alike, what the planner raised.
        """
        if iterator is not self._iterator:
            self._iterator, self._exhausted = iterator, False
            self._drawn.clear()
        while not self._exhausted and len(self._drawn) <= self.lookahead:
            self._draw(num_batches)
        if not self._drawn:
            return None
        step = self._drawn.popleft()
        return step, self._plan(step.number)

    def _draw(self, num_batches: int) -> None:
        assert self._iterator is not None, "no iterator to draw from"
        row = source_row(list(islice(self._iterator, num_batches)))
        gathered = gather_ints(self.communicator, [row.targets, *row.lengths])
        step = DrawnStep(
            number=self._number,
            row=row,
            lengths=tuple(n for _, *lengths in gathered for n in lengths),
            sources=tuple(rank for rank, (_, *lengths) in enumerate(gathered) for _ in lengths),
            targets=sum(targets for targets, *_ in gathered),
        )
        self._exhausted = not step.lengths
        if self._exhausted:
            return
        self._number += 1
        self._drawn.append(step)
        if self.planner is not None:
            self.planner.submit(step.number, list(step.lengths))

    def _plan(self, number: int) -> Plan:
        started = time.perf_counter()
        kind, value = broadcast_object(self.communicator, self._answer(number))
        self.waited_s = time.perf_counter() - started
        if kind == "infeasible":
            raise PlanInfeasible(value)
        if kind == "failed":
            raise RuntimeError(value)
        return self._read(value)

    def _answer(self, number: int) -> tuple[str, Any]:
        """Rank 0's plan, checked, or why there is none, in a form that can be sent."""
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

    def close(self) -> None:
        if self.planner is not None:
            self.planner.close()
