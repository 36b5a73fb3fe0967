"""The heads of the ranks in an Ulysses group, and their pieces.

Rank i of d has query heads [i H/d, (i+1) H/d), none at all when d > H, and the KV heads that those
read. A rank's query heads are cut into *pieces*, which are computed one after the other, so that
one piece travels while another computes. For example, 8 query heads over 2 KV heads on 2 ranks,
in 2 pieces:

    rank 0    query heads 0 1 | 2 3    KV head 0 arrives with the first piece, and its gradient
                                       leaves with the second one
    rank 1    query heads 4 5 | 6 7    KV head 1 likewise

1. `head_pieces` cuts the heads; every rank computes the same pieces for all ranks.
2. `PieceReader` gives each piece the KV heads that it reads, whichever piece they came with.
3. `PieceSums` gives the gradients of the KV heads that no later piece reads.

Where a rank's query heads do not fall evenly on its KV heads, KV heads are repeated for the
kernel, one for each query head, and gradients of repeats are summed.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.cost import PIECE_ROWS
from hf_flexseq.plan.shard import contiguous_parts
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.instructions import Value


def pieces_per_head(lengths: Sequence[int], device: str) -> float:
    """Return in how many pieces the work of one query head could be done without loss.

    lengths: tokens of each sequence of the group. A kernel call is worth its overhead from
    `PIECE_ROWS` query rows on (heads x tokens). On the CPU each sequence is a call of its own, and
    the sequence counts in which most of the work lies; on CUDA all of them fill the device
    together. device: "cpu" or "cuda".
    """
    tokens = sum(lengths)
    if device == "cpu":
        pairs = sum(length * length for length in lengths)
        return pairs / tokens / PIECE_ROWS["cpu"]
    return tokens / PIECE_ROWS["cuda"]


class HeadShare(NamedTuple):
    """The heads that one rank works on in one piece."""

    q_start: int  # query heads [q_start, q_stop)
    q_stop: int
    kv_start: int  # the KV heads that they read, [kv_start, kv_stop)
    kv_stop: int

    # The KV head, counted from kv_start, that each query head reads; None where the query heads
    # fall evenly on the KV heads, as the kernel expects.
    query2kv: tuple[int, ...] | None

    kv_new: int  # the first KV head that no earlier piece has read
    kv_kept: int  # the first KV head that a later piece reads, too

    @property
    def q_heads(self) -> int:
        """The number of query heads."""
        return self.q_stop - self.q_start

    @property
    def kv_heads(self) -> int:
        """The number of KV heads that they read."""
        return self.kv_stop - self.kv_start

    @property
    def kv_read_before(self) -> int:
        """The number of KV heads, the first ones, that came with earlier pieces."""
        return self.kv_new - self.kv_start

    @property
    def kv_complete(self) -> int:
        """The number of KV heads, the first ones, that no later piece reads."""
        return self.kv_kept - self.kv_start


class HeadPiece(NamedTuple):
    """A piece of every rank's heads. All fields are by rank."""

    shares: tuple[HeadShare, ...]  # the heads that each rank works on
    queries: tuple[slice, ...]  # the same query heads as slices
    kv_arriving: tuple[slice, ...]  # the KV heads that each rank is sent with the piece
    kv_leaving: tuple[slice, ...]  # the KV heads whose gradients each rank sends with it


