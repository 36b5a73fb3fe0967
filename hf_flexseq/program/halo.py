"""Attention over a window, or within chunks of a sequence, by ranks that hold slices of it: each
gathers the few keys before its slices that its queries read, its *halo*, and then makes one kernel
call.

    window 4, rank 1 of three      0 0 0 0 0 0 1 1 1 1 1 1 2 2 2 2 2 2
                                         h h h s s s s s s                what rank 1 reads

1. A slice is a chunk of the strategy's layout: a rank has one or two of each sequence. Its halo is
   cut at the start of the sequence, and at the start of the queries' chunk where the layer has
   chunks. It may lie on several ranks, where slices are shorter than a window; it comes straight
   from each of them. No other key travels.
2. One kernel call takes every slice as a sequence of its own over [halo | slice], causal with a
   left window; of a layer with chunks, every part of a slice that is in one chunk.
3. Backward: the halo is short, so its keys and values are kept. Their gradients go back to the
   owners, in float32 (float64 for float64), and are added there.

Which part of a chunk a rank reads follows from the layout alone, so every rank finds what it sends
and what it receives without asking: always the end of the chunk, from the first key of the
reader's next slice on.

Rejected: a ring that skips the blocks that no query reads. It would call the kernel for every
block, and masks on both edges of a block are not what kernels have.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hf_flexseq.base.layers import Reach, Span
from hf_flexseq.plan.attention_schedule import ChunkKey
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel, Exchange, Label, post
from hf_flexseq.program.instructions import WIDE, RowsSpec, Value
from hf_flexseq.program.ring_steps import ZoneLayout, name_chunks
from hf_flexseq.program.tables import IntArray, Tables
from hf_flexseq.program.tags import HALO_GRADIENTS, HALO_KEYS
from hf_flexseq.program.weave import END, ZoneSteps
from hf_flexseq.program.zones import LayerRows, Sinks


class ChunkMessage(NamedTuple):
    """Rows of some chunks that travel between this rank and another one."""

    peer: int
    """Global rank."""

    rows: RowsSpec
    """Row indices when sending, row count when receiving."""

    chunks: tuple[ChunkKey, ...]
    """The chunks that the rows belong to."""


class HaloZone:
    """This rank's part in a group whose ranks gather their halos before their kernel call."""

    __slots__ = ("call", "channel", "key_rows", "received", "rows", "sent", "tokens")

    def __init__(
        self,
        rows: slice,
        tokens: int,
        channel: Channel,
        *,
        sent: Sequence[ChunkMessage],
        received: Sequence[ChunkMessage],
        key_rows: RowsSpec,
        call: int,
    ) -> None:
        """rows: of this zone among all rows of the rank. tokens: their number.
        sent: rows of this rank. received: rows that follow them among the gathered ones.
        key_rows: [keys of the call], gathered rows. call: number of its lengths.
        """
        self.rows = rows
        self.tokens = tokens
        self.channel = channel
        self.sent = tuple(sent)
        self.received = tuple(received)
        self.key_rows = key_rows
        self.call = call

    @property
    def gathered_tokens(self) -> int:
        """Rows of this rank, and of its halos."""
        return self.tokens + sum(message.rows.tokens for message in self.received)

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim], and save q, gathered keys with values, out, lse
        [heads, tokens].

        q: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim].
        """
        gathered = yield from self._gather(b, k, v, until=1.0)  # [keys, 2, kv_heads, head_dim]
        keys, values = b.unpair(gathered)  # [keys, kv_heads, head_dim]
        out, lse = b.attend(q, keys, values, self.call)
        if sinks is not None:
            sinks.apply(b, out, lse)
        return out, (q, gathered, out, lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        q, gathered, out, lse = saved
        if sinks is not None:
            sinks.add_gradient(b, dout, out, lse)
        keys, values = b.unpair(gathered)  # [keys, kv_heads, head_dim]
        dq, dkeys, dvalues = b.gradients(dout, q, keys, values, out, lse, self.call)
        dk, dv = yield from self._return(b, dkeys, dvalues)
        return dq, dk, dv

    def backward_of_rows(
        self, b: Builder, rows: LayerRows, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return what `backward` does; the halos are gathered again."""
        gathered = yield from self._gather(b, rows.k, rows.v, until=0.5)
        saved = (rows.q, gathered, rows.out, rows.lse)
        return (yield from self.backward(b, rows.dout, saved, sinks))

    def _gather(self, b: Builder, k: Value, v: Value, *, until: float) -> ZoneSteps[Value]:
        """Gather k, v [tokens, kv_heads, head_dim] of all ranks -> [keys, 2, kv_heads, head_dim].

        until: the time of the zone at which all keys have arrived.
        """
        kv = b.pair(k, v)  # [tokens, 2, kv_heads, head_dim]
        # [gathered tokens, 2, kv_heads, head_dim]: this rank's own rows come first
        gathered = b.empty((self.gathered_tokens, *kv.shape[1:]), kv.dtype)
        b.put(gathered, RowsSpec(kv.rows, start=0), kv)
        label = self._label("keys of", sent=self.sent, received=self.received)
        exchange = Exchange(b, self.channel.tag(HALO_KEYS), label)
        for message in self.sent:
            exchange.send([b.take(gathered, message.rows)], message.peer)
        for message, part in self._halos(b, gathered):
            exchange.recv_into(part, message.peer)
        post(b, [exchange])
        yield until
        exchange.wait()
        return b.take(gathered, self.key_rows)

    def _return(self, b: Builder, dkeys: Value, dvalues: Value) -> ZoneSteps[Values]:
        """Return gradients to the owners of the keys and sum them: 2 x [keys, kv_heads, head_dim]
        -> 2 x [tokens, kv_heads, head_dim]. The transpose of `_gather`.
        """
        # 1. the keys of several queries, [gathered tokens, 2, kv_heads, head_dim]; one after the
        # other: side by side they would be copied, and then widened at once
        sums = b.zeros((self.gathered_tokens, 2, *dkeys.shape[1:]), WIDE)
        for of_one, grads in zip(b.unpair(sums), (dkeys, dvalues), strict=True):
            b.accumulate(of_one, self.key_rows, grads)
        # 2. gradients of halos to their owners, and of this rank's keys from every reader
        label = self._label("gradients of", sent=self.received, received=self.sent)
        exchange = Exchange(b, self.channel.tag(HALO_GRADIENTS), label)
        for message, part in self._halos(b, sums):
            exchange.send([part], message.peer)
        returned = []
        for message in self.sent:
            (part,) = exchange.recv([sums], message.rows.tokens, message.peer)
            returned.append(part)
        post(b, [exchange])
        yield END
        exchange.wait()
        own = b.part(sums, 0, self.tokens)
        for part, message in zip(returned, self.sent, strict=True):
            b.add(own, message.rows, part)
        return b.unpair(own)

    def _halos(self, b: Builder, gathered: Value) -> list[tuple[ChunkMessage, Value]]:
        """Return each message that brings a halo, with its rows, views of `gathered`."""
        halos = []
        start = self.tokens
        for message in self.received:
            stop = start + message.rows.tokens
            halos.append((message, b.part(gathered, start, stop)))
            start = stop
        return halos

    def _label(
        self, what: str, *, sent: Sequence[ChunkMessage], received: Sequence[ChunkMessage]
    ) -> Label:
        """Make the label that names the chunks of these messages in errors."""

        def describe(peer: int, to_peer: bool) -> str:
            messages = sent if to_peer else received
            (chunks,) = [message.chunks for message in messages if message.peer == peer]
            return f"{what} {name_chunks(chunks, self.channel.group.sequences)}"

        return Label(self.channel, describe)


