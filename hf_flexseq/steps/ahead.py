"""Hand out steps with their tokens where their plans want them, the next one already while this
one runs.

1. `next` takes a step and its plan from the `Lookahead`, and has it dealt.
2. `deal_ahead` does this for the step that will be asked for next. It is called when all work of
   the current step has been launched and before its optimizer: a device that computes on its own
   then has no step to wait for. All ranks come to that place once a step, however many
   micro-batches they run, so that their exchanges stay in one order.
3. `next` hands that step out, when it is asked for one of the same iterator.

Nothing of this shows. What goes wrong in `deal_ahead` belongs to the next step and is raised
there; the current one goes on. A step of an iterator that is left before its end was not there:
the next one has its number. Only a lost rank is an error at once: nothing works without it.

Rejected: to deal between two micro-batches, which ranks reach at different times or never, where
they run different numbers of them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_flexseq.distributed.agreement import Attempt
from hf_flexseq.distributed.transport import LostRank
from hf_flexseq.steps.lookahead import Lookahead
from hf_flexseq.steps.screen import beside_bars
from hf_flexseq.steps.step import RankStep

logger = logging.getLogger(__name__)

Batches = Iterator[Mapping[str, Any]]
Step = RankStep[Any]  # of either kind: it is only handed on
# (drawn step, its plan, waited_s=seconds that the plan was waited for) -> the step. Collective.
Deal = Callable[..., Step]


class DealtSteps:
    """The steps of one iterator at a time, dealt to the ranks."""

    __slots__ = ("_ahead", "_deal", "_iterator", "_num_batches", "lookahead")

    def __init__(self, lookahead: Lookahead, deal: Deal) -> None:
        """Nothing is drawn before the first `next`."""
        self.lookahead = lookahead
        self._deal = deal
        self._iterator: Batches | None = None  # that of the last `next`, and its number of batches
        self._num_batches = 0
        self._ahead: _Ahead | None = None

    def next(self, iterator: Batches, num_batches: int) -> Step | None:
        """Return the next step of `num_batches` batches per rank; None when no rank has a sequence
        left. Collective over the world.

        Raises, on all ranks alike, as `Lookahead.next` and the dealing of tokens do.
        """
        ahead, self._ahead = self._ahead, None
        is_left = iterator is not self._iterator
        self._iterator = iterator
        self._num_batches = num_batches
        if ahead is not None and is_left:
            self.lookahead.next_number = ahead.number
            ahead = None
        if ahead is None:
            step = self._draw_and_deal()
        else:
            step = ahead.handed_out()
        if step is not None:
            self._phase(f"{self.lookahead.what} {step.number}")
        return step

    def deal_ahead(self) -> None:
        """Deal the step that `next` will return, if it is asked for one of the same iterator.
        Collective over the world.

        Nothing happens where steps are not planned ahead, nor a second time. Raises LostRank
        alone.
        """
        plans_ahead = self.lookahead.lookahead > 0
        if not plans_ahead or self._iterator is None or self._ahead is not None:
            return
        phase = self.lookahead.communicator.host.phase
        number = self.lookahead.next_number
        step = None
        with Attempt() as dealing:  # what fails here has failed on all ranks together
            step = self._draw_and_deal()
        if isinstance(dealing.error, LostRank):
            raise dealing.error
        self._ahead = _Ahead(number, step, dealing.error)
        self._phase(phase)

    def close(self) -> None:
        """End the planner, and forget the step that was dealt ahead."""
        self._ahead = None
        self._iterator = None
        self.lookahead.close()

    def _draw_and_deal(self) -> Step | None:
        """Return the next step, None when no rank has a sequence left. Collective."""
        assert self._iterator is not None, "next sets the iterator"
        found = self.lookahead.next(self._iterator, self._num_batches)
        if found is None:
            return None
        drawn, plan = found
        if drawn.request == 0:
            with beside_bars():
                for note in plan.notes:
                    logger.info("%s", note)
        self._phase(f"{self.lookahead.what} {drawn.number}, exchanging tokens")
        return self._deal(drawn, plan, waited_s=self.lookahead.waited_s)

    def _phase(self, phase: str) -> None:
        """Say what the exchanges to come belong to."""
        self.lookahead.communicator.host.phase = phase


class _Ahead:
    """What `deal_ahead` came to."""

    __slots__ = ("_error", "_step", "number")

    def __init__(self, number: int, step: Step | None, error: Exception | None) -> None:
        """number: of the step, where there is one. step: None where the data has ended, and where
        there is an error."""
        self.number = number
        self._step = step
        self._error = error

    def handed_out(self) -> Step | None:
        """Return the step, or raise what kept it from being dealt."""
        if self._error is not None:
            raise self._error
        return self._step
