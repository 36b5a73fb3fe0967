"""Units while a planner is still at work: plain lists, since it may try many before one becomes
chunks.

row    slices (sequence, start, stop) of one chunk
unit   its rows, first to last
"""

from collections.abc import Sequence
from itertools import pairwise

from hf_flexseq.cost.stages import StageShape, causal_pairs
from hf_flexseq.plan.pipeline import Chunk
from hf_flexseq.plan.shard import Slice

Row = list[tuple[int, int, int]]
Unit = list[Row]


def unit_of(sequence: int, cuts: Sequence[int]) -> Unit:
    """One sequence, cut there."""
    return [[(sequence, start, stop)] for start, stop in pairwise(cuts)]


def row_tokens(row: Row) -> int:
    return sum(stop - start for _, start, stop in row)


def chunks_of(units: Sequence[Unit]) -> tuple[Chunk, ...]:
    """The units as a plan holds them."""
    return tuple(
        Chunk(
            unit=number,
            index=index,
            slices=tuple(Slice(sequence=q, start=a, stop=b) for q, a, b in row),
        )
        for number, unit in enumerate(units)
        for index, row in enumerate(unit)
    )


def shapes_of(units: Sequence[Unit], lengths: Sequence[int]) -> list[StageShape]:
    """Tokens and pairs of every row, unit by unit."""
    return [_shape(row, lengths) for unit in units for row in unit]


def _shape(row: Row, lengths: Sequence[int]) -> StageShape:
    sequence, start, stop = row[0]
    is_cut = stop - start < lengths[sequence]
    return StageShape(
        tokens=row_tokens(row),
        pairs=sum(causal_pairs(a, b) for _, a, b in row),
        cut=stop - start if is_cut else 0,
        length=lengths[sequence] if is_cut else 0,
    )
