"""Tokens of sequences, with the pairs of those that are units or see both ways.

A plain sequence of s tokens has s (s + 1) / 2 causal pairs of a query and a key. A unit of rows
with shared prefixes has fewer, and a sequence with blocks (`plan/blocks.py`) has more: its *share*
of them. The share is 1 for plain sequences, for unknown shares, and for units that attention
computes as one sequence.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsIndex, overload

import numpy as np

from hf_flexseq.cost.kernels import FloatArray
from hf_flexseq.plan import Plan
from hf_flexseq.plan.blocks import NO_PAIRS
from hf_flexseq.plan.units import Unit


class Lengths(tuple[int, ...]):
    """Tokens per sequence, by id; some sequences are units or see both ways."""

    shares: tuple[float, ...]
    """Share of the causal pairs that each has."""

    def __new__(cls, tokens: Iterable[int], shares: Iterable[float]) -> "Lengths":
        """Return the tokens; as many shares, of more than 0 and at most 2."""
        made = super().__new__(cls, tokens)
        made.shares = tuple(shares)
        assert len(made.shares) == len(made), "every sequence has a share"
        return made

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "Lengths": ...

    def __getitem__(self, index: SupportsIndex | slice) -> "int | Lengths":
        """Return the tokens of one sequence, or of several with their shares."""
        if isinstance(index, slice):
            return Lengths(super().__getitem__(index), self.shares[index])
        return super().__getitem__(index)


def lengths_of(plan: Plan) -> Sequence[int]:
    """Return the tokens of a plan's sequences, with the shares of its units."""
    return with_shares(plan.lengths, plan.units) if plan.units else plan.lengths


def with_shares(
    tokens: Sequence[int],
    units: Sequence[Unit],
    later: Mapping[int, int] = NO_PAIRS,
) -> Lengths:
    """Return the tokens of sequences by id, with the shares of those that are no plain ones.

    later: by row that has blocks, the pairs of a query and a later key; of the rows of a unit,
    which may share them, the most count.
    """
    shares = [1.0] * len(tokens)
    sequences: dict[int, int] = {}  # by row
    for unit in units:
        shares[unit.sequence] = pair_share(unit)
        sequences.update((row, unit.sequence) for row, _ in unit.rows)
    most: dict[int, int] = defaultdict(int)
    for row, pairs in later.items():
        sequence = sequences.get(row, row)
        most[sequence] = max(most[sequence], pairs)
    for sequence, pairs in most.items():
        share = shares[sequence] + pairs / _causal_pairs(tokens[sequence])
        shares[sequence] = share if share != 1 else math.nextafter(1.0, 2.0)
    return Lengths(tokens, shares)


@functools.lru_cache(maxsize=1024)
def pair_share(unit: Unit) -> float:
    """Return the share of the causal pairs of as many plain tokens that a unit has."""
    return unit.layout.pairs() / _causal_pairs(unit.tokens)


def _causal_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def shares_of(lengths: Sequence[int], ids: Sequence[int]) -> FloatArray | None:
    """Return the shares of some sequences, [ids]; None where all are 1."""
    if not isinstance(lengths, Lengths):
        return None
    return np.array([lengths.shares[i] for i in ids], dtype=np.float64)
