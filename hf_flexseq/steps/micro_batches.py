"""The micro-batches of an optimizer step, as a rank that has the whole model runs them.

All ways to run micro-batches are one walk over them, which times each of them and surrounds all
but the last by what leaves gradients unreduced (`before_last`):

    micro_batches      one pass, where the loss is a sum over tokens: the caller gets the inputs of
                       one micro-batch after the other, and runs forward and backward
    with_totals        the same, where the loss also depends on sums over all tokens of the step: a
                       first pass finds them
    first_pass,        a loss on the source ranks, of figures of whole sequences: the caller
    second_pass        computes it between the two
    only_pass          the same, where the gradients of the loss are known before it

The loss of a preference, of a policy gradient or of a class is not a sum over tokens: it needs
numbers of whole sequences, and often of several. Such a loss reads the model through a few
*figures* of each token, its log-probability for example. Where the plan has put a token does not
matter to it:

1. first pass    every micro-batch runs forward, and the figures of its tokens are gathered on
                 their source rank, the rank that drew them
2. the loss      is computed there, on the figures, by the trainer's own code; its gradients with
                 respect to them are the *weights* w
3. second pass   the weights are dispatched to the tokens, every micro-batch runs forward again,
                 and backward of sum(w * figures)

The last sum has exactly the gradient of the loss (the chain rule). The last micro-batch of the
plan keeps its graph from the first pass and runs backward first, so that a step of m micro-batches
repeats m - 1 forwards, and a step of one none. It is the plan's last on every rank, and a rank
without a part in it keeps none: ranks that share sequences must run their micro-batches in one
order.

Where a loss is a sum over tokens, each with a factor of its own, the weights are these factors,
whatever the figures are. They are known before any forward, are dispatched first, and one pass
does; the figures are gathered for the loss and for what is logged of it.

Besides, a loss may depend on *totals*: sums over all tokens of the step, over all ranks, such as
how often each expert was chosen. Every rank gets the same totals, and what the losses of all ranks
have as gradients with respect to a total is added up to its weight. A loss that is a sum over
tokens once some totals are known needs no figures (`with_totals`): then the first pass finds the
totals alone, and the second one runs as if they were constants.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Protocol

import torch

from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan import Plan
from hf_flexseq.steps.exchange import Columns, Routes, RowExchange
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.planned_step import PlannedStep
from hf_flexseq.steps.rank_step import RankStep

BeforeLast = Callable[[], AbstractContextManager[Any]]  # surrounds a micro-batch

# Runs a micro-batch: its inputs -> figures of its tokens, each [tokens, ...], by name.
Forward = Callable[[Inputs], Columns]


# ---- losses that need more than a pass over tokens


class Objective(Protocol):
    """A loss of figures."""

    @property
    def totals(self) -> Collection[str]:
        """Names among what `forward` returns that are sums over the tokens of a micro-batch."""

    def forward(self, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens, ...], by name, and sums
        over them, each of one shape in all micro-batches."""

    def backward(self, weighted: torch.Tensor) -> None:
        """Run backward of a scalar."""


# Takes a micro-batch's share of the totals, [n] on the CPU, adds up those of all micro-batches and
# ranks, and makes them known.
AddUp = Callable[[torch.Tensor], None]


class TokenLoss(Protocol):
    """A loss that is a sum over tokens once totals of the whole step are known."""

    def count(self, inputs: Inputs) -> torch.Tensor:
        """Run a micro-batch forward without gradients: return its share of the totals, [n] on the
        CPU."""

    def know(self, totals: torch.Tensor) -> None:
        """Take the totals of the step, [n] on the CPU."""

    def next(self, *, is_dummy: bool, add_up: AddUp | None) -> None:
        """Begin the next micro-batch of the second pass.

        is_dummy: True if its only token is a dummy. add_up: gets the micro-batch's share, once,
        between its forward and its backward, if the totals are not known yet.
        """

    def finish(self) -> None:
        """End the last micro-batch of the step."""


# ---- the step


