"""The heads that each rank of an Ulysses group works on.

Rank i of d has query heads [i H/d, (i+1) H/d), none at all when d > H, and the KV heads that those
read. Where its query heads do not fall evenly on its KV heads, KV heads are repeated for the
kernel, one for each query head, and gradients of repeats are summed. For example, 6 query heads
over 3 KV heads on 2 ranks:

    rank 0    query heads 0 1 2    KV heads 0 1    repeated: 0 0 1
    rank 1    query heads 3 4 5    KV heads 1 2    repeated: 1 2 2
"""

import functools
from collections import Counter
from typing import NamedTuple

from hf_flexseq.plan.shard import contiguous_parts
from hf_flexseq.program.builder import Builder
from hf_flexseq.program.instructions import Value


class HeadShare(NamedTuple):
    """The heads that one rank works on."""

    queries: range
    """Query heads."""

    keys: range
    """The KV heads that they read."""

    query2kv: tuple[int, ...] | None
    """The KV head, counted from the first one read, that each query head reads; None where the
    query heads fall evenly on the KV heads, as the kernel expects."""


@functools.lru_cache(maxsize=64)
def head_shares(heads: int, kv_heads: int, degree: int) -> tuple[HeadShare, ...]:
    """Return the heads of every rank of a group; every rank computes the same.

    heads, kv_heads: of the layer. degree: ranks of the group.
    """
    queries_per_kv = heads // kv_heads
    return tuple(_share(queries, queries_per_kv) for queries in contiguous_parts(heads, degree))


def _share(queries: range, queries_per_kv: int) -> HeadShare:
    """Return the share of a rank with these query heads, of which each KV head has so many."""
    if not queries:
        return HeadShare(queries, range(0), None)
    keys = range(queries[0] // queries_per_kv, queries[-1] // queries_per_kv + 1)
    read = [query // queries_per_kv - keys.start for query in queries]
    readers = Counter(read)
    is_even = len(set(readers.values())) == 1
    return HeadShare(queries, keys, None if is_even else tuple(read))


def repeated(b: Builder, x: Value, share: HeadShare) -> Value:
    """Return keys or values as the kernel reads them: x [tokens, KV heads, head_dim] itself, or
    repeats of its heads, [tokens, query heads, head_dim]."""
    if share.query2kv is None:
        return x
    return b.repeat_heads(x, b.tables.constant(share.query2kv), len(share.queries))


def summed(b: Builder, dx: Value, share: HeadShare) -> Value:
    """Return the gradient of what `repeated` was given, [tokens, KV heads, head_dim].

    dx: the gradient of what it returned.
    """
    if share.query2kv is None:
        return dx
    return b.sum_heads(dx, b.tables.constant(share.query2kv), len(share.keys))
