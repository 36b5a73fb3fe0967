"""Sequences into units: how long ones are cut and short ones packed.

    whole_units     1F1B: whole sequences, packed up to the step's longest, first fit by falling
                    length
    chunked_units   Seq1F1B on any lengths: the longest sequence in k chunks, the others in as many
                    as their work asks
                    for, short ones packed up to the longest's largest chunk
    level_units     auto: every sequence in equal parts of nearly `target` work, short ones spread
                    over the fewest
                    bins so that all are equally full

InfiniPipe's own packing is in `infinipipe.py`. It cuts all sequences at the longest one's places,
so every one has a tail of arbitrary size, to be filled up; equal parts of each sequence's own
leave no tails.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

from hf_flexseq.planner.pipeline.cuts import CutWork, cut
from hf_flexseq.planner.pipeline.units import Row, Unit, unit_of

SLACK = 0.15  # a part may exceed its target by this share before there is one more part


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Sequence ids by falling length, equal ones as given."""
    return sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])


def whole_units(lengths: Sequence[int]) -> list[Unit]:
    """Packs of whole sequences."""
    rows = first_fit(longest_first(lengths), lengths, most_tokens=max(lengths, default=0))
    return [[row] for row in rows]


def chunked_units(
    lengths: Sequence[int], k: int, work: CutWork, most_tokens: int | None = None
) -> list[Unit]:
    """Cut sequences, longest first, and packs of the short ones."""
    order = longest_first(lengths)
    if not order:
        return []
    cuts = cut(lengths[order[0]], k, work, most_tokens)
    largest = max(b - a for a, b in pairwise(cuts))
    target = work.between(0, lengths[order[0]]) / (len(cuts) - 1)
    long = [
        q
        for q in order
        if work.between(0, lengths[q]) > target * (1 + 1e-9) or lengths[q] > largest
    ]
    units = [
        unit_of(q, cut(lengths[q], _parts(work.between(0, lengths[q]), target), work, largest))
        for q in long
    ]
    return units + [[row] for row in first_fit(order[len(long) :], lengths, most_tokens=largest)]


def level_units(
    lengths: Sequence[int], target: float, work: CutWork, most_tokens: int | None = None
) -> list[Unit]:
    """Units whose rows all hold nearly `target` work: cut sequences, longest first, and packs,
    fullest first."""
    units, short = [], []
    for sequence in longest_first(lengths):
        length = lengths[sequence]
        parts = _parts(work.between(0, length), target)
        if parts > 1 or (most_tokens and length > most_tokens):
            units.append(unit_of(sequence, cut(length, parts, work, most_tokens)))
        else:
            short.append(sequence)
    return units + [[row] for row in _level_rows(short, lengths, target, work, most_tokens)]


def first_fit(order: Sequence[int], lengths: Sequence[int], *, most_tokens: int) -> list[Row]:
    """Whole sequences into rows of at most `most_tokens`, each into the first that has room."""
    rows: list[Row] = []
    rooms: list[int] = []
    for sequence in order:
        length = lengths[sequence]
        place = next((place for place, room in enumerate(rooms) if room >= length), len(rows))
        if place == len(rows):
            rows.append([])
            rooms.append(most_tokens)
        rows[place].append((sequence, 0, length))
        rooms[place] -= length
    return rows


def _level_rows(
    order: Sequence[int],
    lengths: Sequence[int],
    target: float,
    work: CutWork,
    most_tokens: int | None,
) -> list[Row]:
    """Longest first, each to the bin with the least work; one more bin where that one's tokens are
    used up."""
    total = sum(work.between(0, lengths[sequence]) for sequence in order)
    bins: list[tuple[float, int, int]] = [
        (0.0, number, 0) for number in range(math.ceil(total / target))
    ]
    rows: list[Row] = [[] for _ in bins]
    for sequence in order:
        length = lengths[sequence]
        load, number, tokens = bins[0]
        if most_tokens and tokens + length > most_tokens:
            load, number, tokens = 0.0, len(rows), 0
            rows.append([])
            heapq.heappush(bins, (work.between(0, length), number, length))
        else:
            heapq.heapreplace(bins, (load + work.between(0, length), number, tokens + length))
        rows[number].append((sequence, 0, length))
    filled = sorted((-load, number) for load, number, _ in bins if rows[number])
    return [rows[number] for _, number in filled]


def _parts(work: float, target: float) -> int:
    return max(1, math.ceil(work / target - SLACK))