class RankMicroBatches(RankStep[Plan]):
    """The micro-batches of one plan that this rank runs, with the tokens that it holds in each."""

    __slots__ = (
        "_counts",
        "_exchange",
        "_inputs_of",
        "_kept",
        "_random",
        "_ready",
        "_routes",
        "indices",
        "ran",
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
    ) -> None:
        """indices: in the plan, of the micro-batches that this rank runs, never empty.
        counts: tokens that it holds in each micro-batch of the plan.
        inputs_of: makes the inputs of a micro-batch, by its index.
        exchange, routes: gather figures on the source ranks, and dispatch weights to the tokens.
        """
        super().__init__(planned, device)
        self.indices = tuple(indices)
        self.ran: list[int] = []  # those whose losses the caller has been asked for, in order
        self._counts = tuple(counts)
        self._inputs_of = inputs_of
        self._exchange = exchange
        self._routes = routes
        self._kept: Columns | None = None  # figures of the first pass, with their graph
        self._random: dict[int, list[torch.Tensor]] = {}  # states before each micro-batch
        # the index and the inputs of the micro-batch to run next
        self._ready: tuple[int, Inputs] | None = None
        self._prepare(self.indices[0])

    # ---- the walk

    def _walk(self, order: Sequence[int], before_last: BeforeLast = nullcontext) -> Iterator[int]:
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
            with self.stopwatch.timing(index), before_last():
                yield index
            self._prepare(following)
        last = order[-1]
        with self.stopwatch.timing(last):
            yield last

    def _prepare(self, index: int) -> None:
        """Make the inputs of a micro-batch that will run soon."""
        self._ready = (index, self._inputs_of(index))

    def _take(self, index: int) -> Inputs:
        """Return the inputs of a micro-batch, and keep them no longer."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] == index:
            return ready[1]
        return self._inputs_of(index)

    @property
    def _last_of_plan(self) -> int:
        """Index of the plan's last micro-batch, which this rank may have no part in."""
        return len(self.plan.micro_batches) - 1

    def _second_order(self) -> list[int]:
        """Return the indices of this rank's micro-batches in the order of a second pass: the
        plan's last one, which keeps something of the first pass, comes first."""
        order = [index for index in self.indices if index != self._last_of_plan]
        if self._last_of_plan in self.indices:
            order.insert(0, self._last_of_plan)
        return order

    # ---- a loss that is a sum over tokens

    def micro_batches(self, before_last: BeforeLast = nullcontext) -> Iterator[Inputs]:
        """Yield the inputs of every micro-batch, once; the caller adds its loss (`add`)."""
        assert not self.ran, "a step runs once"
        for index in self._walk(self.indices, before_last):
            self.ran.append(index)
            yield self._take(index)

    def with_totals(
        self, loss: TokenLoss, before_last: BeforeLast = nullcontext
    ) -> Iterator[Inputs]:
        """Run a first pass that finds totals, and yield the inputs of every micro-batch of the
        second, as `micro_batches` does. Collective over the world.

        The plan's last micro-batch is the first of the second pass, and is left out of the first:
        the totals are known when it has run forward.
        """
        assert not self.ran, "a step runs once"
        last_of_plan = self._last_of_plan
        order = self._second_order()

        # 1. first pass
        shares = []
        first = [index for index in order if index != last_of_plan]
        for index in self._walk(first):
            self._keep_random_state(index)
            with torch.no_grad():
                share = loss.count(self._take(index))
            shares.append(share if self._counts[index] else torch.zeros_like(share))

        def add_up(share: torch.Tensor) -> None:
            totals = share.clone()
            for earlier in shares:
                totals += earlier
            self._exchange.communicator.cpu_group.all_reduce(totals)  # [n] -> [n]
            loss.know(totals)

        # 2. second pass
        if last_of_plan not in self.indices:
            add_up(torch.zeros_like(shares[0]))
        for index in self._walk(order, before_last):
            is_unknown = index == last_of_plan
            loss.next(is_dummy=not self._counts[index], add_up=add_up if is_unknown else None)
            self.ran.append(index)
            with nullcontext() if is_unknown else self._random_state_of(index):
                yield self._take(index)
        loss.finish()

    # ---- a loss on the source ranks

    def figures(self, forward: Forward, totals: Collection[str] = ()) -> Columns:
        """Run every micro-batch forward, without gradients, and return the figures of the tokens
        that this rank drew, each [tokens, ...] on the CPU, and totals of the whole step.
        Collective over the world.

        totals: see `Objective`; names that are not there do not matter.
        """
        self.passes += 1
        with torch.no_grad():
            found = {index: forward(self._take(index)) for index in self.indices}
        return self._gathered(found, totals)

    def first_pass(self, objective: Objective, before_last: BeforeLast = nullcontext) -> Columns:
        """Run every micro-batch forward, and return what `figures` does. The plan's last
        micro-batch keeps its graph for `second_pass`. Collective over the world.

        before_last: surrounds every micro-batch of the second pass but the last one.
        """
        found: dict[int, Columns] = {}
        for index in self._walk(self.indices):
            keeps = index == self._last_of_plan
            around = before_last() if keeps and len(self.indices) > 1 else nullcontext()
            self._keep_random_state(index)
            with around, torch.set_grad_enabled(keeps):
                found[index] = objective.forward(self._take(index))
        self._kept = found.get(self._last_of_plan)
        return self._gathered(found, objective.totals)

    def second_pass(
        self,
        objective: Objective,
        figures: Columns,
        gradients: Columns,
        before_last: BeforeLast = nullcontext,
    ) -> None:
        """Run backward of every micro-batch, the kept one first, and forward of the others again.
        Collective over the world.

        figures: as `first_pass` returned them.
        gradients: those of this rank's loss with respect to figures and totals, on the CPU, for
            the names on which the loss depends.
        before_last: surrounds every micro-batch but the last one.
        """
        # 1. the gradients of all ranks' losses
        gradients = self._with_agreed(gradients, figures)
        of_totals = self._taken_and_added_up(gradients, objective.totals)
        weights = self._exchange.dispatch(gradients, self._routes)

        # 2. the kept micro-batch, then the others
        kept, self._kept = self._kept, None
        for index in self._walk(self._second_order(), before_last):
            if index == self._last_of_plan and kept is not None:
                own, kept = kept, None
            else:
                with self._random_state_of(index):
                    own = objective.forward(self._take(index))
            is_dummy = not self._counts[index]
            objective.backward(_weighted(own, weights[index], of_totals, is_dummy=is_dummy))

    def only_pass(
        self, objective: Objective, weights: Columns, before_last: BeforeLast = nullcontext
    ) -> Columns:
        """Run forward and backward of every micro-batch, where the gradients of the loss are known
        before it, and return what `figures` does. Collective over the world.

        weights: the gradients of this rank's loss with respect to figures, each [tokens, ...] on
            the CPU, for the same names on all ranks. `check_known` compares them with the loss.
        before_last: surrounds every micro-batch but the last one.
        """
        # 1. the weights are dispatched as the tokens were
        dispatched = self._exchange.dispatch(weights, self._routes)

        # 2. forward and backward
        found: dict[int, Columns] = {}
        for index in self._walk(self.indices, before_last):
            own = objective.forward(self._take(index))
            is_dummy = not self._counts[index]
            objective.backward(_weighted(own, dispatched[index], {}, is_dummy=is_dummy))
            found[index] = {name: figure.detach() for name, figure in own.items()}
        return self._gathered(found, objective.totals)

    # ---- what is known of the micro-batches

    def measured_s(self) -> list[float]:
        """Return the seconds of every micro-batch of the plan on this rank, all passes together,
        0 where the rank had none; wait for the device."""
        seconds = self.stopwatch.seconds()
        return [seconds.get(index, 0.0) for index in range(len(self.plan.micro_batches))]

    def targets_of(self, indices: Sequence[int]) -> list[int]:
        """Return the tokens with a label, over all ranks, of some micro-batches of the plan."""
        counts = []
        for index in indices:
            groups = self.plan.micro_batches[index].groups
            sequences = [sequence for group in groups for sequence in group.sequences]
            counts.append(sum(self.targets_of_sequences[sequence] for sequence in sequences))
        return counts

    # ---- figures and weights

    def _gathered(self, found: dict[int, Columns], totals: Collection[str]) -> Columns:
        """Gather figures on the source ranks of their tokens, each [tokens of this rank's row,
        ...], and add totals up. Collective over the world.

        found: by index, of the micro-batches that ran, each [tokens or one dummy, ...].
        totals: names among them that are sums over tokens.
        """
        first = next(iter(found.values()))
        like = {name: value for name, value in first.items() if name not in totals}
        columns = []
        for index, count in enumerate(self._counts):
            own = {}
            for name, value in like.items():
                if count:
                    own[name] = found[index][name].detach().cpu()
                else:  # nothing, or the one token of a dummy
                    own[name] = torch.empty(0, *value.shape[1:], dtype=value.dtype)
            columns.append(own)
        figures = self._exchange.to_source(columns, self._routes)
        for name in sorted(first.keys() & set(totals)):
            total = torch.zeros_like(first[name], device="cpu")
            for index, own in found.items():
                if self._counts[index]:  # else the one token of a dummy
                    total += own[name].detach().cpu()
            self._exchange.communicator.cpu_group.all_reduce(total)
            figures[name] = total
        return figures

    def _with_agreed(self, gradients: Columns, figures: Columns) -> Columns:
        """Return gradients for what some rank's loss depends on, zeros where it is another's.
        Collective over the world."""
        names = sorted(figures)
        used = [int(name in gradients) for name in names]
        of_all = self._exchange.communicator.cpu_group.gather_ints(used)
        agreed = {}
        for name, *flags in zip(names, *of_all, strict=True):
            if name in gradients:
                agreed[name] = gradients[name]
            elif any(flags):
                agreed[name] = torch.zeros_like(figures[name])
        return agreed

    def _taken_and_added_up(self, gradients: Columns, totals: Collection[str]) -> Columns:
        """Take the gradients with respect to totals out of `gradients`; return their sums over the
        ranks. Collective over the world."""
        taken = {}
        for name in sorted(gradients.keys() & set(totals)):
            taken[name] = gradients.pop(name).clone()
            self._exchange.communicator.cpu_group.all_reduce(taken[name])
        return taken

    # ---- random numbers: dropout is the same in both passes

    def _keep_random_state(self, index: int) -> None:
        self._random[index] = _random_states()

    @contextmanager
    def _random_state_of(self, index: int) -> Iterator[None]:
        """Draw inside the random numbers that the first pass of a micro-batch has drawn."""
        now = _random_states()
        _set_random_states(self._random.pop(index))
        try:
            yield
        finally:
            _set_random_states(now)


