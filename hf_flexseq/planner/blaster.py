"""Cutting a step into micro-batches by tokens: FlexSP's sequence blaster (arXiv 2412.01523, section 4.2, appendix A).

Sorted by falling length, the sequences are cut into contiguous pieces so that the largest piece has as few tokens as
possible. Similar lengths share a micro-batch, since memory is linear in length and compute is quadratic.

    most[k][m] = min over j of max(most[j][m - 1], tokens of sequences j..k)

The first term rises with j and the second falls, so each minimum stands where they cross: O(M K log K).
"""

from collections.abc import Sequence

import numpy as np

from hf_flexseq.cost import Int64Array


def falling(lengths: Sequence[int]) -> list[int]:
    """The ids of the sequences by falling length, equal ones by id."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def blast(lengths: Sequence[int], pieces: int) -> list[list[int]]:
    """The ids of each of at most `pieces` micro-batches; one for each sequence when that many are asked for."""
    order = falling(lengths)
    if pieces >= len(order):
        return [[i] for i in order]
    tokens = np.concatenate([[0], np.cumsum([lengths[i] for i in order])]).astype(np.int64)
    most, cuts = tokens, []
    for _ in range(1, pieces):
        most, cut = _one_more_piece(tokens, most)
        cuts.append(cut)
    stop, ids = len(order), []
    for cut in reversed(cuts):
        start = int(cut[stop])
        ids.append(order[start:stop])
        stop = start
    ids.append(order[:stop])
    return [piece for piece in reversed(ids) if piece]


def _one_more_piece(tokens: Int64Array, most: Int64Array) -> tuple[Int64Array, Int64Array]:
    """[K + 1] the largest piece of the first k sequences with one piece more, and where that piece starts."""
    ends = np.arange(len(tokens))
    after = np.minimum(np.searchsorted(most + tokens, tokens), ends)  # the first j where the head is the larger part
    before = np.maximum(after - 1, 0)
    largest = [np.maximum(most[j], tokens - tokens[j]) for j in (before, after)]
    cut = np.where(largest[0] <= largest[1], before, after)
    return np.minimum(*largest), cut
