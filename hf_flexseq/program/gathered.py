"""Keys and values first, then one kernel call: attention without partial results.

    keys, values  --gather by need-->  tokens 0..stop of each of this rank's chunks  --kernel-->
    out

1. A rank holds two chunks of each sequence, as in `zigzag`, which evens out the work. It gathers
   the chunks that its last one reads: inside a node straight from their owners, between nodes in
   two legs (`schedule/gather.py`).
2. One varlen call takes each of its chunks as a sequence of its own, with the chunk as the last of
   its keys, so that nothing is merged and a 16-bit result is as exact as on one rank. Keys that
   both chunks of a sequence read are in the call twice, on average a quarter of the sequence.
3. Backward: the gathered keys and values are fetched again instead of kept, for they are whole
   sequences. Gradients of keys that several queries read go the way back, and are summed in
   float32 (float64 for float64): here, where they leave the node, and at their owner.

Windows and chunks of a sequence (`halo.py`) gather what comes before a slice as far as its queries
read, straight from its owners, and keep it for the backward: it is short.

Llama 3 (arXiv 2407.21783, section 3.3.2) for the gather and the two chunks; there everything is
gathered, here only what is read, three quarters of it. Rejected: computing this rank's own block
meanwhile, which would have to be merged; the gather hides under nothing but other zones.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hf_flexseq.plan.shard import Cut, Zone, cuts, held_chunks
from hf_flexseq.program.builder import Builder, IntArray, Tables, Values
from hf_flexseq.program.exchange import Channel, Exchange, Label, post
from hf_flexseq.program.instructions import WIDE, Rows, Value
from hf_flexseq.program.tags import gather_leg, return_leg
from hf_flexseq.program.turns import name_chunks
from hf_flexseq.program.weave import END, ZoneSteps
from hf_flexseq.program.zones import Sinks
from hf_flexseq.schedule.attention import ChunkKey
from hf_flexseq.schedule.gather import RankLeg, gather_of_rank


class ChunkMessage(NamedTuple):
    """Rows of some chunks that travel between this rank and another one."""

    peer: int
    """Global rank."""

    rows: Rows
    """Which rows; only their number where they are received."""

    chunks: tuple[ChunkKey, ...]
    """What the rows are."""


class Leg(NamedTuple):
    """This rank's part in one leg of the gather."""

    before: int
    """Rows that this rank has when the leg begins."""

    sent: tuple[ChunkMessage, ...]
    """Which of these rows go to other ranks."""

    received: tuple[ChunkMessage, ...]
    """What comes from other ranks, behind these rows."""

    @property
    def after(self) -> int:
        """Rows that this rank has when the leg has ended."""
        return self.before + sum(message.rows.tokens for message in self.received)

    def parts(self, b: Builder, gathered: Value) -> list[Value]:
        """Return the rows of each message that is received, views of gathered [rows after the last
        leg, ...]."""
        parts = []
        start = self.before
        for message in self.received:
            stop = start + message.rows.tokens
            parts.append(b.part(gathered, start, stop))
            start = stop
        return parts


def all_gather_zone(
    zone: Zone, channel: Channel, tables: Tables, ranks_per_node: int
) -> "GatheredZone":
    """Make this rank's part in an all-gather group: find what every leg moves, and the kernel call
    after the last one."""
    # 1. what every leg moves
    degree = zone.group.degree
    group_cuts = cuts("allgather", zone.lengths, degree)
    gathered = GatheredChunks(group_cuts, zone.index, degree)
    legs = []
    for messages in gather_of_rank(group_cuts, degree, ranks_per_node, zone.index):
        legs.append(_leg(messages, zone, gathered, tables))

    # 2. what the kernel reads; key_rows: [keys of the call], gathered rows
    key_rows, call = _kernel_call(zone, group_cuts, gathered, tables)
    rows = slice(zone.start, zone.stop)
    return GatheredZone(rows, channel, legs, key_rows, call, keeps_keys=False)


