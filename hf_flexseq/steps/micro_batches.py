"""The micro-batches of an optimizer step, as a rank that has the whole model runs them.

Whatever runs them, `running` surrounds a micro-batch: it times the micro-batch, and leaves
gradients unreduced in all but the last (`before_last`). Micro-batches run in two ways:

    micro_batches    one pass, if the loss is a sum over tokens: the caller gets the inputs of one
                     micro-batch after the other, and runs forward and backward. If the loss also
                     depends on *totals*, sums over all tokens of the step and over all ranks, a
                     first pass finds them, and the second one runs as if they were constants
    FigurePasses     two passes around a loss on the source ranks (`figure_passes.py`)
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any, Protocol

import torch

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.peak import peak_share
from hf_flexseq.plan import Plan
from hf_flexseq.steps.exchange import Routes
from hf_flexseq.steps.features import StepImages
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.peaks import peaks_of
from hf_flexseq.steps.random_numbers import random_numbers_of, random_states
from hf_flexseq.steps.rank_step import RankStep
from hf_flexseq.steps.source_row import PlannedStep

BeforeLast = Callable[[], AbstractContextManager[Any]]  # surrounds a micro-batch

WITHOUT_BACKWARD = nullcontext[BeforeLast](nullcontext)
"""Surrounds micro-batches whose gradients nothing reduces."""

# Takes a micro-batch's share of the totals, [n] on the CPU, adds up those of all micro-batches and
# ranks, and makes them known.
AddUp = Callable[[torch.Tensor], None]


class TokenLoss(Protocol):
    """A loss that is a sum over tokens once totals of the whole step are known."""

    def count(self, inputs: Inputs) -> torch.Tensor:
        """Run a micro-batch forward without gradients: return its totals, [n] on the CPU."""

    def know(self, totals: torch.Tensor) -> None:
        """Take the totals of the step, [n] on the CPU."""

    def next(self, *, add_up: AddUp | None) -> None:
        """Begin the next micro-batch of the second pass. add_up: gets its share between forward
        and backward, if totals are unknown."""

    def finish(self) -> None:
        """End the last micro-batch of the step."""


# ---- the step


class RankMicroBatches(RankStep[Plan]):
    """The micro-batches of one plan that this rank runs, with the tokens that it holds in each."""

    def __init__(
        self,
        planned: PlannedStep,
        *,
        indices: Sequence[int],
        counts: Sequence[int],
        inputs_of: Callable[[int], Inputs],
        routes: Routes,
        device: torch.device,
        images: StepImages | None = None,
        encode_ahead: "Callable[[RankMicroBatches], None] | None" = None,
    ) -> None:
        """indices: in the plan, of the micro-batches that this rank runs, never empty.
        counts: tokens that it holds in each micro-batch of the plan.
        inputs_of: makes the inputs of a micro-batch, by its index.
        routes: gather figures on the source ranks, and dispatch weights to the tokens.
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
        """Yield the index of one micro-batch after the other, and time the caller's work on it.
        before_last: see `running`."""
        for index, following in self.in_order(order):
            with self.running(index, following, before_last):
                yield index

    def in_order(self, order: Sequence[int]) -> list[tuple[int, int | None]]:
        """Begin a pass: return each index with the one that follows, None for the last."""
        self.passes += 1
        return list(zip_longest(order, order[1:]))

    @contextmanager
    def running(
        self, index: int, following: int | None, before_last: BeforeLast
    ) -> Iterator[None]:
        """Time the block, which runs a micro-batch.

        The inputs of the following one are made when all work of the block has been launched, so
        that a device which computes on its own need not wait for them.

        before_last: surrounds a micro-batch that another one follows.
        """
        self.current = index
        around = nullcontext() if following is None else before_last()
        with self.peaks.watching(index), self.stopwatch.timing(index), around:
            yield
        if following is None:
            self.current = None
        else:
            self._prepare(following)

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
        """Let go of inputs and of encoded images: the step has failed."""
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

    def micro_batches(
        self,
        around: AbstractContextManager[BeforeLast] = WITHOUT_BACKWARD,
        loss: TokenLoss | None = None,
    ) -> Generator[Inputs, None, None]:
        """Yield the inputs of every micro-batch, once; the caller adds its loss (`add`).
        Collective over the world.

        around: surrounds all of them, and gives the context around each but the last. loss: set if
        it depends on totals, which a first pass finds; None if not.
        """
        assert not self.ran, "a step runs once"
        with around as before_last:
            if loss is None:
                order: Sequence[int] = self.indices
                self.begin(order)
            else:
                order = self.second_order()
                add_up = self._first_pass(loss, order)
            for index, following in self.in_order(order):
                self.ran.append(index)
                drawn_before: AbstractContextManager[None] = nullcontext()
                if loss is not None:
                    is_counted = index != self.last_of_plan
                    loss.next(add_up=None if is_counted else add_up)
                    if is_counted:
                        drawn_before = self.random_state_of(index)
                with self.running(index, following, before_last), drawn_before:
                    yield self.take(index)
            if loss is not None:
                loss.finish()

    def _first_pass(self, loss: TokenLoss, order: Sequence[int]) -> AddUp:
        """Run a pass without gradients that finds this rank's shares of the totals; return the
        function that adds the last one. Collective over the world. The plan's last micro-batch is
        in the second pass alone, as its first: the totals are known when it has run forward.
        order: of the second pass."""
        self.begin(order, follows=True)
        shares = []
        for index, following in self.in_order([one for one in order if one != self.last_of_plan]):
            with self.running(index, following, nullcontext), torch.no_grad():
                self.keep_random_state(index)
                shares.append(loss.count(self.take(index)))

        def add_up(share: torch.Tensor) -> None:
            totals = share.clone()
            for earlier in shares:
                totals += earlier
            self.routes.cpu_group.all_reduce(totals)  # [n] -> [n]
            loss.know(totals)

        if self.last_of_plan not in self.indices:
            add_up(torch.zeros_like(shares[0]))
        return add_up

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

    def random_state_of(self, index: int) -> AbstractContextManager[None]:
        """Draw inside the random numbers that the first pass of a micro-batch has drawn."""
        return random_numbers_of(self._random.pop(index))


def _forgotten(index: int) -> Inputs:
    raise AssertionError("a step that has failed does not run any more")
