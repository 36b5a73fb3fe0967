"""Draw, plan and dispatch optimizer steps before they run, so that planning and the exchange of
tokens overlap with training.

The steps of one iterator are a queue of two stages:

1. drawn         up to `lookahead` steps ahead: their batches are drawn from the user's own
                 iterator, lengths and numbers of target tokens of all ranks' sequences are
                 gathered, and the planner on rank 0 has the lengths
2. dispatched    the next step alone: rank 0 has sent its plan to all ranks, and its tokens are on
                 the ranks that the plan names

`next` returns the dispatched step, or dispatches one. `prefetch` dispatches the next one, when all
work of the current step has been launched and before its optimizer: a device that computes
asynchronously need not wait for the exchange. All ranks reach that place once a step, whatever
their number of micro-batches, so that their exchanges stay in one order. Every collective is on
the main thread and in the order of the steps; only the solving is elsewhere.

Errors of one rank are raised on all of them. A rank whose data cannot be drawn sends this instead
of its lengths. Errors of `prefetch` are raised by the next `next`; only a lost rank is an error at
once. A step of an iterator that is left early does not count: the next one has its number.

Rank 0 waits for the planner as long as ranks wait for each other. It sends keep-alives meanwhile,
so that waiting ranks do not time out. Rejected: a shorter timeout of rank 0, since others may have
waited longer; dispatching between micro-batches, which ranks reach at different times or never.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import LostRank
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.blocks import later_pairs
from hf_flexseq.plan.facts import StepFacts
from hf_flexseq.plan.images import ImageSize
from hf_flexseq.plan.units import Unit
from hf_flexseq.planner.process.client import Planner
from hf_flexseq.planner.process.jobs import Job
from hf_flexseq.steps.console import beside_bars
from hf_flexseq.steps.features import with_image_rows
from hf_flexseq.steps.prefixes import candidates, gather_rows, marks_of, units_of
from hf_flexseq.steps.rank_step import RankStep
from hf_flexseq.steps.row_facts import RowFacts
from hf_flexseq.steps.same_images import distinct_images
from hf_flexseq.steps.source_row import (
    DrawnStep,
    PlannedStep,
    RowCounts,
    SourceRow,
    source_row,
)
from hf_flexseq.steps.virtual_tokens import with_virtual_tokens

logger = logging.getLogger(__name__)

# Seconds between two keep-alives of rank 0.
ROUND_S = 5.0
ROUNDS = 4  # in a timeout that is shorter than so many rounds

Batches = Iterator[Mapping[str, Any]]
Step = RankStep[Any]  # of either kind: it is only passed on


class ImageReader:
    """Reads a model's images, and plans them, before they are encoded; by itself for a model that
    takes none."""

    def read(self, row: SourceRow) -> SourceRow:
        """Return a row with its images as the model takes them. Raises ValueError or
        NotImplementedError for those that do not fit."""
        if row.given_images:
            raise ValueError(
                f"examples have {', '.join(row.names_of_images)}, and the model takes no images "
                "here; leave the columns out of the dataset"
            )
        return row

    @property
    def draws_noise(self) -> bool:
        """True if the features of an image differ each time, as under dropout."""
        return False

    def planned(self, step: DrawnStep) -> DrawnStep:
        """Return a step with images, which says how they are encoded, and how much memory they
        take."""
        return step


NO_IMAGES = ImageReader()


class VersionedJob(Protocol):
    """The job of the planner, which changes with the number of the step."""

    def version_of(self, number: int | None) -> Hashable:
        """Return a version, equal for steps that have the same job. number: of a step; None for
        the job of a planner that is made now."""

    def job_of(self, number: int) -> Job:
        """Return the job by which step `number` is planned."""


class PrefetchedSteps:
    """The steps of one iterator at a time: drawn, planned, and dispatched to the ranks."""

    def __init__(
        self,
        communicator: Communicator,
        planner: Planner | None,
        lookahead: int,
        *,
        dispatch: Callable[[PlannedStep], Any],
        check: Callable[[Any], None],
        read: Callable[[dict[str, Any]], Any],
        first_number: int = 0,
        what: str = "step",
        shares_prefixes: bool = False,
        images: ImageReader = NO_IMAGES,
        virtual_tokens: int = 0,
        jobs: VersionedJob | None = None,
    ) -> None:
        """Nothing is drawn before the first `next`.

        planner: on rank 0, None elsewhere.
        lookahead: how many steps are drawn and being planned beyond the current one.
        dispatch: brings a step's tokens to the ranks of its plan; collective over the world.
        check: raises ValueError for a plan that would compute something wrong or hang; called on
            rank 0.
        read: makes a plan of the record that rank 0 sends, from the plan's `to_record`.
        first_number: of the first step. what: a step is called in messages.
        shares_prefixes: True to plan rows with a common prefix as units; the same on all ranks.
        images: reads the images of a row.
        virtual_tokens: number of them that the model puts in front of each sequence.
        jobs: by which steps are planned; None for the planner's own.
        """
        self.communicator = communicator
        self._planner = planner
        self._lookahead = lookahead
        self._dispatch = dispatch
        self._check = check
        self._read = read
        self._what = what
        self._shares_prefixes = shares_prefixes
        self._images = images
        self._virtual_tokens = virtual_tokens
        self._jobs = jobs
        self._version = None if jobs is None else jobs.version_of(None)  # of the planner's job
        # of the last `next`
        self._iterator: Batches | None = None
        self._num_batches = 0
        self._is_exhausted = False  # no rank has anything left in the iterator
        # the two stages
        self._drawn: deque[DrawnStep] = deque()  # being planned
        self._dispatched: Future[Step | None] | None = None  # the next step, or its error
        self._number_of_dispatched = 0
        # what steps are counted by
        self._next_number = first_number  # of the next step to leave the first stage
        self._next_request = 0

    def next(self, iterator: Batches, num_batches: int) -> Step | None:
        """Return the next step of `num_batches` batches per rank, dispatched; None if no rank has
        a sequence left. Collective over the world. Raises, on all ranks alike, PlanInfeasible, or
        an error with the reason why drawing or planning failed."""
        if iterator is not self._iterator:
            self._begin(iterator)
        self._num_batches = num_batches
        ahead, self._dispatched = self._dispatched, None
        step = self._dispatch_next() if ahead is None else ahead.result()
        if step is not None:
            self._set_phase(f"{self._what} {step.number}")
        return step

    def count_from(self, number: int) -> None:
        """Let the next step that is drawn have this number, where none is drawn ahead."""
        assert not self._lookahead, "steps that were drawn have their numbers"
        self._next_number = number

    def has_left(self, iterator: Batches) -> bool:
        """Tell if steps drawn ahead from an iterator are lost, since another one has come."""
        return self._lookahead > 0 and iterator is not self._iterator

    def prefetch(self) -> None:
        """Dispatch the step that `next` will return, unless that is done or steps are not planned
        ahead. Collective over the world. Raises LostRank alone."""
        if not self._lookahead or self._iterator is None or self._dispatched is not None:
            return
        phase = self.communicator.cpu_group.phase
        dispatched: Future[Step | None] = Future()
        number = self._next_number
        step = None
        with ErrorCapture() as dispatching:  # what fails here has failed on all ranks together
            step = self._dispatch_next()
            if step is not None:
                step.begin_ahead()
        if isinstance(dispatching.error, LostRank):
            raise dispatching.error
        if dispatching.error is not None:
            dispatched.set_exception(dispatching.error)
        else:
            dispatched.set_result(step)
        self._dispatched = dispatched
        self._number_of_dispatched = number
        self._set_phase(phase)

    def close(self) -> None:
        """End the planner, and forget the step that was dispatched."""
        self._dispatched = None
        self._iterator = None
        if self._planner is not None:
            self._planner.close()

    def _begin(self, iterator: Batches) -> None:
        """Leave the steps of the last iterator, as if they had not been drawn."""
        if self._dispatched is not None:
            self._next_number = self._number_of_dispatched
            self._dispatched = None
        self._drawn.clear()
        self._iterator = iterator
        self._is_exhausted = False

    def _set_phase(self, phase: str) -> None:
        """Name the phase to which the exchanges to come belong."""
        self.communicator.cpu_group.phase = phase

    # ---- from one stage to the next

    def _dispatch_next(self) -> Step | None:
        """Draw steps and dispatch the next; None if no data is left. Collective over the world."""
        while not self._is_exhausted and len(self._drawn) <= self._lookahead:
            self._draw()
        if not self._drawn:
            return None
        drawn = self._drawn.popleft()
        self._next_number += 1
        return self._plan_and_dispatch(drawn)

    def _plan_and_dispatch(self, drawn: DrawnStep) -> Step:
        """Dispatch a step whose plan was asked for. Collective over the world."""
        planned = self._plan(drawn)
        if drawn.request == 0:
            with beside_bars():
                for note in planned.plan.notes:
                    logger.info("%s", note)
        self._set_phase(f"{self._what} {drawn.number}, exchanging tokens")
        step: Step = self._dispatch(planned)
        return step

    def _draw(self) -> None:
        """Draw one step and submit it to the planner. Collective over the world."""
        assert self._iterator is not None, "next sets the iterator"
        # 1. what this rank draws
        number = self._next_number + len(self._drawn)
        row = SourceRow(columns={}, lengths=())
        facts: RowFacts | None = None  # of a rank whose data could not be drawn
        cpu_group = self.communicator.cpu_group
        with cpu_group.own_work(f"{self._what} {number}"), ErrorCapture() as drawing:
            row = source_row(list(islice(self._iterator, self._num_batches)))
            if self._virtual_tokens:
                row = with_virtual_tokens(row, self._virtual_tokens)
            row = self._images.read(row)
            facts = RowFacts.of(row, marks_of(row) if self._shares_prefixes else [])

        # 2. what all ranks have drawn
        cpu_group.phase = f"{self._what} {number}, gathering its lengths"
        gathered = cpu_group.gather_values(facts)
        if None in gathered:
            drawing.raise_on_all_ranks(cpu_group.gather_values, f"drawing {self._what} {number}")
        of_ranks = [RowFacts(*one) for one in gathered]
        everyone = RowFacts.joined(of_ranks, cpu_group.phase)
        if not everyone.lengths:
            self._is_exhausted = True
            return

        # 3. the step
        first_own = sum(len(one.images) for one in of_ranks[: self.communicator.rank])
        images, own_images = self._distinct_images(row, everyone, first_own)
        step = DrawnStep(
            number=number,
            request=self._next_request,
            row=row.with_columns(everyone.dtypes),
            lengths=tuple(everyone.lengths),
            sources=tuple(rank for rank, one in enumerate(of_ranks) for _ in one.lengths),
            targets=tuple(everyone.targets),
            counts=RowCounts(*everyone.counts),
            images=images,
            own_images=own_images,
            blocks={
                index: [(start, stop) for start, stop in own] for index, own in everyone.blocks
            },
        )
        for_planner = StepFacts(
            units=self._units(step, everyone) if self._shares_prefixes else (),
            later_pairs={sequence: later_pairs(own) for sequence, own in step.blocks.items()},
        )
        self._next_request += 1
        self._drawn.append(self._submitted(replace(step, facts=for_planner)))

    def _submitted(self, step: DrawnStep) -> DrawnStep:
        """Ask rank 0's planner for the plan of a step; return the step, which says how its images
        are encoded."""
        if step.images:
            step = self._images.planned(step)
        if self._planner is not None:
            version = None if self._jobs is None else self._jobs.version_of(step.number)
            if self._jobs is not None and version != self._version:
                self._version = version
                self._planner.use(self._jobs.job_of(step.number))
            self._planner.submit(step.request, list(step.lengths), step.facts)
        return step

    def _distinct_images(
        self, row: SourceRow, everyone: RowFacts, first_own: int
    ) -> tuple[tuple[ImageSize, ...], tuple[int, ...]]:
        """Return the images of all ranks, each once, and which of them each of this rank's images
        is. Collective over the world where some may be the same. first_own: the index of this
        rank's first one among all."""
        if not everyone.images:
            return (), ()
        own = row.images.images
        images = [ImageSize(**size) for size in everyone.images]
        if self._images.draws_noise:
            return tuple(images), tuple(range(first_own, first_own + len(own)))
        distinct, which = distinct_images(
            own, images, everyone.image_marks, first_own, self.communicator
        )
        return tuple(images[index] for index in distinct), tuple(
            which[first_own : first_own + len(own)]
        )

    def _units(self, step: DrawnStep, everyone: RowFacts) -> list[Unit]:
        """Return the rows of a step that begin alike, on rank 0. Collective over the world."""
        if step.blocks:  # a block that rows share in part could not be computed
            return []
        alike = candidates(everyone.lengths, everyone.marks)
        if not alike:
            return []
        self._set_phase(f"{self._what} {step.number}, comparing its rows")
        wanted = sorted(i for rows in alike for i in rows)
        # Equal tokens may stand for different images.
        row = with_image_rows(step.row, step) if step.images else step.row
        found = gather_rows(row, step.sources, wanted, self.communicator)
        with ErrorCapture() as comparing:
            return units_of(found)
        # rows by themselves are as exact
        logger.error("rows share no prefixes in this step: %r", comparing.error)
        return []

    def _plan(self, step: DrawnStep) -> PlannedStep:
        """Return a submitted step with its plan, on every rank. Collective over the world."""
        cpu_group = self.communicator.cpu_group
        cpu_group.phase = f"{self._what} {step.number}, sending its plan"
        began = time.perf_counter()
        planning = ErrorCapture()
        kind = "waiting"
        while kind == "waiting":
            waited_s = time.perf_counter() - began
            kind, said = cpu_group.broadcast_value(self._answer(step, waited_s, planning))
        waited_s = time.perf_counter() - began
        if kind == "infeasible":
            raise PlanInfeasible(said) from planning.error
        if kind == "failed":
            raise RuntimeError(
                f"planning of {self._what} {step.number} failed: {said}"
            ) from planning.error
        return PlannedStep(drawn=step, plan=self._read(said), waited_s=waited_s)

    def _answer(
        self, step: DrawnStep, waited_s: float, planning: ErrorCapture
    ) -> tuple[str, Any] | None:
        """Return rank 0's checked plan, or why planning failed, as (kind, record or reason); None
        on the other ranks.

        waited_s: seconds that the planner has been waited for already. planning: keeps the error.
        """
        if self._planner is None:
            return None
        timeout_s = self.communicator.cpu_group.timeout.total_seconds()
        round_s = min(ROUND_S, timeout_s / ROUNDS)
        late = self._planner.wait(step.request, min(round_s, timeout_s - waited_s))
        if late is not None and waited_s + round_s < timeout_s:
            return ("waiting", None)
        if late is not None:
            reason = (
                f"{late} has not answered for {timeout_s:g} s; if it is slow and not stuck, raise "
                "ddp_timeout, the time that ranks wait for each other"
            )
            return ("failed", reason)
        with planning:
            plan = self._planner.result(step.request)
            self._check(plan)
            return ("plan", plan.to_record())
        match planning.error:
            case PlanInfeasible():
                return ("infeasible", str(planning.error))
            case RuntimeError() | ValueError():
                return ("failed", str(planning.error))
        return ("failed", repr(planning.error))