class GatheredZone:
    """This rank's part in a group whose ranks gather the keys that their queries read before their
    kernel call: all keys up to these (`all_gather_zone`), or the last ones (`halo.py`)."""

    __slots__ = ("call", "channel", "keeps_keys", "key_rows", "legs", "rows")

    def __init__(
        self,
        rows: slice,
        channel: Channel,
        legs: Sequence[Leg],
        key_rows: Rows,
        call: int,
        *,
        keeps_keys: bool,
    ) -> None:
        """rows: of this zone among all rows of the rank. legs: of the gather, at least one.

        key_rows: [keys of the call], gathered rows. call: number of its lengths. keeps_keys:
        whether the gathered keys and values are kept for the backward, instead of fetched again.
        """
        self.rows = rows
        self.channel = channel
        self.legs = tuple(legs)
        self.key_rows = key_rows
        self.call = call
        self.keeps_keys = keeps_keys

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim], and save q, k with v, out, lse [heads, tokens]:
        keys and values as they were gathered, or this rank's alone.

        q: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim].
        """
        kv = b.pair(k, v)  # [tokens, 2, kv_heads, head_dim]
        gathered = yield from self._gather(b, kv, until=1.0)  # [keys, 2, kv_heads, head_dim]
        keys, values = b.unpair(gathered)  # [keys, kv_heads, head_dim]
        out, lse = b.attend(q, keys, values, self.call)
        if sinks is not None:
            sinks.apply(b, out, lse)
        return out, (q, gathered if self.keeps_keys else kv, out, lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        q, kv, out, lse = saved
        if not self.keeps_keys:
            kv = yield from self._gather(b, kv, until=0.5)  # [keys, 2, kv_heads, head_dim]
        return (yield from self._gradients(b, dout, q, kv, out, lse, sinks))

    def _gradients(
        self,
        b: Builder,
        dout: Value,
        q: Value,
        gathered: Value,
        out: Value,
        lse: Value,
        sinks: Sinks | None,
    ) -> ZoneSteps[Values]:
        """Return what `backward` does, from gathered [keys, 2, kv_heads, head_dim]."""
        if sinks is not None:
            sinks.add_gradient(b, dout, out, lse)
        keys, values = b.unpair(gathered)  # [keys, kv_heads, head_dim]
        dq, dkeys, dvalues = b.gradients(dout, q, keys, values, out, lse, self.call)
        # 2 x [keys, kv_heads, head_dim] -> [tokens, 2, kv_heads, head_dim]
        dkv = yield from self._return(b, dkeys, dvalues)
        dk, dv = b.unpair(dkv)
        return dq, dk, dv

    def backward_of_rows(
        self,
        b: Builder,
        q: Value,
        k: Value,
        v: Value,
        out: Value,
        dout: Value,
        lse: Value,
        sinks: Sinks | None = None,
    ) -> ZoneSteps[Values]:
        """Return what `backward` does.

        q, out, dout: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim]. lse: [heads,
        tokens].
        """
        gathered = yield from self._gather(b, b.pair(k, v), until=0.5)
        return (yield from self._gradients(b, dout, q, gathered, out, lse, sinks))

    def _gather(self, b: Builder, kv: Value, *, until: float) -> ZoneSteps[Value]:
        """Gather [tokens, 2, kv_heads, head_dim] of all ranks -> [keys, 2, kv_heads, head_dim].

        until: the time of the zone at which all keys are there.
        """
        # [rows after the last leg, 2, kv_heads, head_dim]: this rank's own rows come first
        gathered = b.empty((self.legs[-1].after, *kv.shape[1:]), kv.dtype)
        b.put(gathered, Rows(kv.rows, start=0), kv)
        for n, leg in enumerate(self.legs):
            # 1. rows that other ranks read
            label = self._label("keys of", sent=leg.sent, received=leg.received)
            exchange = Exchange(b, self.channel.tag(gather_leg(n)), label)
            for message in leg.sent:
                exchange.send([b.take(gathered, message.rows)], message.peer)
            # 2. rows that this rank reads, or passes on: straight to where they belong
            for part, message in zip(leg.parts(b, gathered), leg.received, strict=True):
                exchange.recv_into(part, message.peer)
            post(b, [exchange])
            yield until * (n + 1) / len(self.legs)
            exchange.wait()
        return b.take(gathered, self.key_rows)

    def _return(self, b: Builder, dkeys: Value, dvalues: Value) -> ZoneSteps[Value]:
        """Return gradients to the owners of the keys and sum them: 2 x [keys, kv_heads, head_dim]
        -> [tokens, 2, kv_heads, head_dim]. The transpose of `_gather`.
        """
        # [rows after the last leg, 2, kv_heads, head_dim]
        sums = b.zeros((self.legs[-1].after, 2, *dkeys.shape[1:]), WIDE)
        # One after the other: side by side they would be copied, and then widened at once.
        for of_one, grads in zip(b.unpair(sums), (dkeys, dvalues), strict=True):
            b.accumulate(of_one, self.key_rows, grads)
        for n in reversed(range(len(self.legs))):
            leg = self.legs[n]
            # 1. what the leg brought goes back: [rows after, ...] -> [rows before, ...]
            label = self._label("gradients of", sent=leg.received, received=leg.sent)
            exchange = Exchange(b, self.channel.tag(return_leg(n)), label)
            for part, message in zip(leg.parts(b, sums), leg.received, strict=True):
                exchange.send([part], message.peer)
            # 2. and what it took away comes back, from every reader
            returned = []
            for message in leg.sent:
                (part,) = exchange.recv([sums], message.rows.tokens, message.peer)
                returned.append(part)
            post(b, [exchange])
            yield 0.75 if n else END
            exchange.wait()
            sums = b.part(sums, 0, leg.before)
            for part, message in zip(returned, leg.sent, strict=True):
                b.add(sums, message.rows, part)
        return sums

    def _label(
        self, what: str, *, sent: Sequence[ChunkMessage], received: Sequence[ChunkMessage]
    ) -> Label:
        """Make the label that names the chunks of these messages in errors."""

        def describe(peer: int, to_peer: bool) -> str:
            messages = sent if to_peer else received
            (chunks,) = [message.chunks for message in messages if message.peer == peer]
            return f"{what} {name_chunks(chunks, self.channel.group.sequences)}"

        return Label(self.channel, describe)


class GatheredChunks:
    """Which rows the chunks fill that this rank has: first its own, then what every leg brings."""

    __slots__ = ("_cuts", "_starts", "tokens")

    def __init__(self, group_cuts: Sequence[Cut], index: int, degree: int) -> None:
        """index: this rank's index in the group of `degree` ranks."""
        self._cuts = group_cuts
        self._starts: dict[ChunkKey, int] = {}
        self.tokens = 0  # rows so far
        for sequence, cut in enumerate(group_cuts):
            chunks = held_chunks("allgather", index, degree, mirrored=cut.mirrored)
            self.append((sequence, chunk) for chunk in chunks)

    def append(self, keys: Iterable[ChunkKey]) -> int:
        """Put chunks behind the rows so far, and return how many rows they fill."""
        before = self.tokens
        for key in keys:
            self._starts[key] = self.tokens
            self.tokens += self._tokens(key)
        return self.tokens - before

    def ranges(self, keys: Iterable[ChunkKey]) -> list[tuple[int, int]]:
        """Return the rows [start, stop) of each of the chunks that is not empty."""
        ranges = []
        for key in keys:
            tokens = self._tokens(key)
            if tokens:
                start = self._starts[key]
                ranges.append((start, start + tokens))
        return ranges

    def _tokens(self, key: ChunkKey) -> int:
        sequence, chunk = key
        return self._cuts[sequence].tokens((chunk,))


