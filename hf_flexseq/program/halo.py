"""Attention by ranks that hold slices of sequences, and gather the few keys before their slices
that their queries read, the *halo*, before one kernel call: over a window, within chunks of a
sequence, and along the paths of units.

    window 4, rank 1 of three      0 0 0 0 0 0 1 1 1 1 1 1 2 2 2 2 2 2
                                         h h h s s s s s s                keys that rank 1 reads

1. A slice is a chunk of the strategy's layout: a rank has one or two of each sequence. Its halo is
   cut at the start of the sequence, and at the start of the queries' chunk where the layer has
   chunks. Where slices are shorter than a window, several ranks hold parts of it; they come
   straight from each rank. No other key travels (`halo_rows.py`).
2. One kernel call takes every slice as a separate sequence over [halo | slice], causal with a left
   window; of a layer with chunks, every part of a slice that is in one chunk.
3. Backward: the halo is short, so its keys and values are kept. Their gradients go back to the
   owners, in float32 (float64 for float64), and are added there.

Rejected: a ring that skips the blocks that no query reads. It would call the kernel for every
block, and kernels have no masks on both edges of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel, Exchange, Label, post
from hf_flexseq.program.instructions import WIDE, RowsSpec, Value
from hf_flexseq.program.ring_steps import ChunkRows, name_chunks
from hf_flexseq.program.tags import HALO_GRADIENTS, HALO_KEYS
from hf_flexseq.program.weave import END, ZoneSteps
from hf_flexseq.program.zones import LayerRows, Sinks


@dataclass(kw_only=True, slots=True, eq=False)
class HaloZone:
    """This rank's part in a group whose ranks gather their halos before their kernel call."""

    rows: slice
    """Of this zone, among all rows of the rank."""
    tokens: int
    """Their number."""
    channel: Channel
    sent: Sequence[ChunkRows]
    """Rows of this rank."""
    received: Sequence[ChunkRows]
    """Rows that follow them among the gathered ones."""
    key_rows: RowsSpec
    """[keys of the call], gathered rows."""
    call: int
    """Number of its lengths."""

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
        """Return the same gradients as `backward`; the halos are gathered again."""
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

    def _halos(self, b: Builder, gathered: Value) -> list[tuple[ChunkRows, Value]]:
        """Return each message that brings a halo, with its rows, views of `gathered`."""
        halos = []
        start = self.tokens
        for message in self.received:
            stop = start + message.rows.tokens
            halos.append((message, b.part(gathered, start, stop)))
            start = stop
        return halos

    def _label(
        self, what: str, *, sent: Sequence[ChunkRows], received: Sequence[ChunkRows]
    ) -> Label:
        """Make the label that names the chunks of these messages in errors."""

        def describe(peer: int, to_peer: bool) -> str:
            messages = sent if to_peer else received
            (chunks,) = [message.chunks for message in messages if message.peer == peer]
            return f"{what} {name_chunks(chunks, self.channel.group.sequences)}"

        return Label(self.channel, describe)
