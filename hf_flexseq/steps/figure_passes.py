"""Passes over the micro-batches of a step around a loss on the source ranks.

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

If a loss is a sum over tokens, each with its own factor, the weights are these factors, whatever
the figures are. They are known before any forward and are dispatched first, so one pass suffices;
the figures are gathered for the loss, which then shows its real gradients. If these differ from
the weights, the caller drops the first pass's gradients, and a second pass follows.

A loss may also depend on *totals*: sums over all tokens of the step, over all ranks, such as how
often each expert was chosen. Every rank gets the same totals, and the gradients of all ranks'
losses with respect to a total add up to its weight.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Protocol

import torch

from hf_flexseq.kernels.upload import to_device
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.micro_batches import BeforeLast, RankMicroBatches
from hf_flexseq.steps.source_row import Columns

# Runs a micro-batch: its inputs -> figures of its tokens, each [tokens, ...], by name.
Forward = Callable[[Inputs], Columns]


class Objective(Protocol):
    """A loss of figures."""

    @property
    def totals(self) -> Collection[str]:
        """Names of results of `forward` that are sums over the tokens of a micro-batch."""

    def forward(self, inputs: Inputs, weights: Columns | None = None) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens, ...], by name, and sums
        over them, each of one shape in all micro-batches. weights: with which `backward` will
        follow, where they are known; on the CPU."""

    def backward(self, weighted: torch.Tensor) -> None:
        """Run backward of a scalar."""


def figures_of(step: RankMicroBatches, forward: Forward, totals: Collection[str] = ()) -> Columns:
    """Run every micro-batch forward, without gradients, and return figures of this rank's drawn
    tokens, each [tokens, ...] on the CPU, and `totals` of the whole step. Collective over the
    world."""
    step.passes += 1
    with step.of_other_weights(), torch.no_grad():
        found = {index: forward(step.take(index)) for index in step.indices}
    return gathered(step, found, totals)


class FigurePasses:
    """The passes of one step: `first` and `second`, or `only`."""

    def __init__(
        self,
        step: RankMicroBatches,
        objective: Objective,
        before_last: BeforeLast = nullcontext,
    ) -> None:
        """before_last: surrounds every micro-batch but the last one that runs backward."""
        self._step = step
        self._objective = objective
        self._before_last = before_last
        self._kept: Columns | None = None  # figures of the first pass, with their graph

    def first(self) -> Columns:
        """Run every micro-batch forward, and return figures as `figures_of` does. The plan's last
        micro-batch keeps its graph for `second`. Collective over the world."""
        step = self._step
        step.begin(step.second_order(), follows=True)
        found: dict[int, Columns] = {}
        for index in step.walk(step.indices):
            keeps = index == step.last_of_plan
            around = self._before_last() if keeps and len(step.indices) > 1 else nullcontext()
            step.keep_random_state(index)
            with around, torch.set_grad_enabled(keeps):
                found[index] = self._objective.forward(step.take(index))
        self._kept = found.get(step.last_of_plan)
        return gathered(step, found, self._objective.totals)

    def second(self, figures: Columns, gradients: Columns) -> None:
        """Run backward of every micro-batch, the kept one first, and forward of the others again.
        Collective over the world.

        figures: as `first` returned them.
        gradients: of this rank's loss with respect to figures and totals, on the CPU, for the
            names on which the loss depends.
        """
        # 1. the gradients of all ranks' losses
        step = self._step
        gradients = _with_agreed(step, gradients, figures)
        of_totals = {}
        for name in sorted(gradients.keys() & set(self._objective.totals)):
            of_totals[name] = gradients.pop(name).clone()
            step.routes.cpu_group.all_reduce(of_totals[name])
        weights = step.routes.dispatch(gradients)

        # 2. the kept micro-batch, then the others
        kept, self._kept = self._kept, None
        for index in step.walk(step.second_order(), self._before_last):
            if index == step.last_of_plan and kept is not None:
                own, kept = kept, None
            else:
                with step.random_state_of(index):
                    own = self._objective.forward(step.take(index))
            self._backward(index, own, weights[index] | of_totals)

    def only(self, weights: Columns) -> Columns:
        """Run forward and backward of every micro-batch; return figures as `figures_of` does.
        Collective over the world. weights: this rank's gradients by figure, each [tokens, ...] on
        the CPU, for the same names on all ranks."""
        step = self._step
        dispatched = step.routes.dispatch(weights)
        step.begin(step.indices)
        found: dict[int, Columns] = {}
        for index in step.walk(step.indices, self._before_last):
            step.keep_random_state(index)  # for `second`, if the weights were wrong
            known = dispatched[index] if step.counts[index] else None  # a dummy has no weights
            own = self._objective.forward(step.take(index), known)
            self._backward(index, own, dispatched[index])
            found[index] = {name: figure.detach() for name, figure in own.items()}
        return gathered(step, found, self._objective.totals)

    def _backward(self, index: int, figures: Columns, weights: Columns) -> None:
        """Run backward of the sum of weight times figure, each [tokens or one dummy, ...] or a sum
        over tokens. weights: for some names, on the CPU."""
        parts = []
        for name, weight in weights.items():
            figure = figures[name]
            if self._step.counts[index]:
                parts.append((to_device(weight, figure.device) * figure).sum())
            else:  # a dummy takes part in the gradients' reduction
                parts.append(0.0 * figure.sum())
        assert parts, "the ranks have agreed on one figure at least"
        self._objective.backward(sum(parts[1:], start=parts[0]))


