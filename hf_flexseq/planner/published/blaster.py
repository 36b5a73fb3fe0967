"""Cutting a step into micro-batches by tokens: FlexSP's sequence blaster (arXiv 2412.01523,
section 4.2, appendix A).

Sorted by falling length, the sequences are cut into contiguous pieces so that the largest piece
has as few tokens as possible. Similar lengths share a micro-batch, since memory is linear in
length and compute is quadratic.

    most[k][m] = min over j of max(most[j][m - 1], tokens of sequences j..k)

The first term rises with j and the second falls, so each minimum stands where they cross: O(M K
log K). What lies on either side of the largest piece is cut again on its own, since beside one
very long sequence any cut would do.
"""

from collections.abc import Sequence

import numpy as np

from hf_flexseq.cost import Int64Array


def falling(lengths: Sequence[int]) -> list[int]:
    """The ids of the sequences by falling length, equal ones by id."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def blast(lengths: Sequence[int], pieces: int) -> list[list[int]]:
    """The ids of each of at most `pieces` micro-batches; one for each sequence when that many are
    asked for."""
    order = falling(lengths)
    if pieces >= len(order):
        return [[i] for i in order]
    tokens = np.concatenate([[0], np.cumsum([lengths[i] for i in order])]).astype(np.int64)
    return [
        order[start:stop] for start, stop in _cut(tokens, 0, len(order), pieces) if stop > start
    ]


def _cut(tokens: Int64Array, start: int, stop: int, pieces: int) -> list[tuple[int, int]]:
    """(start, stop) of the pieces of the sequences start .. stop - 1; `tokens` counts those before
    each."""
    if pieces <= 1 or stop - start <= 1:
        return [(start, stop)] if pieces and stop > start else []
    spans = _least_largest(tokens[start : stop + 1] - tokens[start], pieces)
    sizes = [int(tokens[start + b] - tokens[start + a]) for a, b in spans]
    largest = sizes.index(max(sizes))
    a, b = start + spans[largest][0], start + spans[largest][1]
    left = pieces - 1 if b == stop else min(largest, a - start)
    return [*_cut(tokens, start, a, left), (a, b), *_cut(tokens, b, stop, pieces - 1 - left)]


def _least_largest(tokens: Int64Array, pieces: int) -> list[tuple[int, int]]:
    """(start, stop) of as many pieces, empty ones included, whose largest is as small as
    possible."""
    most, cuts = tokens, []
    for _ in range(1, pieces):
        most, cut = _one_more_piece(tokens, most)
        cuts.append(cut)
    stops = [len(tokens) - 1]
    for cut in reversed(cuts):
        stops.append(int(cut[stops[-1]]))
    stops = stops[::-1]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _one_more_piece(tokens: Int64Array, most: Int64Array) -> tuple[Int64Array, Int64Array]:
    """[K + 1] the largest piece of the first k sequences with one piece more, and where that piece
    starts."""
    ends = np.arange(len(tokens))
    # the first j where the head is the larger part
    after = np.minimum(np.searchsorted(most + tokens, tokens), ends)
    before = np.maximum(after - 1, 0)
    largest = [np.maximum(most[j], tokens - tokens[j]) for j in (before, after)]
    cut = np.where(largest[0] <= largest[1], before, after)
    return np.minimum(*largest), cut