def _random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _set_random_states(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def check_known(weights: Columns, gradients: Columns) -> None:
    """Raise RuntimeError unless the gradients of a loss are the weights that were known before;
    each [tokens, ...] on the CPU."""
    for name in sorted({*weights, *gradients}):
        if name in weights and name in gradients:
            weight = weights[name]
            # as good as the dtype of a loss: 1/items may be rounded in another order
            if torch.allclose(gradients[name].to(weight.dtype), weight, rtol=1e-4, atol=0.0):
                continue
        raise RuntimeError(
            f"a loss has other gradients of {name} than it was known to have: it is not the sum "
            "over tokens that it was taken for"
        )


def _weighted(
    figures: Columns, weights: Columns, of_totals: Columns, *, is_dummy: bool
) -> torch.Tensor:
    """Return the sum over tokens and figures of weight times figure, a scalar.

    figures: each [tokens or one dummy, ...], and sums over the tokens. weights: for some of their
    names, [tokens, ...] on the CPU; a dummy has none. of_totals: for some of the sums, each of
    their shape on the CPU.
    """
    total: torch.Tensor | None = None
    for name, weight in (weights | of_totals).items():
        figure = figures[name]
        if is_dummy:
            part = 0.0 * figure.sum()  # a dummy takes part in the gradients' reduction
        else:
            part = (to_device(weight, figure.device) * figure).sum()
        total = part if total is None else total + part
    assert total is not None, "the ranks have agreed on one figure at least"
    return total
