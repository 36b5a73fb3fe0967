"""Gradients of a loss of the user's that are known before any forward.

A loss that is a sum over tokens, each with the same factor c, divided by the step's target tokens,

    loss = -c / items * sum of log_probs,

has the gradient -c / items at every target, whatever the log-probabilities are. Next-token loss
has c = 1 times the number of ranks. Other figures, such as entropies, may have factors of their
own. The first step, of two passes, shows whether a loss is such a sum, and its factors. Later
steps take one pass with these gradients as weights, after which the loss shows its real ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.transport import CpuGroup
from hf_flexseq.hf.losses.batch_losses import BatchLosses
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.figure_passes import rounding_of
from hf_flexseq.steps.source_row import Columns

MAIN = "log_probs"
"""The figure of next-token loss."""


class SumOverTokens:
    """Findings of a trainer's steps about its loss, alike on all ranks: whether it is such a sum,
    and its factors."""

    def __init__(self) -> None:
        self._is_one: bool | None = None  # None as long as no step had a target
        self._factors: dict[str, float] = {}  # -c by figure
        self._dtype = torch.float32  # of gradients

    @property
    def is_plain(self) -> bool:
        """True if the loss is next-token loss, with c = 1."""
        factors = self._factors
        return bool(self._is_one) and factors.keys() == {MAIN} and abs(factors[MAIN] + 1) < 1e-5

    def refute(self) -> None:
        """Know from now on that the loss is no such sum."""
        self._is_one = False

    def weights(self, calls: Sequence[ModelCall], items: Any) -> Columns | None:
        """Return the gradients of the loss of calls by figure, [tokens] on the CPU; None if they
        are unknown. items: the step's target tokens, as the Trainer counts them."""
        if not self._is_one or items is None or not float(items):
            return None
        targets = _targets_of(calls).to(self._dtype)
        return {name: targets * (c / float(items)) for name, c in self._factors.items()}

    def learn(
        self, gradients: Columns, losses: BatchLosses, items: Any, cpu_group: CpuGroup
    ) -> bool:
        """Learn from the gradients of a step, each [tokens, ...] on the CPU; return True if they
        have shown now that the loss is a sum. Collective over the world as long as nothing is
        known."""
        if self._is_one is not None:
            return False
        own: dict[str, float] | None = None  # None for a rank without targets
        is_sum = items is not None and not losses.has_term
        targets = _targets_of(losses.calls)
        if is_sum and targets.any():
            found = {name: _factor_of(value, targets) for name, value in gradients.items()}
            own = {name: c * float(items) for name, c in found.items() if c is not None}
            is_sum = len(own) == len(found)
        of_ranks = cpu_group.gather_values((is_sum, own))
        factors = [of_rank for _, of_rank in of_ranks if of_rank is not None]
        if not all(is_one for is_one, _ in of_ranks):
            self._is_one = False
        elif factors:
            self._factors = factors[0]
            self._dtype = gradients[MAIN].dtype
            self._is_one = all(_are_alike(one, factors[0], self._dtype) for one in factors)
        return bool(self._is_one)


def _factor_of(gradient: torch.Tensor, targets: torch.Tensor) -> float | None:
    """Return the gradient of a figure at every target, 0 elsewhere; None if it is not one number.
    gradient: [tokens, ...]. targets: [tokens], some of them True."""
    if gradient.shape != targets.shape:
        return None
    first = gradient[targets][0]
    is_one = torch.allclose(
        gradient, targets.to(gradient.dtype) * first, rtol=rounding_of(gradient.dtype), atol=0.0
    )
    return float(first) if is_one else None


def _are_alike(some: Mapping[str, float], others: Mapping[str, float], dtype: torch.dtype) -> bool:
    """Tell if factors of two ranks are the same but for rounding."""
    if some.keys() != others.keys():
        return False
    bound = rounding_of(dtype)
    return all(abs(some[name] - c) <= bound * abs(c) for name, c in others.items())


def _targets_of(calls: Sequence[ModelCall]) -> torch.Tensor:
    """Return which tokens of all calls in a row predict one, [tokens] on the CPU."""
    return torch.cat([call.in_row(call.targets) != IGNORE_INDEX for call in calls]).cpu()
