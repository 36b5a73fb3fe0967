"""Which heads the ranks of an Ulysses group work on, and in which pieces; what several of them
read of one KV head.

Rank i of d has query heads [i H/d, (i+1) H/d), none at all when d > H, and the KV heads that those
read. Where its query heads do not fall evenly on its KV heads, they are repeated for the kernel,
and gradients of repeats are summed.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.local import Tensors
from hf_flexseq.cost import PIECE_ROWS
from hf_flexseq.plan.shard import contiguous_part


def pieces_of_head(lengths: Sequence[int], device: torch.device) -> float:
    """How many pieces one head would be worth."""
    squares = sum(n * n for n in lengths)
    cpu = device.type == "cpu"
    rows = squares / sum(lengths) if cpu else sum(lengths)  # of the sequence where most work is
    return rows / PIECE_ROWS["cpu" if cpu else "cuda"]


class HeadShare(NamedTuple):
    """The heads one rank works on in one piece: query heads [q_start, q_stop), KV heads [kv_start,
    kv_stop), and, where query heads do not fall evenly on KV heads, which of the latter each query
    head reads (else None).

    kv_new: the first KV head that no earlier piece has read. kv_kept: the first one that a later
    piece reads too.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    repeats: tuple[int, ...] | None
    kv_new: int
    kv_kept: int

    @property
    def q_heads(self) -> int:
        return self.q_stop - self.q_start


class HeadPiece(NamedTuple):
    """A piece of the heads of all ranks. shares: by rank; the rest are the slices that they mean.

    arriving: KV heads that are sent with it. leaving: those whose gradients are.
    """

    shares: tuple[HeadShare, ...]
    queries: tuple[slice, ...]
    arriving: tuple[slice, ...]
    leaving: tuple[slice, ...]


@functools.lru_cache(maxsize=64)
def head_pieces(heads: int, kv_heads: int, degree: int, most: int) -> tuple[HeadPiece, ...]:
    """At most `most`, and no more than any rank that works has query heads; the same on all
    ranks."""
    parts = [contiguous_part(heads, i, degree) for i in range(degree)]
    count = min(most, *(stop - start for start, stop in parts if stop > start))
    by_rank = [_shares(range(*part), heads // kv_heads, count) for part in parts]
    return tuple(
        HeadPiece(
            shares,
            tuple(slice(s.q_start, s.q_stop) for s in shares),
            tuple(slice(s.kv_new, s.kv_stop) for s in shares),
            tuple(slice(s.kv_start, s.kv_kept) for s in shares),
        )
        for shares in zip(*by_rank, strict=True)
    )


def _shares(heads: range, queries_per_kv: int, count: int) -> list[HeadShare]:
    """One rank's query heads in `count` pieces."""
    if not heads:
        return [HeadShare(heads.start, heads.stop, 0, 0, None, 0, 0)] * count
    pieces = [heads[slice(*contiguous_part(len(heads), place, count))] for place in range(count)]
    spans = [(piece[0] // queries_per_kv, piece[-1] // queries_per_kv + 1) for piece in pieces]
    new = [spans[0][0], *(stop for _, stop in spans[:-1])]
    kept = [*(start for start, _ in spans[1:]), spans[-1][1]]
    return [
        HeadShare(
            piece.start, piece.stop, *span, _repeats(piece, queries_per_kv), first_new, first_kept
        )
        for piece, span, first_new, first_kept in zip(pieces, spans, new, kept, strict=True)
    ]


def _repeats(heads: range, queries_per_kv: int) -> tuple[int, ...] | None:
    """Which of its KV heads each query head reads; None where all are read by equally many."""
    reads = [q // queries_per_kv - heads[0] // queries_per_kv for q in heads]
    return None if len(set(Counter(reads).values())) == 1 else tuple(reads)


def overlapping(spans: Sequence[Sequence[slice]]) -> bool:
    """Whether several ranks have a head. spans: of every piece the heads of every rank, all of
    them together."""
    every = [span for of_piece in spans for span in of_piece]
    return sum(span.stop - span.start for span in every) > max(span.stop for span in every)


def repeated(x: torch.Tensor, share: HeadShare) -> torch.Tensor:
    """[T, KV heads, D] -> one KV head per query head, where the kernel could not group them
    itself."""
    return x if share.repeats is None else x[:, list(share.repeats)]


def read_again(
    share: HeadShare, before: Sequence[torch.Tensor], new: Sequence[torch.Tensor]
) -> Tensors:
    """A piece's KV heads: the last ones of the piece before, if it reads them too, and the new
    ones."""
    again = share.kv_new - share.kv_start
    if not again:
        return tuple(new)
    return tuple(torch.cat((x[:, -again:], y), dim=1) for x, y in zip(before, new, strict=True))


def closed_sums(share: HeadShare, made: Tensors, before: Tensors) -> tuple[Tensors, Tensors]:
    """Gradients of a piece's KV heads, as made or of repeats -> those that are complete, and those
    that later pieces add to. before: the latter, of the piece before."""
    closed, left_open = [], []
    for place, x in enumerate(made):
        total = _sum_repeats(x, share)
        again = share.kv_new - share.kv_start
        if again:
            total = torch.cat((total[:, :again] + before[place], total[:, again:]), dim=1)
        complete = share.kv_kept - share.kv_start
        closed.append(total[:, :complete])
        left_open.append(total[:, complete:])
    return tuple(closed), tuple(left_open)


def _sum_repeats(dx: torch.Tensor, share: HeadShare) -> torch.Tensor:
    """The transpose of `repeated`."""
    if share.repeats is None:
        return dx
    index = torch.tensor(share.repeats, device=dx.device)
    return dx.new_zeros(dx.shape[0], share.kv_stop - share.kv_start, dx.shape[2]).index_add_(
        1, index, dx
    )
