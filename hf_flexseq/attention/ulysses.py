"""Ulysses: exchange a share of every sequence for a share of the heads, so that one kernel sees
whole sequences.

    [my tokens, all heads]  --seq_to_head-->  [all tokens, my heads]  --kernel-->  ...
    --head_to_seq-->  my tokens

DeepSpeed-Ulysses (arXiv 2309.14509), here for token shares of any size and head counts that do not
divide: rank i of d works on query heads [i H/d, (i+1) H/d), none at all when d > H, and is sent
just the KV heads that those read, so a KV head may go to several ranks. Where a rank's query heads
do not fall evenly on its KV heads, it repeats KV heads after the exchange. Gradients of KV heads
sum over all ranks that had them.

A rank's heads come and go in a few pieces, so that one computes while others travel: all that
arrives is posted at once, and a piece's results are on their way while the next one computes. A KV
head that two pieces read arrives with the first of them, and its gradient leaves with the last.

What is kept for the backward is in the head layout; one exchange carries q, k and v together. In
checkpointed layers (`remat.py`) only the log-sum-exp is, and q, k, v and out travel again in the
backward, in one exchange with dout: the replay of the layer has q, k and v in the token layout
only. What computes between the exchanges is a kernel call, or in `hybrid.py` a ring, which has all
heads in one piece, since it overlaps its own transfers. Rejected: padding the shares or the heads
to equal size, which spends memory and bandwidth on nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from hf_flexseq.attention.heads import (
    HeadPiece,
    closed_sums,
    head_pieces,
    overlapping,
    pieces_of_head,
    read_again,
    repeated,
)
from hf_flexseq.attention.local import LocalZone, Tensors
from hf_flexseq.attention.weave import END, ZoneSteps, within
from hf_flexseq.cost import HEAD_PIECES
from hf_flexseq.distributed.all_to_all import AllToAll, all_to_all
from hf_flexseq.distributed.communicator import Channel
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.plan.shard import Zone, contiguous_part

Arriving = Callable[[], list[torch.Tensor]]  # waits for tensors that are on their way


class Span(NamedTuple):
    """A part of a zone's time."""

    start: float
    stop: float


class Leaving(NamedTuple):
    """Heads' results on their way to the ranks of the tokens. spans: the heads of each tensor that
    each rank had. sizes: by rank, how many elements of each tensor arrive here."""

    moving: AllToAll
    spans: Sequence[Sequence[slice]]
    sizes: Sequence[Sequence[int]]
    head_dim: int


class HeadAttention(Protocol):
    """Attention over all tokens of the group, for some heads."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Tensors]]: ...

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> ZoneSteps[Tensors]: ...

    def backward_of_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> ZoneSteps[Tensors]: ...


def ulysses_zone(
    zone: Zone, channel: Channel, kernel: Kernel, device: torch.device
) -> "UlyssesZone":
    """A group's heads dealt to its ranks, each of which then sees whole sequences."""
    parts = [
        contiguous_part(sum(zone.lengths), i, zone.group.degree) for i in range(zone.group.degree)
    ]
    tokens = [stop - start for start, stop in parts]
    inner = LocalZone(slice(zone.start, zone.stop), zone.lengths, kernel, device)
    pieces = pieces_of_head(zone.lengths, device)
    return UlyssesZone(
        inner.rows,
        tokens,
        zone.index,
        zone.group.ranks,
        channel,
        inner,
        pieces=pieces,
        wide=kernel.wide_gradients,
    )


def _flat(kept: Sequence[Tensors]) -> Tensors:
    """What the pieces keep for the backward, with their log-sum-exps [heads, tokens] as one,
    last."""
    if len(kept) < 2:
        return tuple(x for saved in kept for x in saved)
    return *(x for saved in kept for x in saved[:-1]), torch.cat([saved[-1] for saved in kept])


