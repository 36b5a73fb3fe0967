"""Tokens of sequences, with the pairs of those that are units.

A plain sequence of s tokens has s (s + 1) / 2 causal pairs of a query and a key. A unit of rows
with shared prefixes has fewer: its *share* of them. Where no share is known, all are 1.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, overload

import numpy as np

from hf_flexseq.cost.kinds import FloatArray
from hf_flexseq.plan import Plan
from hf_flexseq.plan.units import Unit


class Lengths(tuple[int, ...]):
    """Tokens of each sequence by id, some of which are units."""

    shares: tuple[float, ...]
    """Share of the causal pairs that each has."""

    def __new__(cls, tokens: Iterable[int], shares: Iterable[float]) -> "Lengths":
        """Return the tokens; as many shares, of more than 0 and at most 1."""
        made = super().__new__(cls, tokens)
        made.shares = tuple(shares)
        assert len(made.shares) == len(made), "every sequence has a share"
        return made

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "Lengths": ...

    def __getitem__(self, index: SupportsIndex | slice) -> "int | Lengths":
        """Return the tokens of one sequence, or those of some with their shares."""
        if isinstance(index, slice):
            return Lengths(super().__getitem__(index), self.shares[index])
        return super().__getitem__(index)


def lengths_of(plan: Plan) -> Sequence[int]:
    """Return the tokens of a plan's sequences, with the shares of its units."""
    return with_shares(plan.lengths, plan.units) if plan.units else plan.lengths


def with_shares(tokens: Sequence[int], units: Sequence[Unit]) -> Lengths:
    """Return the tokens of sequences by id, with the shares of those that are units."""
    shares = {unit.sequence: pair_share(unit) for unit in units}
    return Lengths(tokens, [shares.get(i, 1.0) for i in range(len(tokens))])


@functools.lru_cache(maxsize=1024)
def pair_share(unit: Unit) -> float:
    """Return the share of the causal pairs of as many plain tokens that a unit has."""
    return 2 * unit.layout.pairs() / (unit.tokens * (unit.tokens + 1))


def shares_of(lengths: Sequence[int], ids: Sequence[int]) -> FloatArray | None:
    """Return the shares of some sequences, [ids]; None where all are 1."""
    if not isinstance(lengths, Lengths):
        return None
    return np.array([lengths.shares[i] for i in ids], dtype=np.float64)
