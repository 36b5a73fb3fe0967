"""The heads that each rank of an Ulysses group works on, and their pieces.

Rank i of d has query heads [i H/d, (i+1) H/d), none at all when d > H, and the KV heads that those
read. Where query heads do not fall evenly on KV heads, KV heads are repeated for the kernel, one
for each query head, and gradients of repeats are summed. For example, 6 query heads over 3 KV
heads on 2 ranks:

    rank 0    query heads 0 1 2    KV heads 0 1    repeated: 0 0 1
    rank 1    query heads 3 4 5    KV heads 1 2    repeated: 1 2 2

Across nodes a rank's query heads are cut into a few *pieces*, so that one travels while another
computes. All KV heads arrive with the first piece, and their gradients leave with the last one.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.plan.shard import contiguous_parts
from hf_flexseq.program.builder import Builder
from hf_flexseq.program.instructions import Value

# Query heads x tokens that a piece must have to be worth a kernel call of its own.
PIECE_ROWS = {"cpu": 1 << 9, "cuda": 1 << 15}


class HeadShare(NamedTuple):
    """The heads that one rank works on in one piece."""

    queries: range
    """Query heads."""
    keys: range
    """The KV heads that they read."""
    query2kv: tuple[int, ...] | None
    """The KV head, counted from the first one read, that each query head reads; None where the
    query heads fall evenly on the KV heads, as the kernel expects."""


class HeadPiece(NamedTuple):
    """A piece of every rank's heads. All fields are by rank."""

    shares: tuple[HeadShare, ...]
    """The heads that each rank works on."""
    queries: tuple[range, ...]
    """Their query heads."""
    arriving: tuple[range, ...]
    """The KV heads that each rank is sent with the piece: all of them with the first one."""
    leaving: tuple[range, ...]
    """The KV heads whose gradients each rank sends: all of them with the last piece."""


@functools.lru_cache(maxsize=64)
def head_pieces(heads: int, kv_heads: int, degree: int, most: int) -> tuple[HeadPiece, ...]:
    """Cut each rank's heads into `count` pieces; every rank computes the same pieces.

    count = min(most, the fewest query heads of a rank that has any). heads, kv_heads: of the
    layer. degree: ranks of the group.
    """
    queries_per_kv = heads // kv_heads
    by_rank = contiguous_parts(heads, degree)
    count = min([most, *(len(queries) for queries in by_rank if queries)])
    keys = tuple(_share(queries, queries_per_kv).keys for queries in by_rank)
    none = (range(0),) * degree
    pieces = []
    for number in range(count):
        shares = []
        for queries in by_rank:
            part = contiguous_parts(len(queries), count)[number]
            shares.append(_share(queries[part.start : part.stop], queries_per_kv))
        piece = HeadPiece(
            shares=tuple(shares),
            queries=tuple(share.queries for share in shares),
            arriving=none if number else keys,
            leaving=keys if number == count - 1 else none,
        )
        pieces.append(piece)
    return tuple(pieces)


def _share(queries: range, queries_per_kv: int) -> HeadShare:
    """Return the share of these query heads, of which each KV head has so many."""
    if not queries:
        return HeadShare(queries, range(0), None)
    keys = range(queries[0] // queries_per_kv, queries[-1] // queries_per_kv + 1)
    read = [query // queries_per_kv - keys.start for query in queries]
    readers = Counter(read)
    is_even = len(set(readers.values())) == 1
    return HeadShare(queries, keys, None if is_even else tuple(read))


def call_heads(heads: int, kv_heads: int, degree: int, most: int) -> set[tuple[int, int]]:
    """Return the (query heads, KV heads) of the kernel calls of a group's ranks, whose heads come
    in at most `most` pieces."""
    found = set()
    for count in range(1, most + 1):
        for piece in head_pieces(heads, kv_heads, degree, count):
            for share in piece.shares:
                read = share.keys if share.query2kv is None else share.query2kv
                if share.queries:
                    found.add((len(share.queries), len(read)))
    return found


def read_by(b: Builder, x: Value, keys: range, share: HeadShare) -> Value:
    """Return keys or values as the kernel reads them: [tokens, KV heads of the share, head_dim],
    or one KV head for each query head.

    x: [tokens, heads `keys`, head_dim].
    """
    of_share = b.heads(x, share.keys.start - keys.start, share.keys.stop - keys.start)
    if share.query2kv is None:
        return of_share
    return b.repeat_heads(of_share, b.tables.constant(share.query2kv), len(share.queries))


def sum_of(b: Builder, grads: Sequence[Value], keys: range, shares: Sequence[HeadShare]) -> Value:
    """Return the gradient of the input of `read_by`, [tokens, heads `keys`, head_dim].

    grads: by share, the gradients of its result.
    """
    read: list[int] = []  # by head of all gradients, its number in `keys`
    for share in shares:
        of_share = range(len(share.keys)) if share.query2kv is None else share.query2kv
        read += [share.keys.start - keys.start + number for number in of_share]
    joined = b.join(grads, dim=1)
    if read == list(range(len(keys))):
        return joined
    return b.sum_heads(joined, b.tables.constant(tuple(read)), len(keys))
