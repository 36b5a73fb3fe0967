"""Ulysses: exchange a share of every sequence for a share of the heads, so that one kernel sees
whole sequences.

    [my tokens, all heads]  --seq_to_head-->  [all tokens, my heads]  --kernel-->  ...
    --head_to_seq-->  [my tokens, all heads]

DeepSpeed-Ulysses (arXiv 2309.14509), here for token shares of any size and head counts that do not
divide: rank i of d works on query heads [i H/d, (i+1) H/d), none at all when d > H, and is sent
just the KV heads that those read, so a KV head may go to several ranks (`heads.py`).

Inside a node there is one exchange each way (`head_exchange.py`), forward and backward; q, k and v
travel together. Across nodes a rank's query heads come and go in a few pieces:

1. The exchanges of all pieces are posted at once; k and v come with the first one.
2. Piece by piece: wait for its heads, compute, and post the exchange of its results.
3. Wait for the results of all pieces; dk and dv come with the last one.

Values for the backward are kept in the head layout. In checkpointed layers (`remat.py`) only the
log-sum-exp is kept, and q, k, v and out travel again in the backward, in one exchange with dout:
the replay of the layer has q, k and v in the token layout only. Between the exchanges a kernel
call computes, or in `hybrid.py` a ring.

Rejected: padding the shares or the heads to equal size, which spends memory and bandwidth on
nothing; and pieces inside a node, where a piece fills the kernel worse than all heads do, by more
time than its transfer takes.

The slow reference is `tests/attention/dense.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.blocks import Range
from hf_flexseq.plan.shard import Zone, contiguous_parts
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.calls import whole_zone
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.head_exchange import ArrivingHeads, HeadExchange, LeavingHeads
from hf_flexseq.program.heads import HeadPiece, HeadShare, head_pieces, read_by, sum_of
from hf_flexseq.program.instructions import INPUT, WIDE, Value
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.tags import HEAD_PIECES
from hf_flexseq.program.weave import END, ZoneSteps, within
from hf_flexseq.program.zones import Attention, LayerRows, Machine, Sinks

# The backward of one piece: from its number and the tensors that have arrived for it, dout last,
# each [all tokens, my heads, head_dim], to dq, dk and dv of what the inner attention read.
PieceBackward = Callable[[int, Values], ZoneSteps[Values]]


class Span(NamedTuple):
    """A part of a zone's time."""

    start: float
    stop: float


def ulysses_zone(
    zone: Zone,
    channel: Channel,
    tables: Tables,
    machine: Machine,
    reach: Reach,
    blocks: Sequence[Range],
) -> "UlyssesZone":
    """Make the attention of an Ulysses group, around one kernel call for each piece of the heads.

    reach: which keys a query reads. blocks: rows of all sequences of the group whose queries read
    both ways.
    """
    all_tokens = sum(zone.lengths)
    tokens = [len(part) for part in contiguous_parts(all_tokens, zone.group.degree)]
    rows = slice(0, all_tokens)
    trees = zone.group.trees
    inner = whole_zone(rows, zone.lengths, tables, reach=reach, trees=trees, blocks=blocks)
    return UlyssesZone(
        rows=slice(zone.start, zone.stop),
        exchange=HeadExchange(channel, zone.group.ranks, zone.index, tokens),
        inner=inner,
        piece_rows=machine.piece_rows(zone.group.ranks),
        wide=bool(trees),
    )


