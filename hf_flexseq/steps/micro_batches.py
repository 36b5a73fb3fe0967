"""The micro-batches of an optimizer step, as a rank that has the whole model runs them.

All ways to run micro-batches are one walk over them, which times each of them and surrounds all
but the last by what leaves gradients unreduced (`before_last`):

    micro_batches    one pass, if the loss is a sum over tokens: the caller gets the inputs of one
                     micro-batch after the other, and runs forward and backward
    with_totals      the same, if the loss also depends on *totals*, sums over all tokens of the
                     step and over all ranks: a first pass finds them, and the second one runs as
                     if they were constants
    FigurePasses     two passes around a loss on the source ranks (`figure_passes.py`)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Protocol

import torch

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.peak import peak_share
from hf_flexseq.plan import Plan
from hf_flexseq.steps.exchange import Routes, RowExchange
from hf_flexseq.steps.features import StepImages
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.peaks import peaks_of
from hf_flexseq.steps.random_numbers import random_numbers_of, random_states
from hf_flexseq.steps.rank_step import RankStep
from hf_flexseq.steps.source_row import PlannedStep

BeforeLast = Callable[[], AbstractContextManager[Any]]  # surrounds a micro-batch

# Takes a micro-batch's share of the totals, [n] on the CPU, adds up those of all micro-batches and
# ranks, and makes them known.
AddUp = Callable[[torch.Tensor], None]


class TokenLoss(Protocol):
    """A loss that is a sum over tokens once totals of the whole step are known."""

    def count(self, inputs: Inputs) -> torch.Tensor:
        """Run a micro-batch forward without gradients: return its totals, [n] on the CPU."""

    def know(self, totals: torch.Tensor) -> None:
        """Take the totals of the step, [n] on the CPU."""

    def next(self, *, is_dummy: bool, add_up: AddUp | None) -> None:
        """Begin the next micro-batch of the second pass. is_dummy: True if its only token is a
        dummy. add_up: gets its share between forward and backward, if totals are unknown."""

    def finish(self) -> None:
        """End the last micro-batch of the step."""


# ---- the step


class RankMicroBatches(RankStep[Plan]):
    """The micro-batches of one plan that this rank runs, with the tokens that it holds in each."""

    __slots__ = (
        "_encode_ahead",
        "_inputs_of",
        "_random",
        "_ready",
        "counts",
        "current",
        "exchange",
        "images",
        "indices",
        "peaks",
        "ran",
        "routes",
    )

    def __init__(
        self,
        planned: PlannedStep,
        *,
        indices: Sequence[int],
        counts: Sequence[int],
        inputs_of: Callable[[int], Inputs],
        exchange: RowExchange,
        routes: Routes,
        device: torch.device,
        images: StepImages | None = None,
        encode_ahead: "Callable[[RankMicroBatches], None] | None" = None,
    ) -> None:
        """indices: in the plan, of the micro-batches that this rank runs, never empty.
        counts: tokens that it holds in each micro-batch of the plan.
        inputs_of: makes the inputs of a micro-batch, by its index.
        exchange, routes: gather figures on the source ranks, and dispatch weights to the tokens.
        images: of the step, if it has any. encode_ahead: encodes them before the step begins, if
            that can be done.
        """
        super().__init__(planned, device)
        self.indices = tuple(indices)
        self.current: int | None = None  # that the caller runs now
        self.ran: list[int] = []  # those whose losses the caller has been asked for, in order
        self.counts = tuple(counts)
        self.peaks = peaks_of(device)
        self._inputs_of = inputs_of
        self.exchange = exchange
        self.routes = routes
        self.images = images
        self._encode_ahead = encode_ahead
        self._random: dict[int, list[torch.Tensor]] = {}  # states before each micro-batch
        # the index and the inputs of the micro-batch to run next
        self._ready: tuple[int, Inputs] | None = None
        self._prepare(self.indices[0])

    def begin_ahead(self) -> None:
        """Encode the step's images, where the step before it changes nothing of their features."""
        if self._encode_ahead is not None:
            self._encode_ahead(self)

    # ---- the walk

    def walk(self, order: Sequence[int], before_last: BeforeLast = nullcontext) -> Iterator[int]:
        """Yield the index of one micro-batch after the other, and time what the caller does with
        it.

        The inputs of a micro-batch are made when all work of the previous one has been launched,
        so that a device which computes on its own need not wait for them.

        before_last: surrounds every micro-batch but the last one.
        """
        self.passes += 1
        if not order:
            return
        for index, following in pairwise(order):
            self.current = index
            with self.peaks.watching(index), self.stopwatch.timing(index), before_last():
                yield index
            self._prepare(following)
        self.current = last = order[-1]
        with self.peaks.watching(last), self.stopwatch.timing(last):
            yield last
        self.current = None

    def begin(self, order: Sequence[int], *, follows: bool = False) -> None:
        """Tell the step's images in which order micro-batches run backward. follows: True if most
        of them run without gradients before."""
        if self.images is not None:
            self.images.begin(order[-1], follows=follows)

    def of_other_weights(self) -> AbstractContextManager[None]:
        """Surround a pass without gradients of a model whose weights may be others than those that
        are trained: images are encoded anew."""
        return nullcontext() if self.images is None else self.images.of_other_weights()

    def _prepare(self, index: int) -> None:
        """Make the inputs of a micro-batch that will run soon."""
        self._ready = (index, self._inputs_of(index))

    def take(self, index: int) -> Inputs:
        """Return the inputs of a micro-batch, and keep them no longer."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] == index:
            return ready[1]
        return self._inputs_of(index)

    def forget(self) -> None:
        """Let go of inputs and of encoded images, for a step that is planned again."""
        self._ready = None
        self._inputs_of = _forgotten
        self.images = None

    @property
    def last_of_plan(self) -> int:
        """Index of the plan's last micro-batch, which this rank may have no part in."""
        return len(self.plan.micro_batches) - 1

    def second_order(self) -> list[int]:
        """Return this rank's indices for a second pass: the plan's last one comes first."""
        order = [index for index in self.indices if index != self.last_of_plan]
        if self.last_of_plan in self.indices:
            order.insert(0, self.last_of_plan)
        return order

    # ---- a loss that is a sum over tokens

    def micro_batches(self, before_last: BeforeLast = nullcontext) -> Iterator[Inputs]:
        """Yield the inputs of every micro-batch, once; the caller adds its loss (`add`)."""
        assert not self.ran, "a step runs once"
        self.begin(self.indices)
        for index in self.walk(self.indices, before_last):
            self.ran.append(index)
            yield self.take(index)

    def with_totals(
        self, loss: TokenLoss, before_last: BeforeLast = nullcontext
    ) -> Iterator[Inputs]:
        """Run a first pass that finds totals, and yield the inputs of the second, as
        `micro_batches` does. Collective over the world. The plan's last micro-batch is in the
        second pass alone, as its first: the totals are known when it has run forward."""
        assert not self.ran, "a step runs once"
        last_of_plan = self.last_of_plan
        order = self.second_order()
        self.begin(order, follows=True)

        # 1. first pass
        shares = []
        first = [index for index in order if index != last_of_plan]
        for index in self.walk(first):
            self.keep_random_state(index)
            with torch.no_grad():
                share = loss.count(self.take(index))
            shares.append(share if self.counts[index] else torch.zeros_like(share))

        def add_up(share: torch.Tensor) -> None:
            totals = share.clone()
            for earlier in shares:
                totals += earlier
            self.exchange.communicator.cpu_group.all_reduce(totals)  # [n] -> [n]
            loss.know(totals)

        # 2. second pass
        if last_of_plan not in self.indices:
            add_up(torch.zeros_like(shares[0]))
        for index in self.walk(order, before_last):
            is_unknown = index == last_of_plan
            loss.next(is_dummy=not self.counts[index], add_up=add_up if is_unknown else None)
            self.ran.append(index)
            with nullcontext() if is_unknown else self.random_state_of(index):
                yield self.take(index)
        loss.finish()

    # ---- what is known of the micro-batches

    def measured_s(self) -> list[float]:
        """Return this rank's seconds of every micro-batch of the plan; wait for the device."""
        seconds = self.stopwatch.seconds()
        return [seconds.get(index, 0.0) for index in range(len(self.plan.micro_batches))]

    def peak_share(self, cost: CostModel, world_size: int) -> float:
        """Return the bytes that this rank has held of a micro-batch's tokens over those predicted,
        the highest of the step; 0.0 where nothing says so, as beside images, which take memory of
        their own. cost: predicts."""
        shares = [0.0]
        if self.images is None:
            for index, peak in self.peaks.found.items():
                choice = self.plan.micro_batches[index].memory
                shares.append(peak_share(cost, peak, self.counts[index], choice, world_size))
        return max(shares)

    def targets_of(self, indices: Sequence[int]) -> list[int]:
        """Return the tokens with a label, over all ranks, of some micro-batches of the plan."""
        counts = []
        for index in indices:
            groups = self.plan.micro_batches[index].groups
            rows = [row for group in groups for row in group.rows]
            counts.append(sum(self.drawn.targets[row] for row in rows))
        return counts

    # ---- random numbers: dropout is the same in both passes

    def keep_random_state(self, index: int) -> None:
        """Keep the random number generators' states before a micro-batch's first pass."""
        self._random[index] = random_states()

    @contextmanager
    def random_state_of(self, index: int) -> Iterator[None]:
        """Draw inside the random numbers that the first pass of a micro-batch has drawn."""
        with random_numbers_of(self._random.pop(index)):
            yield


def _forgotten(index: int) -> Inputs:
    raise AssertionError("a step that was planned again does not run any more")