class UlyssesZone:
    """This rank's part in an Ulysses group."""

    __slots__ = ("channel", "index", "inner", "pieces", "ranks", "rows", "span", "tokens", "wide")

    def __init__(
        self,
        rows: slice,
        tokens: Sequence[int],
        index: int,
        ranks: Sequence[int],
        channel: Channel,
        inner: HeadAttention,
        *,
        span: Span | None = None,
        pieces: float = 0.0,
        wide: bool,
    ) -> None:
        """tokens: how many each of `ranks` holds. index: this rank's place among them. inner: what
        computes, of one piece in any layout, of several with a log-sum-exp [heads, tokens]. span:
        at which times of the zone it does; the exchanges have the time before and after it to
        travel. pieces: how many each query head of a rank is worth. wide: whether `inner` leaves
        gradients of 16-bit tensors in float32. Where ranks share a KV head they travel so, those
        of queries in the same message.
        """
        assert span is None or not pieces, "pieces have times of their own"
        self.rows, self.tokens, self.index, self.ranks = rows, tokens, index, ranks
        self.channel, self.inner, self.span, self.pieces, self.wide = (
            channel,
            inner,
            span,
            pieces,
            wide,
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Tensors]]:
        """q [t, H, D], k, v [t, Hkv, D] of this rank's tokens -> out [t, H, D], and what
        `backward` needs."""
        pieces = self._pieces(q, k)
        arriving = [
            self._seq_to_head(i, (q, k, v), (p.queries, p.arriving, p.arriving))
            for i, p in enumerate(pieces)
        ]
        leaving, kept, kv = [], [], ()
        for place, piece in enumerate(pieces):
            share, span = piece.shares[self.index], self._span(place, len(pieces))
            yield span.start
            qh, *new = arriving[place]()  # [T, my heads, D]
            oh, kv = qh, read_again(share, kv, new)
            if share.q_heads:
                read = (repeated(x, share) for x in kv)
                oh, saved = yield from within(*span, self.inner.forward(qh, *read, scale))
                kept.append(saved)
            yield span.stop
            leaving.append(self._head_to_seq(place, (oh,), (piece.queries,)))
        yield END
        (out,) = self._as_tokens(leaving)  # [t, H, D]
        # The first one carries nothing but the number of KV heads.
        return out, (k.new_empty(0, k.shape[1]), *_flat(kept))

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> ZoneSteps[Tensors]:
        kv_like, *of_inner = saved
        pieces = self._pieces(dout, kv_like)
        arriving = [self._seq_to_head(i, (dout,), (p.queries,)) for i, p in enumerate(pieces)]
        kept = self._unflat(of_inner, pieces)

        def inner(place: int, tensors: Sequence[torch.Tensor]) -> ZoneSteps[Tensors]:
            return self.inner.backward(*tensors, kept[place], scale)

        return (yield from self._gradients(pieces, arriving, inner))

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> ZoneSteps[Tensors]:  # type: ignore[no-untyped-def]
        """`backward` where nothing is kept in the head layout but lse: what it lacks travels
        together with dout."""
        pieces = self._pieces(q, k)
        arriving = [
            self._seq_to_head(
                i, (q, k, v, out, dout), (p.queries, p.arriving, p.arriving, p.queries, p.queries)
            )
            for i, p in enumerate(pieces)
        ]
        lses, kv = self._unflat((lse,), pieces), ()

        def inner(place: int, tensors: Sequence[torch.Tensor]) -> ZoneSteps[Tensors]:
            nonlocal kv
            (qh, *new, oh, doh), share = tensors, pieces[place].shares[self.index]
            kv = read_again(share, kv, new)
            read = (repeated(x, share) for x in kv)
            return self.inner.backward_of_rows(qh, *read, oh, doh, *lses[place], scale)

        return (yield from self._gradients(pieces, arriving, inner))

    def _gradients(
        self,
        pieces: Sequence[HeadPiece],
        arriving: Sequence[Arriving],
        inner: Callable[[int, Sequence[torch.Tensor]], ZoneSteps[Tensors]],
    ) -> ZoneSteps[Tensors]:
        """dq, dk, dv of this rank's tokens. inner: of a piece's heads, from what has arrived, dout
        last."""
        leaving, open_sums = [], ()
        adds_up = self.wide and overlapping([piece.leaving for piece in pieces])
        for place, piece in enumerate(pieces):
            share, span = piece.shares[self.index], self._span(place, len(pieces))
            yield span.start
            tensors = arriving[place]()
            dout = tensors[-1]
            dqh, *dkv = (dout,) * 3  # of no heads
            if share.q_heads:
                dqh, *dkv = yield from within(*span, inner(place, tensors))
                dkv, open_sums = closed_sums(share, dkv, open_sums)
            yield span.stop
            travels_in = lse_dtype(dout.dtype) if adds_up else dout.dtype
            made = tuple(x.to(travels_in) for x in (dqh, *dkv))
            leaving.append(
                self._head_to_seq(place, made, (piece.queries, piece.leaving, piece.leaving))
            )
        yield END
        return tuple(self._as_tokens(leaving))

    def _pieces(self, of_queries: torch.Tensor, of_keys: torch.Tensor) -> tuple[HeadPiece, ...]:
        heads, degree = of_queries.shape[1], len(self.ranks)
        worth = int(self.pieces * heads / degree)
        return head_pieces(heads, of_keys.shape[1], degree, max(1, min(worth, HEAD_PIECES)))

    def _span(self, place: int, pieces: int) -> Span:
        """When a piece is computed: with equal times before the first, between any two and after
        the last."""
        time = (place + 1) / (pieces + 1)
        return self.span or Span(time, time)

    def _unflat(self, flat: Sequence[torch.Tensor], pieces: Sequence[HeadPiece]) -> list[Tensors]:
        """What `_flat` joined, for every piece; nothing where this rank has no heads."""
        if len(pieces) == 1 or not pieces[0].shares[self.index].q_heads:
            return [tuple(flat)] * len(pieces)
        *tensors, lse = flat
        each = len(tensors) // len(pieces)
        lses = lse.split([piece.shares[self.index].q_heads for piece in pieces])
        return [(*tensors[i * each : (i + 1) * each], lses[i]) for i in range(len(pieces))]

    def _seq_to_head(
        self, place: int, tensors: Tensors, spans: Sequence[Sequence[slice]]
    ) -> Arriving:
        """Each [my tokens, heads, D] -> [all tokens, my heads, D]; `spans[x][i]` are the heads of
        rank i in x."""
        parts = [
            _flat_cat([x[:, span[i]] for x, span in zip(tensors, spans, strict=True)])
            for i in self._indices
        ]
        widths = [_width(x, span[self.index]) for x, span in zip(tensors, spans, strict=True)]
        moving = self._all_to_all(place, parts, [t * sum(widths) for t in self.tokens])
        return partial(self._as_heads, moving, widths, tensors[0].shape[2])

    def _as_heads(
        self, moving: AllToAll, widths: Sequence[int], head_dim: int
    ) -> list[torch.Tensor]:
        by_rank = [
            part.split([t * w for w in widths])
            for part, t in zip(moving.wait(), self.tokens, strict=True)
        ]
        return [
            torch.cat(column).view(sum(self.tokens), width // head_dim, head_dim)
            for column, width in zip(zip(*by_rank, strict=True), widths, strict=True)
        ]

    def _head_to_seq(
        self, place: int, tensors: Tensors, spans: Sequence[Sequence[slice]]
    ) -> Leaving:
        """Each [all tokens, my heads, D] on its way to [my tokens, heads, D]; see `_as_tokens`."""
        by_rank = [x.split(self.tokens) for x in tensors]
        parts = [_flat_cat([pieces[i] for pieces in by_rank]) for i in self._indices]
        mine, head_dim = self.tokens[self.index], tensors[0].shape[2]
        sizes = [
            [mine * (span[i].stop - span[i].start) * head_dim for span in spans]
            for i in self._indices
        ]
        moving = self._all_to_all(HEAD_PIECES + place, parts, [sum(s) for s in sizes])
        return Leaving(moving, spans, sizes, head_dim)

    def _as_tokens(self, leaving: Sequence[Leaving]) -> list[torch.Tensor]:
        """Each [my tokens, heads, D], once all pieces are there. Heads that several ranks had are
        summed, in float32 (float64 for float64): many ranks may share a KV head, and a 16-bit sum
        would lose with each of them."""
        mine, results = self.tokens[self.index], []
        for moving, spans, sizes, head_dim in leaving:
            received = moving.wait()
            results = results or [
                _Sums(received[0], mine, head_dim, of_pieces)
                for of_pieces in zip(*(piece.spans for piece in leaving), strict=True)
            ]
            for i, flat in enumerate(received):
                for result, span, part in zip(results, spans, flat.split(sizes[i]), strict=True):
                    result.add(part, span[i])
        return [result.total for result in results]

    def _all_to_all(
        self, number: int, parts: Sequence[torch.Tensor], numels: Sequence[int]
    ) -> AllToAll:
        label, tag = self.channel.label(self._describe), self.channel.tag(number)
        return all_to_all(
            self.channel.communicator, self.ranks, parts, numels, tag=tag, label=label
        )

    def _describe(self, peer: int, sent: bool) -> str:
        return f"heads of its part of sequences {list(self.channel.group.sequences)}"

    @property
    def _indices(self) -> range:
        return range(len(self.ranks))


class _Sums:
    """[tokens, heads, D] of parts [tokens, some heads, D], which several ranks may have of one
    head."""

    __slots__ = ("_shared", "total")

    def __init__(
        self, like: torch.Tensor, tokens: int, head_dim: int, spans: Sequence[Sequence[slice]]
    ) -> None:
        """spans: see `overlapping`."""
        heads = max(span.stop for of_piece in spans for span in of_piece)
        self._shared = overlapping(spans)
        if self._shared:
            self.total = like.new_zeros(tokens, heads, head_dim, dtype=lse_dtype(like.dtype))
        else:
            self.total = like.new_empty(tokens, heads, head_dim)

    def add(self, part: torch.Tensor, span: slice) -> None:
        if part.numel():
            rows = self.total[:, span]
            (rows.add_ if self._shared else rows.copy_)(part.view(rows.shape))


def _width(x: torch.Tensor, span: slice) -> int:
    return int(span.stop - span.start) * x.shape[2]


def _flat_cat(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])
