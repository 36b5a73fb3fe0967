"""FlexSP's bucketing (arXiv 2412.01523, section 4.1.3, equations 15 and 16): few lengths stand for
many.

Sequences in ascending order are cut into contiguous buckets, and each is counted as long as its
bucket's longest. The cut with the least tokens added is found by dynamic programming over the
distinct lengths:

    added[k][q] = min over j of added[j][q - 1] + sum of (s_k - s_i) for i in j + 1 .. k

Buckets grow in number until the tokens added leave half of the spare memory free, as in the
released solver.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_flexseq.cost import Int64Array

BUCKETS = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Buckets:
    """longest: [Q] tokens, ascending. members: per bucket the ids of its sequences, longest
    first."""

    longest: Int64Array
    members: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> Int64Array:
        return np.array([len(ids) for ids in self.members], dtype=np.int64)


def bucketed(
    ids: Sequence[int], lengths: Sequence[int], room: int, count: int = BUCKETS
) -> Buckets:
    """At least `count` buckets of the sequences `ids`, whose tokens may rise halfway to `room`."""
    distinct, repeats = np.unique([lengths[i] for i in ids], return_counts=True)
    stops = _stops(distinct.astype(np.int64), repeats.astype(np.int64), room, count)
    longest = distinct[np.array(stops) - 1]
    members: list[list[int]] = [[] for _ in stops]
    for i in sorted(ids, key=lambda i: (-lengths[i], i)):
        members[int(np.searchsorted(longest, lengths[i]))].append(i)
    return Buckets(longest=longest, members=tuple(tuple(m) for m in members))


def _stops(distinct: Int64Array, repeats: Int64Array, room: int, count: int) -> list[int]:
    """Where each bucket of `distinct` lengths ends."""
    number = np.concatenate([[0], np.cumsum(repeats)])
    tokens = np.concatenate([[0], np.cumsum(repeats * distinct)])
    # added[j, k - 1]: tokens added when lengths j .. k - 1 make one bucket
    added = (number[None, 1:] - number[:, None]) * distinct - (tokens[None, 1:] - tokens[:, None])
    added[np.tri(len(distinct) + 1, len(distinct), -1, dtype=bool)] = np.iinfo(np.int64).max // 4
    least, starts = added[0], [np.zeros(len(distinct), dtype=np.int64)]
    allowed = max(0, (room - int(tokens[-1])) // 2)
    while len(starts) < len(distinct) and (len(starts) < count or least[-1] > allowed):
        options = np.concatenate([[np.iinfo(np.int64).max // 4], least])[:, None] + added
        starts.append(options.argmin(axis=0))
        least = options.min(axis=0)
    stops = [len(distinct)]
    for start in reversed(starts[1:]):
        stops.append(int(start[stops[-1] - 1]))
    return stops[::-1]