@functools.lru_cache(maxsize=64)
def head_pieces(heads: int, kv_heads: int, degree: int, most: int) -> tuple[HeadPiece, ...]:
    """Cut each rank's heads into `count` pieces; every rank computes the same pieces.

    count = min(most, the fewest query heads of a rank that has any), so that all ranks have a head
    in every piece but those that have none at all. heads, kv_heads: of the model. degree: ranks of
    the group.
    """
    # 1. the query heads of each rank
    heads_by_rank = contiguous_parts(heads, degree)
    count = min([most, *(len(rank_heads) for rank_heads in heads_by_rank if rank_heads)])

    # 2. cut the heads of each rank
    shares_by_rank = [
        _shares(rank_heads, heads // kv_heads, count) for rank_heads in heads_by_rank
    ]

    # 3. turn pieces by rank into ranks by piece
    pieces = []
    for shares in zip(*shares_by_rank, strict=True):
        piece = HeadPiece(
            shares=shares,
            queries=tuple(slice(share.q_start, share.q_stop) for share in shares),
            kv_arriving=tuple(slice(share.kv_new, share.kv_stop) for share in shares),
            kv_leaving=tuple(slice(share.kv_start, share.kv_kept) for share in shares),
        )
        pieces.append(piece)
    return tuple(pieces)


def _shares(heads: range, queries_per_kv: int, count: int) -> list[HeadShare]:
    """Cut one rank's query heads, `queries_per_kv` per KV head, into `count` pieces."""
    if not heads:
        return [HeadShare(heads.start, heads.stop, 0, 0, None, 0, 0)] * count

    # 1. the query heads of each piece
    pieces = [heads[part.start : part.stop] for part in contiguous_parts(len(heads), count)]

    # 2. the KV heads that they read; two pieces may have one in common
    kv_starts = [piece[0] // queries_per_kv for piece in pieces]
    kv_stops = [piece[-1] // queries_per_kv + 1 for piece in pieces]

    # 3. a KV head is new in the first piece that reads it, and complete in the last one
    shares = []
    for number, piece in enumerate(pieces):
        share = HeadShare(
            q_start=piece.start,
            q_stop=piece.stop,
            kv_start=kv_starts[number],
            kv_stop=kv_stops[number],
            query2kv=_query2kv(piece, queries_per_kv),
            kv_new=kv_stops[number - 1] if number else kv_starts[0],
            kv_kept=kv_starts[number + 1] if number + 1 < count else kv_stops[-1],
        )
        shares.append(share)
    return shares


def _query2kv(heads: range, queries_per_kv: int) -> tuple[int, ...] | None:
    """Return each query head's KV head, from the first one read; None if readers are even."""
    first = heads[0] // queries_per_kv
    reads = [q // queries_per_kv - first for q in heads]
    readers = Counter(reads)
    if len(set(readers.values())) == 1:
        return None
    return tuple(reads)


def overlapping(head_ranges: Sequence[Sequence[slice]]) -> bool:
    """Return True where several ranks have some head.

    head_ranges: for every piece the heads of every rank; together they are all heads of the model.
    """
    total = 0
    heads = 0
    for by_rank in head_ranges:
        for head_range in by_rank:
            total += head_range.stop - head_range.start
            heads = max(heads, head_range.stop)
    return total > heads


def _repeated(b: Builder, x: Value, share: HeadShare) -> Value:
    """Return x [tokens, kv_heads, head_dim], or repeats [tokens, q_heads, head_dim] if needed."""
    if share.query2kv is None:
        return x
    return b.repeat_heads(x, b.tables.constant(share.query2kv), share.q_heads)


def _summed(b: Builder, dx: Value, share: HeadShare) -> Value:
    """Return sums over repeats, the transpose of `_repeated`: q_heads -> kv_heads of dx."""
    if share.query2kv is None:
        return dx
    return b.sum_heads(dx, b.tables.constant(share.query2kv), share.kv_heads)


class PieceReader:
    """Keys and values of the KV heads that each piece reads, one piece after the other."""

    __slots__ = ("_builder", "_kv")

    def __init__(self, b: Builder) -> None:
        self._builder = b
        self._kv: Values = ()  # k and v of the piece before

    def next(self, share: HeadShare, new: Sequence[Value]) -> Values:
        """Return k and v as the kernel reads them: [tokens, kv_heads, head_dim], or one KV head
        for each query head.

        share: this rank's share of the next piece. new: k and v that have arrived with the piece,
        each [tokens, new KV heads, head_dim].
        """
        b = self._builder
        kv = tuple(new)
        again = share.kv_read_before
        if again:
            # The piece begins with the last KV heads of the previous one.
            joined = []
            for before, x in zip(self._kv, new, strict=True):
                last = b.heads(before, before.shape[1] - again, before.shape[1])
                # [tokens, read before, head_dim] + [tokens, new, head_dim]
                joined.append(b.join((last, x), dim=1) if x.shape[1] else last)
            kv = tuple(joined)
        self._kv = kv
        return tuple(_repeated(b, x, share) for x in kv)


class PieceSums:
    """Gradients of KV heads, summed over the pieces that read them, one piece after the other."""

    __slots__ = ("_builder", "_incomplete")

    def __init__(self, b: Builder) -> None:
        self._builder = b
        # dk and dv of the KV heads that later pieces add to, [tokens, KV heads, head_dim]
        self._incomplete: Values = ()

    def next(self, share: HeadShare, grads: Sequence[Value]) -> Values:
        """Return dk and dv of the KV heads that are complete, each [tokens, complete, head_dim].

        share: this rank's share of the next piece. grads: dk and dv of the keys and values that
        `PieceReader` gave for it.
        """
        b = self._builder
        complete = []
        incomplete = []
        for number, grad in enumerate(grads):
            total = _summed(b, grad, share)  # [tokens, kv_heads, head_dim]
            heads = total.shape[1]
            again = share.kv_read_before
            if again:
                summed = b.plus(b.heads(total, 0, again), self._incomplete[number])
                rest = b.heads(total, again, heads)
                total = b.join((summed, rest), dim=1) if again < heads else summed
            complete.append(b.heads(total, 0, share.kv_complete))
            if share.kv_complete < heads:
                incomplete.append(b.heads(total, share.kv_complete, heads))
        self._incomplete = tuple(incomplete)
        return tuple(complete)
