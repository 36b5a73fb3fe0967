"""Sequences into units: where long sequences are cut, and how short ones are packed.

    whole_units      1F1B: whole sequences, packed up to the step's longest by best fit
    chunked_units    Seq1F1B on any lengths: the longest sequence in k chunks, the others in as
                     many as their work asks for, cut on tiles; short ones packed up to the
                     longest's largest chunk
    level_units      auto: every sequence in equal parts of nearly `target` work, short ones spread
                     over the fewest bins so that all are equally full

Rejected: InfiniPipe's packing, which cuts all sequences where the longest is cut. Every sequence
then has a tail of arbitrary size, to be filled up; equal parts of each sequence leave no tails.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

from hf_flexseq.pipeline.planning.cuts import CutWork, cut, on_tiles
from hf_flexseq.pipeline.planning.units import Row, Unit, unit_of
from hf_flexseq.plan.shard import Slice
from hf_flexseq.planner.static import best_fit
from hf_flexseq.planner.task import longest_first

SLACK = 0.15  # share of its target that a part may exceed it by, before there is one more part
ROUNDING = 1e-9  # relative: a part of exactly the target's work must not become two


def whole_units(lengths: Sequence[int]) -> list[Unit]:
    """Return packs of whole sequences, none longer than the longest sequence."""
    longest = max(lengths, default=0)
    rows = _filled_rows(longest_first(lengths), lengths, most_tokens=longest)
    return [[row] for row in rows]


def chunked_units(
    lengths: Sequence[int], k: int, work: CutWork, most_tokens: int | None = None
) -> list[Unit]:
    """Return cut sequences, longest first, then packs. k: chunks of the longest at least."""
    order = longest_first(lengths)
    if not order:
        return []
    # 1. the longest sequence sets a chunk's work and tokens
    longest = lengths[order[0]]
    cuts = cut(longest, k, work, most_tokens)
    chunk_tokens = max(stop - start for start, stop in pairwise(cuts))
    target = work.between(0, longest) / (len(cuts) - 1)

    # 2. sequences that exceed a chunk are cut
    units: list[Unit] = []
    short: list[int] = []
    for sequence in order:
        length = lengths[sequence]
        its_work = work.between(0, length)
        if its_work > target * (1 + ROUNDING) or length > chunk_tokens:
            parts = _parts(its_work, target)
            equal_cuts = cut(length, parts, work, chunk_tokens)
            units.append(unit_of(sequence, on_tiles(equal_cuts, work, most_tokens)))
        else:
            short.append(sequence)

    # 3. the others are packed
    for row in _filled_rows(short, lengths, most_tokens=chunk_tokens):
        units.append([row])
    return units


def level_units(
    lengths: Sequence[int], target: float, work: CutWork, most_tokens: int | None = None
) -> list[Unit]:
    """Return units of rows with nearly `target` work: cut sequences, then packs, fullest first."""
    units: list[Unit] = []
    short: list[int] = []
    for sequence in longest_first(lengths):
        length = lengths[sequence]
        parts = _parts(work.between(0, length), target)
        if parts > 1 or (most_tokens and length > most_tokens):
            units.append(unit_of(sequence, cut(length, parts, work, most_tokens)))
        else:
            short.append(sequence)
    for row in _level_rows(short, lengths, target, work, most_tokens):
        units.append([row])
    return units


def _filled_rows(order: Sequence[int], lengths: Sequence[int], *, most_tokens: int) -> list[Row]:
    """Return rows of whole sequences by best fit. order: sequence ids, longest first."""
    rows = []
    for places in best_fit([lengths[sequence] for sequence in order], most_tokens):
        sequences = [order[place] for place in places]
        rows.append([Slice(sequence, 0, lengths[sequence]) for sequence in sequences])
    return rows


def _level_rows(
    order: Sequence[int],
    lengths: Sequence[int],
    target: float,
    work: CutWork,
    most_tokens: int | None,
) -> list[Row]:
    """Return rows of whole sequences, each in the first row with room for it."""
    total = sum(work.between(0, lengths[sequence]) for sequence in order)
    count = math.ceil(total / target)
    rows: list[Row] = [[] for _ in range(count)]
    heap = [(0.0, index, 0) for index in range(count)]  # (work, index in rows, tokens)
    for sequence in order:
        length = lengths[sequence]
        its_work = work.between(0, length)
        row_work, index, tokens = heap[0]
        if most_tokens and tokens + length > most_tokens:
            index = len(rows)
            rows.append([])
            heapq.heappush(heap, (its_work, index, length))
        else:
            heapq.heapreplace(heap, (row_work + its_work, index, tokens + length))
        rows[index].append(Slice(sequence, 0, length))
    fullest_first = sorted((-row_work, index) for row_work, index, _ in heap if rows[index])
    return [rows[index] for _, index in fullest_first]


def _parts(work: float, target: float) -> int:
    """Return into how many parts of nearly `target` a sequence of this work is cut."""
    return max(1, math.ceil(work / target - SLACK))