@dataclass(kw_only=True, slots=True, eq=False)
class UlyssesZone:
    """This rank's part in an Ulysses group."""

    rows: slice
    """Of this rank's tokens, among its rows."""
    exchange: HeadExchange
    """Between the ranks of the group."""
    inner: Attention
    """The attention between the exchanges, on all tokens of the group and some heads; with several
    pieces its log-sum-exp must be [heads, tokens]."""
    span: Span | None = None
    """At which times of the zone it computes; the exchanges have the time before and after it to
    travel. None with pieces, which have times of their own."""
    piece_rows: int | None = None
    """Query heads x tokens that make a piece of the heads worth a kernel call; None leaves all
    heads in one piece."""
    wide: bool = False
    """Whether `inner` sums gradients in WIDE whatever the kernel does."""

    def __post_init__(self) -> None:
        assert self.span is None or self.piece_rows is None, "pieces have times of their own"

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [my tokens, heads, head_dim], and save the values of `inner`, in the head
        layout.

        q: [my tokens, heads, head_dim]. k, v: [my tokens, kv_heads, head_dim].
        """
        pieces = self._pieces(b)
        keys = pieces[0].arriving[self.exchange.own]

        # 1. post what the pieces read: [my tokens, all heads] -> [all tokens, my heads]
        read = [(piece.queries, piece.arriving, piece.arriving) for piece in pieces]
        arriving = self.exchange.seq_to_head(b, (q, k, v), read)

        # 2. compute piece by piece
        written = [(piece.queries,) for piece in pieces]
        leaving = LeavingHeads(b, self.exchange, written, q.shape[2], INPUT)
        saved_by_piece: list[Values] = []
        kv_heads: Values = ()
        for number, piece in enumerate(pieces):
            share = self._share(piece)
            span = self._span(number, len(pieces))
            yield span.start
            q_heads, *arrived = arriving[number].wait()  # [all tokens, my heads, head_dim]
            kv_heads = kv_heads or tuple(arrived)
            if share.queries:
                k_heads, v_heads = (read_by(b, x, keys, share) for x in kv_heads)
                own_sinks = _sinks_of(b, sinks, share)
                inner_steps = self.inner.forward(b, q_heads, k_heads, v_heads, own_sinks)
                out_heads, saved = yield from within(span.start, span.stop, inner_steps)
            else:
                out_heads = q_heads  # no head here: [all tokens, 0, head_dim]
                saved = (b.empty((0,), WIDE),)  # and so no log-sum-exp
            saved_by_piece.append(saved)
            yield span.stop
            # [all tokens, my heads, head_dim] -> [my tokens, all heads, head_dim]
            leaving.post((out_heads,))

        # 3. wait for the results
        yield END
        (out,) = leaving.wait()  # [my tokens, heads, head_dim]
        return out, _flat(b, saved_by_piece)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [my tokens, heads, head_dim], dk and dv [my tokens, kv_heads, head_dim]."""
        pieces = self._pieces(b)
        # [my tokens, all heads, head_dim] -> [all tokens, my heads, head_dim]
        arriving = self.exchange.seq_to_head(b, (dout,), [(piece.queries,) for piece in pieces])
        saved_by_piece = self._unflat(b, saved, pieces)

        def piece_backward(number: int, arrived: Values) -> ZoneSteps[Values]:
            (dout_heads,) = arrived  # [all tokens, my heads, head_dim]
            own_sinks = _sinks_of(b, sinks, self._share(pieces[number]))
            return self.inner.backward(b, dout_heads, saved_by_piece[number], own_sinks)

        return (yield from self._gradients(b, pieces, arriving, piece_backward))

    def backward_of_rows(
        self, b: Builder, rows: LayerRows, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return the same gradients as `backward`, where nothing is kept in the head layout but
        the log-sum-exp: all missing tensors travel together with dout.

        rows: of my tokens, all heads; lse of all pieces, [my heads, all tokens] or as `inner` has
        it.
        """
        pieces = self._pieces(b)
        keys = pieces[0].arriving[self.exchange.own]
        # [my tokens, all heads, head_dim] -> [all tokens, my heads, head_dim]
        read = []
        for piece in pieces:
            kv = piece.arriving
            read.append((piece.queries, kv, kv, piece.queries, piece.queries))
        arriving = self.exchange.seq_to_head(b, rows[:-1], read)
        lse_by_piece = self._unflat(b, (rows.lse,), pieces)
        kv_heads: Values = ()

        def piece_backward(number: int, arrived: Values) -> ZoneSteps[Values]:
            nonlocal kv_heads
            # each [all tokens, my heads, head_dim]
            q_heads, *arrived_kv, out_heads, dout_heads = arrived
            kv_heads = kv_heads or tuple(arrived_kv)
            share = self._share(pieces[number])
            k_heads, v_heads = (read_by(b, x, keys, share) for x in kv_heads)
            (lse,) = lse_by_piece[number]
            own_rows = LayerRows(q_heads, k_heads, v_heads, out_heads, dout_heads, lse)
            return self.inner.backward_of_rows(b, own_rows, _sinks_of(b, sinks, share))

        return (yield from self._gradients(b, pieces, arriving, piece_backward))

    def _gradients(
        self,
        b: Builder,
        pieces: Sequence[HeadPiece],
        arriving: Sequence[ArrivingHeads],
        piece_backward: PieceBackward,
    ) -> ZoneSteps[Values]:
        """Return dq [my tokens, heads, head_dim], dk and dv [my tokens, kv_heads, head_dim].

        arriving: by piece, the inputs of `piece_backward`, dout last.
        """
        keys_by_rank = pieces[-1].leaving
        # Where ranks share a KV head its gradients are parts of a sum, and not rounded yet.
        are_shared = sum(map(len, keys_by_rank)) > b.shape.kv_heads
        wire_dtype = WIDE if are_shared and (self.wide or b.wide) else INPUT
        written = [(piece.queries, piece.leaving, piece.leaving) for piece in pieces]
        leaving = LeavingHeads(b, self.exchange, written, b.shape.head_dim, wire_dtype)
        shares = [self._share(piece) for piece in pieces]
        dkv_by_piece: list[Values] = []
        for number, share in enumerate(shares):
            span = self._span(number, len(pieces))
            yield span.start
            arrived = arriving[number].wait()
            grads: Values
            if share.queries:
                inner_steps = piece_backward(number, arrived)
                dq_heads, *dkv = yield from within(span.start, span.stop, inner_steps)
                dkv_by_piece.append(tuple(dkv))
                grads = (dq_heads,)
            else:
                grads = (arrived[-1],)  # no head here: [all tokens, 0, head_dim]
            yield span.stop
            if share.queries and number == len(pieces) - 1:
                own_keys = keys_by_rank[self.exchange.own]
                for of_pieces in zip(*dkv_by_piece, strict=True):  # dk, then dv
                    grads += (sum_of(b, of_pieces, own_keys, shares),)
            # [all tokens, my heads, head_dim] -> [my tokens, all heads, head_dim]
            leaving.post(tuple(b.cast(x, wire_dtype) for x in grads))
        yield END
        return leaving.wait()

    def _pieces(self, b: Builder) -> tuple[HeadPiece, ...]:
        """Cut the heads of all ranks into pieces: as many as are worth it, at most
        `HEAD_PIECES`."""
        degree = len(self.exchange.ranks)
        most = 1
        if self.piece_rows is not None:
            rows = b.shape.query_heads * sum(self.exchange.tokens) // degree
            most = max(1, min(HEAD_PIECES, rows // self.piece_rows))
        return head_pieces(b.shape.query_heads, b.shape.kv_heads, degree, most)

    def _share(self, piece: HeadPiece) -> HeadShare:
        """This rank's share of a piece."""
        return piece.shares[self.exchange.own]

    def _span(self, number: int, pieces: int) -> Span:
        """Return the time at which a piece is computed.

        Pieces have equal times before the first, between any two and after the last.
        """
        if self.span is not None:
            return self.span
        time = (number + 1) / (pieces + 1)
        return Span(time, time)

    def _unflat(self, b: Builder, flat: Values, pieces: Sequence[HeadPiece]) -> list[Values]:
        """Split the values that `_flat` joined, by piece."""
        if len(pieces) == 1 or not self._share(pieces[0]).queries:
            # One piece has all of it; a rank without heads computes none, and so reads nothing.
            return [flat] * len(pieces)
        *values, lse = flat
        each = len(values) // len(pieces)
        saved_by_piece = []
        start = 0
        for number, piece in enumerate(pieces):
            stop = start + len(self._share(piece).queries)
            # [my heads, all tokens] -> [heads of the piece, all tokens]
            piece_lse = b.part(lse, start, stop)
            of_piece = values[number * each : (number + 1) * each]
            saved_by_piece.append((*of_piece, piece_lse))
            start = stop
        return saved_by_piece


def _sinks_of(b: Builder, sinks: Sinks | None, share: HeadShare) -> Sinks | None:
    """Return the sinks of a share of the heads."""
    if sinks is None:
        return None
    return sinks.of_heads(b, share.queries.start, share.queries.stop)


def _flat(b: Builder, saved_by_piece: Sequence[Values]) -> Values:
    """Join the saved values of the pieces into one tuple, their log-sum-exps as one value at its
    end: each [heads of the piece, all tokens] -> [my heads, all tokens]."""
    flat: list[Value] = []
    for values in saved_by_piece:
        flat.extend(values[:-1])
    lse = b.join([values[-1] for values in saved_by_piece])
    return (*flat, lse)