def _leg(messages: RankLeg, zone: Zone, gathered: GatheredChunks, tables: Tables) -> Leg:
    """Make this rank's part in a leg, and append the chunks that it brings to `gathered`."""
    before = gathered.tokens
    sent = []
    for i, chunks in messages.sent:
        rows = tables.rows(gathered.ranges(chunks))
        sent.append(ChunkMessage(zone.group.ranks[i], rows, chunks))
    received = []
    for i, chunks in messages.received:
        rows = Rows(gathered.append(chunks))
        received.append(ChunkMessage(zone.group.ranks[i], rows, chunks))
    return Leg(before, tuple(sent), tuple(received))


def _kernel_call(
    zone: Zone, group_cuts: Sequence[Cut], gathered: GatheredChunks, tables: Tables
) -> tuple[Rows, int]:
    """Return which of the gathered rows are keys of the kernel call, [keys], and the number of the
    call's lengths: one sequence for each chunk that this rank holds, over all tokens up to its
    end."""
    ranges: list[tuple[int, int]] = []
    q_lens = []
    k_lens = []
    for sequence, cut in enumerate(group_cuts):
        chunks = held_chunks("allgather", zone.index, zone.group.degree, mirrored=cut.mirrored)
        for chunk in chunks:
            queries = cut.tokens((chunk,))
            read = range(chunk + 1) if queries else range(0)
            q_lens.append(queries)
            k_lens.append(cut.tokens(read))
            ranges += gathered.ranges((sequence, earlier) for earlier in read)
    return listed(ranges, tables), tables.call(q_lens, k_lens, causal=True)


def listed(ranges: Sequence[tuple[int, int]], tables: Tables) -> Rows:
    """Return rows given as ranges, listed one by one: they become a tensor of their own."""
    parts: list[IntArray] = [np.arange(0)]
    for start, stop in ranges:
        parts.append(np.arange(start, stop))
    rows = np.concatenate(parts)
    return Rows(len(rows), array=tables.index(rows))