def difference_of(weights: Columns, gradients: Columns) -> str | None:
    """Return how the gradients of a loss differ from the weights that were known before, in a few
    words; None if only by rounding. Each [tokens, ...] on the CPU."""
    for name in sorted({*weights, *gradients}):
        if name not in weights or name not in gradients:
            return f"depends on {name}" if name in gradients else f"does not depend on {name}"
        weight, gradient = weights[name], gradients[name]
        if not torch.allclose(
            gradient, weight.to(gradient.dtype), rtol=rounding_of(gradient.dtype), atol=0.0
        ):
            return f"has other gradients of {name}"
    return None


def rounding_of(dtype: torch.dtype) -> float:
    """Return how far gradients may be off, as a part of them: factors and divisors may be rounded
    in another order."""
    return 64 * torch.finfo(dtype).eps


def gathered(
    step: RankMicroBatches, found: Mapping[int, Columns], totals: Collection[str]
) -> Columns:
    """Gather figures on the source ranks, each [tokens of this rank's row, ...], and add `totals`
    up. Collective over the world. found: by micro-batch, each [tokens or one dummy, ...]."""
    first = next(iter(found.values()))
    like = {name: value for name, value in first.items() if name not in totals}
    columns = []
    for index, count in enumerate(step.counts):
        own = {}
        for name, value in like.items():
            if count:
                own[name] = found[index][name].detach().cpu()
            else:  # nothing, or the one token of a dummy
                own[name] = torch.empty(0, *value.shape[1:], dtype=value.dtype)
        columns.append(own)
    figures = step.routes.to_source(columns)
    for name in sorted(first.keys() & set(totals)):
        total = torch.zeros_like(first[name], device="cpu")
        for index, own in found.items():
            if step.counts[index]:  # else the one token of a dummy
                total += own[name].detach().cpu()
        step.routes.cpu_group.all_reduce(total)
        figures[name] = total
    return figures


def _with_agreed(step: RankMicroBatches, gradients: Columns, figures: Columns) -> Columns:
    """Return gradients for every figure that a rank's loss uses, zeros for others' alone."""
    names = sorted(figures)
    of_all = step.routes.cpu_group.gather_values([name in gradients for name in names])
    agreed = {}
    for name, *flags in zip(names, *of_all, strict=True):
        if name in gradients:
            agreed[name] = gradients[name]
        elif any(flags):
            agreed[name] = torch.zeros_like(figures[name])
    return agreed
