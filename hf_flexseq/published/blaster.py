"""Cut a step into micro-batches by tokens: FlexSP's sequence blaster (arXiv 2412.01523, section
4.2, appendix A, equations 23 and 24).

1. Sort the sequences by falling length. Similar lengths then share a micro-batch: memory is linear
   in length and compute is quadratic, so equal lengths waste least.
2. Cut them into contiguous slices so that the largest slice has as few tokens as possible:

       most[k][m] = min over j of max(most[j][m - 1], tokens of sequences j .. k - 1)

is that number for the first k sequences in m slices. The first term rises with j and the second
falls, so each minimum is where they cross: O(M K log K) instead of the paper's O(M K^2).
3. Cut the sequences on either side of the largest slice again, each side separately. This step is
   ours: beside one very long sequence the program of step 2 is content with any cut.

Example: lengths 1000 and sixty of 10 in four micro-batches: 1, 20, 20 and 20 sequences.

tests/published/test_flexsp.py compares the largest slice with every possible cut's.
"""

from collections.abc import Sequence

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.task import longest_first


def blast(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the ids of each of at most `count` micro-batches.

    One for each sequence when at least as many micro-batches as sequences are asked for.
    """
    order = longest_first(lengths)
    if count >= len(order):
        return [[i] for i in order]
    ordered = [lengths[i] for i in order]
    tokens_before = np.concatenate([[0], np.cumsum(ordered)]).astype(np.int64)  # [sequences + 1]
    micro_batches = []
    for start, stop in _cut(tokens_before, 0, len(order), count):
        if stop > start:
            micro_batches.append(order[start:stop])
    return micro_batches


def _cut(tokens_before: Int64Array, start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Return (start, stop) of at most `count` slices of the sequences start .. stop - 1.

    tokens_before: [sequences + 1] tokens of all sequences before each one.
    """
    if count <= 1 or stop - start <= 1:
        return [(start, stop)] if count and stop > start else []
    # 1. The slices whose largest is as small as possible.
    slices = _least_largest(tokens_before[start : stop + 1] - tokens_before[start], count)
    tokens = [int(tokens_before[start + b] - tokens_before[start + a]) for a, b in slices]
    largest = tokens.index(max(tokens))
    first = start + slices[largest][0]
    last = start + slices[largest][1]
    # 2. Both sides of the largest again. Where nothing is after it, all other slices are before
    #    it.
    count_before = count - 1 if last == stop else min(largest, first - start)
    count_after = count - 1 - count_before
    before = _cut(tokens_before, start, first, count_before)
    after = _cut(tokens_before, last, stop, count_after)
    return [*before, (first, last), *after]


def _least_largest(tokens_before: Int64Array, count: int) -> list[tuple[int, int]]:
    """Return `count` slices (start, stop), possibly empty, whose largest has least tokens."""
    # Forward: `most` [sequences + 1] for one slice, two, ..., and where each one's last begins.
    most = tokens_before
    cuts = []
    for _ in range(1, count):
        most, cut = _one_more_slice(tokens_before, most)
        cuts.append(cut)
    # Backward: from the last slice's end to each slice's begin.
    ends = [len(tokens_before) - 1]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    ends = ends[::-1]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _one_more_slice(tokens_before: Int64Array, most: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the largest slice of the first k sequences with one slice more, and its last's begin.

    Both are [sequences + 1], as are `most` with one slice fewer, and `tokens_before`.
    """
    ends = np.arange(len(tokens_before))
    # 1. The first j where the slices before j are the larger part, and the one before it.
    crossing = np.searchsorted(most + tokens_before, tokens_before)
    after = np.minimum(crossing, ends)
    before = np.maximum(after - 1, 0)
    # 2. The better of the two.
    largest_before = np.maximum(most[before], tokens_before - tokens_before[before])
    largest_after = np.maximum(most[after], tokens_before - tokens_before[after])
    cut = np.where(largest_before <= largest_after, before, after)
    return np.minimum(largest_before, largest_after), cut
