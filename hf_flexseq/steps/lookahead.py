"""Draw and plan optimizer steps ahead of the one that runs, so that planning hides behind
training.

For each step:

1. draw its batches from the user's own iterator,
2. gather lengths and numbers of target tokens of all ranks' sequences,
3. hand the lengths to the planner on rank 0,
4. when the step's turn comes, send the planner's answer to all ranks.

Every collective is called on the main thread and in the order of the steps, so that ranks cannot
disagree on what comes next; only the solving is elsewhere.

What goes wrong on one rank is raised on all of them. A rank whose data cannot be drawn says so in
place of its lengths. Rank 0 waits for the planner as long as ranks wait for each other; all that
time it tells them every few seconds that it still waits, so that none of them gives it up, however
late it came to ask. Rejected: that rank 0 gives up a little earlier than the others, who may have
been waiting for it since long before.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hf_flexseq.distributed.agreement import Attempt
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.process.client import Planner
from hf_flexseq.steps.exchange import NO_COLUMNS, SourceRow, common_dtypes, source_row

FAILED = -1  # in place of the signature of a rank whose data could not be drawn

# Rank 0 tells the others so often that it still waits for the planner.
ROUND_S = 5.0
ROUNDS = 4  # in a timeout that is shorter than so many rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnStep:
    """An optimizer step as drawn, before it is planned."""

    number: int
    """Counts the steps that run, on from the Lookahead's first number."""

    request: int
    """What the planner knows the step by. It counts steps that were drawn and never ran, too."""

    row: SourceRow
    """What this rank drew, with the columns that the rows of all ranks have."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, of all ranks: by the rank that drew it, then in its order."""

    sources: tuple[int, ...]
    """The rank that drew each sequence."""

    targets: tuple[int, ...]
    """Tokens with a label, of each sequence of all ranks."""

    padding_targets: int = 0
    """Targets beside padding, which were left out, of all ranks."""

    other_rows: int = 0
    """Rows that the user's collator makes otherwise of a whole batch, of all ranks."""