# ---- which rows travel


class ChunkEnd(NamedTuple):
    """The end of a chunk, as another rank reads it; positions in the sequence."""

    key: ChunkKey

    first: int
    """The first token that is read."""

    stop: int
    """One past the last token of the chunk."""


def halo_zone(rows: slice, layout: ZoneLayout, reach: Reach, channel: Channel) -> HaloZone:
    """Make this rank's part in a group.

    rows: of the zone among all rows of the rank. layout: the chunks of the group's ranks.
    reach: which keys a query reads.
    """
    tables = layout.tables
    # 1. this rank's rows that others read
    sent = []
    for peer, pieces in sorted(_sent(layout, reach).items()):
        ranges = [layout.range_of(piece.key, piece.first, piece.stop) for piece in pieces]
        keys = tuple(piece.key for piece in pieces)
        sent.append(ChunkMessage(layout.ranks[peer], tables.rows(ranges), keys))

    # 2. the rows of others that this rank reads, after its own
    received = []
    places: dict[ChunkKey, tuple[int, int]] = {}  # of each chunk: its first token here, its row
    row = layout.tokens
    for peer, pieces in sorted(_received(layout, reach).items()):
        tokens = 0
        for piece in pieces:
            places[piece.key] = (piece.first, row + tokens)
            tokens += piece.stop - piece.first
        keys = tuple(piece.key for piece in pieces)
        received.append(ChunkMessage(layout.ranks[peer], RowsSpec(tokens), keys))
        row += tokens

    # 3. the kernel call: a sequence for each span of queries
    ranges = []
    q_lens = []
    k_lens = []
    for sequence, cut in enumerate(layout.cuts):
        for chunk in layout.held(sequence, layout.index):
            for span in reach.spans(cut.bounds[chunk], cut.bounds[chunk + 1]):
                q_lens.append(span.queries)
                k_lens.append(span.keys)
                ranges += _key_ranges(layout, places, sequence, span)
    call = tables.call(q_lens, k_lens, causal=True, window=reach.window)
    return HaloZone(
        rows,
        layout.tokens,
        channel,
        sent=sent,
        received=received,
        key_rows=listed_rows(ranges, tables),
        call=call,
    )


