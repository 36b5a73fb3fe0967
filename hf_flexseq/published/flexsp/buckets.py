"""FlexSP's bucketing (arXiv 2412.01523, section 4.1.3, equations 15 and 16): few lengths stand for
many.

1. Sort the sequences by ascending length and cut them into contiguous buckets. Each sequence is
   counted as long as the longest of its bucket.
2. Find the cut with the least tokens added, by dynamic programming over the distinct lengths:

       added[k][q] = min over j of added[j][q - 1] + sum of (s_k - s_i) for i in j + 1 .. k

are the tokens added to the k shortest in q buckets, the last of them from j + 1 to k.
3. Take 16 buckets, or more until the tokens added leave half of the spare memory free, as in the
   released solver.

The paper's program runs over all sequences; equal lengths share a bucket, so this one runs over
the distinct ones. tests/published/test_flexsp.py compares the tokens added with every possible
cut's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_flexseq.cost import Int64Array

BUCKETS = 16  # the paper's number
IMPOSSIBLE = np.iinfo(np.int64).max // 4  # tokens added by an impossible bucket


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Buckets:
    """The sequences of a micro-batch in buckets of similar length."""

    longest: Int64Array
    """[buckets] tokens of the longest sequence, ascending."""
    members: tuple[tuple[int, ...], ...]
    """[buckets] the ids of each bucket's sequences, longest first."""

    @property
    def counts(self) -> Int64Array:
        """Return [buckets] how many sequences each has."""
        return np.array([len(ids) for ids in self.members], dtype=np.int64)


def bucketed(ids: Sequence[int], lengths: Sequence[int], room: int) -> Buckets:
    """Return at least `BUCKETS` buckets of the sequences `ids`, fewer if there are fewer lengths.

    room: tokens that all ranks hold; the tokens added take at most half of the spare room.
    """
    values, repeats = np.unique([lengths[i] for i in ids], return_counts=True)
    distinct = values.astype(np.int64)
    stops = _stops(distinct, repeats.astype(np.int64), room)
    longest = distinct[np.array(stops) - 1]  # [buckets]
    members: list[list[int]] = [[] for _ in stops]
    for i in sorted(ids, key=lambda i: (-lengths[i], i)):
        bucket = int(np.searchsorted(longest, lengths[i]))
        members[bucket].append(i)
    return Buckets(longest=longest, members=tuple(tuple(bucket) for bucket in members))


def _stops(distinct: Int64Array, repeats: Int64Array, room: int) -> list[int]:
    """Return the end of each bucket in `distinct` lengths, each of which comes `repeats` times."""
    tokens = repeats * distinct  # [distinct]
    count_before = np.concatenate([[0], np.cumsum(repeats)])  # [distinct + 1]
    tokens_before = np.concatenate([[0], np.cumsum(tokens)])  # [distinct + 1]
    # 1. added[j, k - 1]: tokens added when lengths j .. k - 1 make one bucket.
    counts = count_before[None, 1:] - count_before[:, None]  # [distinct + 1, distinct]
    added = counts * distinct - (tokens_before[None, 1:] - tokens_before[:, None])
    is_empty = np.tri(len(distinct) + 1, len(distinct), -1, dtype=bool)  # k - 1 < j
    added[is_empty] = IMPOSSIBLE
    # 2. One bucket, two, ...: the least tokens added to the first k lengths, and the last's begin.
    least = added[0]  # [distinct]
    starts = [np.zeros(len(distinct), dtype=np.int64)]
    allowed = max(0, (room - int(tokens_before[-1])) // 2)
    while len(starts) < len(distinct) and (len(starts) < BUCKETS or least[-1] > allowed):
        before = np.concatenate([[IMPOSSIBLE], least])  # [distinct + 1], index j
        options = before[:, None] + added  # [distinct + 1, distinct]
        starts.append(options.argmin(axis=0))
        least = options.min(axis=0)
    # 3. Backward, from the last bucket's end to each bucket's begin.
    stops = [len(distinct)]
    for start in reversed(starts[1:]):
        stops.append(int(start[stops[-1] - 1]))
    return stops[::-1]
