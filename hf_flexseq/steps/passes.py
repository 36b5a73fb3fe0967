"""An optimizer step whose loss is computed at home, from figures of its tokens.

The loss of a preference, of a policy gradient or of a class is no sum over tokens: it needs
numbers of whole sequences, and often of several. Such a loss reads the model through a few
*figures* of each token, its log-probability for example. Where the plan has put a token does not
matter to it:

1. first pass    every micro-batch runs forward, and the figures of its tokens go home, to the rank
                 that drew them
2. the loss      is computed there, on the figures, by whoever owns it; its gradients with respect
                 to them are the *weights* w
3. second pass   the weights go where the tokens are, every micro-batch runs forward again, and
                 backward of sum(w * figures)

The last sum has exactly the gradient of the loss (the chain rule). The last micro-batch of the
plan keeps its graph from the first pass and runs backward first, so that a step of m micro-batches
repeats m - 1 forwards, and a step of one none.

Where a loss is a sum over tokens, each with a factor of its own, the weights are these factors,
whatever the figures are. They are known before any forward, go out first, and one pass does:
every micro-batch runs forward and backward, and the figures come home for the loss and for what
is logged of it (`run_once`).

That micro-batch is the plan's last on every rank, and a rank without a part in it keeps none:
ranks that share sequences must run their micro-batches in one order.

Besides, a loss may depend on *totals*: sums over all tokens of the step, over all ranks, such as
how often each expert was chosen. Every rank gets the same totals, and what the losses of all ranks
have as gradients with respect to a total is added up to its weight.

A loss that is a sum over tokens once some totals are known needs no figures. Then the first pass
finds the totals alone, and the second one runs as if they were constants (`run_after_totals`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan import Plan
from hf_flexseq.steps.exchange import Columns, Routes, RowExchange
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.lookahead import DrawnStep
from hf_flexseq.steps.step import RankStep

BeforeLast = Callable[[], AbstractContextManager[Any]]

# Runs a micro-batch: its inputs -> figures of its tokens, each [tokens, ...], by name.
Forward = Callable[[Inputs], Columns]


class Objective(Protocol):
    """A loss of figures."""

    @property
    def totals(self) -> Collection[str]:
        """Names among what `forward` returns that are sums over the tokens of a micro-batch."""

    def forward(self, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens, ...], by name, and sums
        over them, each of one shape in all micro-batches."""

    def loss(self, figures: Columns) -> tuple[torch.Tensor, Columns]:
        """Return this rank's loss, a detached scalar, and its gradients with respect to figures.

        figures: of the tokens that this rank drew, each [tokens, ...], and totals of the whole
        step, on the CPU. Gradients are on the CPU, too, for the names on which the loss depends,
        and for one at least.
        """

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

        is_dummy: whether its only token is nobody's. add_up: where the totals are not known yet,
        what to give the micro-batch's share to, once, between its forward and its backward.
        """

    def finish(self) -> None:
        """End the last micro-batch of the step."""


class PassStep(RankStep[Plan]):
    """The micro-batches of one plan, which can run several times."""

    __slots__ = (
        "_communicator",
        "_counts",
        "_exchange",
        "_inputs_of",
        "_random",
        "_routes",
        "indices",
    )

    def __init__(
        self,
        drawn: DrawnStep,
        plan: Plan,
        *,
        indices: Sequence[int],
        counts: Sequence[int],
        inputs_of: Callable[[int], Inputs],
        exchange: RowExchange,
        routes: Routes,
        waited_s: float,
        device: torch.device,
    ) -> None:
        """indices: in the plan, of the micro-batches that this rank runs, never empty.
        counts: tokens that it holds in each micro-batch of the plan.
        inputs_of: makes the inputs of a micro-batch, by its index.
        exchange, routes: bring figures home, and weights to the tokens.
        """
        super().__init__(drawn, plan, waited_s=waited_s, device=device)
        self.indices = tuple(indices)
        self._counts = tuple(counts)
        self._inputs_of = inputs_of
        self._exchange = exchange
        self._routes = routes
        self._communicator: Communicator = exchange.communicator
        self._random: dict[int, list[torch.Tensor]] = {}  # states before each micro-batch
        self.passes = 0  # so far

    @property
    def second_pass(self) -> list[int]:
        """Indices of this rank's micro-batches in the order of a second pass: the plan's last one,
        which keeps something of the first pass, comes first."""
        kept = len(self.plan.micro_batches) - 1
        order = [index for index in self.indices if index != kept]
        if kept in self.indices:
            order.insert(0, kept)
        return order

    def figures(self, forward: Forward, totals: Collection[str] = ()) -> Columns:
        """Run every micro-batch forward, without gradients, and return the figures of the tokens
        that this rank drew, each [tokens, ...] on the CPU, and totals of the whole step.
        Collective over the world.

        totals: see `Objective`; names that are not there do not matter.
        """
        self.passes += 1
        with torch.no_grad():
            found = {index: forward(self._inputs_of(index)) for index in self.indices}
        return self._home(found, totals)

    def run(self, objective: Objective, before_last: BeforeLast = nullcontext) -> torch.Tensor:
        """Run both passes, and return this rank's loss, a detached scalar. Collective over the
        world.

        before_last: surrounds every micro-batch of the second pass but the last one.
        """
        self.passes += 2
        # 1. first pass
        kept_index = len(self.plan.micro_batches) - 1
        found: dict[int, Columns] = {}
        for index in self.indices:
            keeps = index == kept_index
            around = before_last() if keeps and len(self.indices) > 1 else nullcontext()
            self._keep_random_state(index)
            with self.stopwatch.timing(index), around, torch.set_grad_enabled(keeps):
                found[index] = objective.forward(self._inputs_of(index))
        kept = found.get(kept_index)
        figures = self._home(found, objective.totals)
        found.clear()

        # 2. the loss at home
        loss, gradients = objective.loss(figures)
        gradients = self._with_agreed(gradients, figures)
        of_totals = self._taken_and_added_up(gradients, objective.totals)
        weights = self._exchange.deal(gradients, self._routes)

        # 3. second pass, the kept micro-batch first
        order = self.second_pass
        for index in order:
            around = nullcontext() if index == order[-1] else before_last()
            with self.stopwatch.timing(index), around:
                if index == kept_index and kept is not None:
                    own, kept = kept, None
                else:
                    with self._random_state_of(index):
                        own = objective.forward(self._inputs_of(index))
                is_dummy = not self._counts[index]
                objective.backward(_weighted(own, weights[index], of_totals, is_dummy=is_dummy))
        return loss

    def run_once(
        self, objective: Objective, weights: Columns, before_last: BeforeLast = nullcontext
    ) -> torch.Tensor:
        """Run one pass, where the gradients of the loss are known before it, and return this
        rank's loss, a detached scalar. Collective over the world.

        weights: the gradients of this rank's loss with respect to figures, each [tokens, ...] on
            the CPU, for the same names on all ranks.
        before_last: surrounds every micro-batch but the last one.
        Raises RuntimeError where the loss turns out to have other gradients.
        """
        self.passes += 1
        # 1. the weights go with the tokens
        dealt = self._exchange.deal(weights, self._routes)

        # 2. forward and backward
        found: dict[int, Columns] = {}
        for index in self.indices:
            around = nullcontext() if index == self.indices[-1] else before_last()
            with self.stopwatch.timing(index), around:
                own = objective.forward(self._inputs_of(index))
                is_dummy = not self._counts[index]
                objective.backward(_weighted(own, dealt[index], {}, is_dummy=is_dummy))
            found[index] = {name: figure.detach() for name, figure in own.items()}

        # 3. the loss at home
        loss, gradients = objective.loss(self._home(found, objective.totals))
        _check_known(weights, gradients)
        return loss

    def run_after_totals(
        self,
        loss: TokenLoss,
        forward_backward: Callable[[Inputs], torch.Tensor],
        before_last: BeforeLast = nullcontext,
    ) -> torch.Tensor:
        """Run a first pass that finds totals, and a second one with them; return the sum of the
        losses of the second, a scalar. Collective over the world.

        The plan's last micro-batch is the first of the second pass, and is left out of the first:
        the totals are known when it has run forward.

        forward_backward: runs a micro-batch of the second pass. before_last: see `run`.
        """
        self.passes += 2
        # 1. first pass
        last_of_plan = len(self.plan.micro_batches) - 1
        order = self.second_pass
        shares = []
        for index in order:
            if index == last_of_plan:
                continue
            self._keep_random_state(index)
            with self.stopwatch.timing(index), torch.no_grad():
                share = loss.count(self._inputs_of(index))
            shares.append(share if self._counts[index] else torch.zeros_like(share))

        def add_up(share: torch.Tensor) -> None:
            totals = share.clone()
            for earlier in shares:
                totals += earlier
            self._communicator.host.all_reduce(totals)  # [n] -> [n]
            loss.know(totals)

        # 2. second pass
        if last_of_plan not in self.indices:
            add_up(torch.zeros_like(shares[0]))
        losses = []
        for index in order:
            is_unknown = index == last_of_plan
            loss.next(is_dummy=not self._counts[index], add_up=add_up if is_unknown else None)
            around = nullcontext() if index == order[-1] else before_last()
            random = nullcontext() if is_unknown else self._random_state_of(index)
            with self.stopwatch.timing(index), around, random:
                losses.append(forward_backward(self._inputs_of(index)))
        loss.finish()
        total = losses[0]
        for one in losses[1:]:
            total = total + one
        return total

    def measured_s(self) -> list[float]:
        """Return the seconds of every micro-batch of the plan on this rank, all passes together,
        0 where the rank had none; wait for the device."""
        seconds = self.stopwatch.seconds()
        return [seconds.get(index, 0.0) for index in range(len(self.plan.micro_batches))]

    # ---- figures and weights

    def _home(self, found: dict[int, Columns], totals: Collection[str]) -> Columns:
        """Bring figures to who drew the tokens: each [tokens of this rank's row, ...]. Add totals
        up. Collective over the world.

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
        figures = self._exchange.home(columns, self._routes)
        for name in sorted(first.keys() & set(totals)):
            total = torch.zeros_like(first[name], device="cpu")
            for index, own in found.items():
                if self._counts[index]:  # else the one token of a dummy
                    total += own[name].detach().cpu()
            self._communicator.host.all_reduce(total)
            figures[name] = total
        return figures

    def _with_agreed(self, gradients: Columns, figures: Columns) -> Columns:
        """Return gradients for what some rank's loss depends on, zeros where it is another's.
        Collective over the world."""
        names = sorted(figures)
        used = [int(name in gradients) for name in names]
        of_all = self._communicator.host.gather_ints(used)
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
            self._communicator.host.all_reduce(taken[name])
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


def _check_known(weights: Columns, gradients: Columns) -> None:
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