def listed_rows(ranges: Sequence[tuple[int, int]], tables: Tables) -> RowsSpec:
    """Return rows given as ranges, listed one by one: they become a tensor of their own."""
    parts: list[IntArray] = [np.arange(0)]
    for start, stop in ranges:
        parts.append(np.arange(start, stop))
    rows = np.concatenate(parts)
    return RowsSpec(len(rows), array=tables.index(rows))


def _received(layout: ZoneLayout, reach: Reach) -> dict[int, list[ChunkEnd]]:
    """Return what this rank reads of others, by index of the rank that holds it."""
    received: dict[int, list[ChunkEnd]] = defaultdict(list)
    for sequence, cut in enumerate(layout.cuts):
        for chunk, first in sorted(_read_before(layout, reach, sequence).items()):
            holder = layout.holder(sequence, chunk)
            received[holder].append(ChunkEnd((sequence, chunk), first, cut.bounds[chunk + 1]))
    return received


def _read_before(layout: ZoneLayout, reach: Reach, sequence: int) -> dict[int, int]:
    """Return, of each chunk of other ranks that this rank reads, the first token that is read."""
    bounds = layout.cuts[sequence].bounds
    own = layout.held(sequence, layout.index)
    first_read: dict[int, int] = {}
    # The earlier of two slices reads farther back, so it comes first.
    for slice_chunk in sorted(own):
        if bounds[slice_chunk] == bounds[slice_chunk + 1]:
            continue
        first_key = reach.first_key(bounds[slice_chunk])
        chunk = slice_chunk - 1
        while chunk >= 0 and bounds[chunk + 1] > first_key:
            if chunk not in own and bounds[chunk] < bounds[chunk + 1]:
                first_read.setdefault(chunk, max(bounds[chunk], first_key))
            chunk -= 1
    return first_read


def _sent(layout: ZoneLayout, reach: Reach) -> dict[int, list[ChunkEnd]]:
    """Return what other ranks read of this one, by index of the rank that reads it."""
    sent: dict[int, list[ChunkEnd]] = defaultdict(list)
    for sequence, cut in enumerate(layout.cuts):
        for chunk in sorted(layout.held(sequence, layout.index)):
            start, stop = cut.bounds[chunk : chunk + 2]
            if start == stop:
                continue
            for reader, first_key in _readers(layout, reach, sequence, chunk):
                sent[reader].append(ChunkEnd((sequence, chunk), max(start, first_key), stop))
    return sent


def _readers(
    layout: ZoneLayout, reach: Reach, sequence: int, chunk: int
) -> Iterator[tuple[int, int]]:
    """Yield (index, first key of its next slice) of other ranks that read a chunk of this rank."""
    bounds = layout.cuts[sequence].bounds
    seen = {layout.index}
    for later in range(chunk + 1, len(bounds) - 1):
        first_key = reach.first_key(bounds[later])
        if first_key >= bounds[chunk + 1]:
            return
        reader = layout.holder(sequence, later)
        if bounds[later] < bounds[later + 1] and reader not in seen:
            seen.add(reader)
            yield reader, first_key


def _key_ranges(
    layout: ZoneLayout, places: dict[ChunkKey, tuple[int, int]], sequence: int, span: Span
) -> list[tuple[int, int]]:
    """Return the rows [start, stop), among those gathered, of the keys of a span.

    places: of each chunk that has come from another rank, its first token and the row of that.
    """
    bounds = layout.cuts[sequence].bounds
    ranges = []
    chunk = bisect_right(bounds, span.first_key) - 1
    while chunk < len(bounds) - 1 and bounds[chunk] < span.stop:
        first = max(span.first_key, bounds[chunk])
        stop = min(span.stop, bounds[chunk + 1])
        if (sequence, chunk) in places:
            first_here, row = places[sequence, chunk]
            ranges.append((row + first - first_here, row + stop - first_here))
        elif first < stop:
            ranges.append(layout.range_of((sequence, chunk), first, stop))
        chunk += 1
    return ranges