class Lookahead:
    """Steps of one iterator at a time, up to `lookahead` of them drawn and being planned."""

    def __init__(
        self,
        communicator: Communicator,
        planner: Planner | None,
        lookahead: int,
        *,
        check: Callable[[Any], None],
        read: Callable[[bytes], Any],
        first_number: int = 0,
        what: str = "step",
    ) -> None:
        """Nothing is drawn before the first `next`.

        planner: on rank 0, None elsewhere.
        lookahead: how many steps are drawn and being planned beyond the current one.
        check: raises ValueError for a plan that would compute something wrong or hang; called on
            rank 0.
        read: makes a plan of the bytes that rank 0 sends, those of the plan's `to_bytes`.
        first_number: of the first step. what: a step is called in messages.
        """
        self.communicator = communicator
        self.planner = planner
        self.lookahead = lookahead
        self.what = what
        self.waited_s = 0.0  # seconds that the last `next` waited for its plan
        self._check = check
        self._read = read
        self._iterator: Iterator[Any] | None = None
        self._exhausted = False  # no rank has anything left in the iterator
        self._drawn: deque[DrawnStep] = deque()  # being planned
        self.next_number = first_number  # of the next step to run; see `DealtSteps`
        self._next_request = 0
        self._dtypes: dict[int, dict[str, str]] = {}  # by signature of columns, agreed on once

    def next(
        self, iterator: Iterator[Mapping[str, Any]], num_batches: int
    ) -> tuple[DrawnStep, Any] | None:
        """Return the next step of `num_batches` batches per rank and its plan, or None when no
        rank has a sequence left. Collective over the world.

        Raises, on all ranks alike, PlanInfeasible, RuntimeError with the reason why planning
        failed, or what `Attempt.raise_together` makes of data that cannot be drawn.
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
        self.next_number += 1
        return step, self._plan(step)

    def close(self) -> None:
        """End the planner."""
        if self.planner is not None:
            self.planner.close()

    def _draw(self, iterator: Iterator[Mapping[str, Any]], num_batches: int) -> None:
        """Draw one step and submit it to the planner. Collective over the world."""
        # 1. what this rank draws
        number = self.next_number + len(self._drawn)
        row = SourceRow(columns={}, lengths=())
        own = [FAILED]
        with Attempt() as drawing:
            row = source_row(list(islice(iterator, num_batches)))
            counts = (row.padding_targets, row.other_rows)
            own = [row.signature, *counts, *row.lengths, *row.targets]

        # 2. what all ranks have drawn
        host = self.communicator.host
        host.phase = f"{self.what} {number}, gathering its lengths"
        gathered = host.gather_ints(own)
        if any(numbers[0] == FAILED for numbers in gathered):
            drawing.raise_together(host.gather_values, f"drawing {self.what} {number}")
        padding_targets = other_rows = 0
        lengths: list[int] = []
        targets: list[int] = []
        sources: list[int] = []
        for rank, (_, padding_of_rank, others_of_rank, *of_rank) in enumerate(gathered):
            sequences = len(of_rank) // 2
            padding_targets += padding_of_rank
            other_rows += others_of_rank
            lengths += of_rank[:sequences]
            targets += of_rank[sequences:]
            sources += [rank] * sequences
        if not lengths:
            self._exhausted = True
            return

        # 3. the step
        dtypes = self._common_dtypes([numbers[0] for numbers in gathered], row)
        step = DrawnStep(
            number=number,
            request=self._next_request,
            row=row.with_columns(dtypes),
            lengths=tuple(lengths),
            sources=tuple(sources),
            targets=tuple(targets),
            padding_targets=padding_targets,
            other_rows=other_rows,
        )
        self._next_request += 1
        self._drawn.append(step)
        if self.planner is not None:
            self.planner.submit(step.request, lengths)

    def _common_dtypes(self, signatures: Sequence[int], row: SourceRow) -> dict[str, str]:
        """Return the dtypes of the columns that all rows have, as `common_dtypes` does. Collective
        over the world with the first step, and with one whose columns are others.

        signatures: of the rows, by rank.
        """
        drawn = {signature for signature in signatures if signature != NO_COLUMNS}
        if len(drawn) == 1:
            (signature,) = drawn
            if signature not in self._dtypes:
                self._dtypes[signature] = common_dtypes(row, self.communicator.host)
            return self._dtypes[signature]
        return common_dtypes(row, self.communicator.host)  # raises

    def _plan(self, step: DrawnStep) -> Any:
        """Return the plan of a submitted step on every rank. Collective over the world."""
        host = self.communicator.host
        host.phase = f"{self.what} {step.number}, sending its plan"
        began = time.perf_counter()
        planning = Attempt()
        kind = "waiting"
        while kind == "waiting":
            waited_s = time.perf_counter() - began
            answer = host.broadcast_bytes(self._answer(step, waited_s, planning))
            head, _, data = answer.partition(b"\n")
            kind, reason = json.loads(head)
        self.waited_s = time.perf_counter() - began
        if kind == "infeasible":
            raise PlanInfeasible(reason) from planning.error
        if kind == "failed":
            raise RuntimeError(
                f"planning of {self.what} {step.number} failed: {reason}"
            ) from planning.error
        return self._read(data)

    def _answer(self, step: DrawnStep, waited_s: float, planning: Attempt) -> bytes:
        """Return rank 0's plan, checked, or why there is none, in a form that can be sent: a line
        of JSON, [what it is, why there is no plan], and the bytes of the plan. Nothing elsewhere.

        waited_s: seconds that the planner has been waited for already. planning: keeps the error.
        """
        if self.planner is None:
            return b""
        timeout_s = self.communicator.host.timeout.total_seconds()
        round_s = min(ROUND_S, timeout_s / ROUNDS)
        late = self.planner.wait(step.request, min(round_s, timeout_s - waited_s))
        if late is not None and waited_s + round_s < timeout_s:
            return _line("waiting")
        if late is not None:
            return _line(
                "failed",
                f"{late} has not answered for {timeout_s:g} s; if it is slow and not stuck, raise "
                "ddp_timeout, the time that ranks wait for each other",
            )
        data = b""
        with planning:
            plan = self.planner.result(step.request)
            self._check(plan)
            data = plan.to_bytes()
        match planning.error:
            case None:
                return _line("plan") + data
            case PlanInfeasible():
                return _line("infeasible", str(planning.error))
            case RuntimeError() | ValueError():
                return _line("failed", str(planning.error))
        return _line("failed", repr(planning.error))


def _line(kind: str, reason: str = "") -> bytes:
    """Return the first line of an answer. reason: why there is no plan."""
    return json.dumps([kind, reason]).encode() + b"\n"
