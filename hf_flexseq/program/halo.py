"""Attention by ranks that hold segments of sequences (`plan/segments.py`), and gather the few keys
before their segments that their queries read, the *halo*, before one kernel call: over a window,
within chunks of a sequence, and along the paths of units.

    window 4, rank 1 of three      0 0 0 0 0 0 1 1 1 1 1 1 2 2 2 2 2 2
                                         h h h s s s s s s                keys that rank 1 reads

1. A halo is cut at the start of the sequence, and at the start of the queries' chunk where the
   layer has chunks. Where segments are shorter than a window, several ranks hold parts of it; they
   come straight from each rank. No other key travels (`segment_halo.py`).
2. One kernel call takes every segment as a separate sequence over [halo | segment], causal with a
   left window; of a layer with chunks, every part of a segment that is in one chunk.
3. Backward: the halo is short, so its keys and values are kept. Their gradients go back to the
   owners, in float32 (float64 for float64), and are added there.

Rejected: a ring that skips the blocks that no query reads. It would call the kernel for every
block, and kernels have no masks on both edges of a block. Rejected: ring steps over units; a
step's queries of one chunk would read keys of another in many small pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.segments import segments_of_cuts
from hf_flexseq.plan.units import UnitLayout
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.instructions import WIDE, RowsSpec, Value
from hf_flexseq.program.ring_steps import ZoneLayout
from hf_flexseq.program.row_exchange import gather, give_back
from hf_flexseq.program.segment_halo import keys_before, path_call
from hf_flexseq.program.tags import HALO_GRADIENTS, HALO_KEYS
from hf_flexseq.program.weave import END, ZoneSteps
from hf_flexseq.program.zone_segments import RowMessages
from hf_flexseq.program.zones import LayerRows, Sinks


@dataclass(kw_only=True, slots=True, eq=False)
class HaloZone:
    """This rank's part in a group whose ranks gather their halos before their kernel call."""

    rows: slice
    """Of this zone, among all rows of the rank."""
    tokens: int
    """Their number."""
    messages: RowMessages
    """The halos; received rows follow this rank's among the gathered ones."""
    key_rows: RowsSpec
    """[keys of the call], gathered rows."""
    call: int
    """Number of its lengths."""

    @property
    def gathered_tokens(self) -> int:
        """Rows of this rank, and of its halos."""
        return self.tokens + sum(number for _, number in self.messages.received)

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
        exchanges, halos = gather(b, [self.messages], kv, HALO_KEYS)
        yield until
        exchanges.wait()
        # [gathered tokens, 2, kv_heads, head_dim]: this rank's own rows come first
        return b.take(b.join([kv, *halos]), self.key_rows)

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
        own = b.part(sums, 0, self.tokens)
        halos = b.part(sums, self.tokens, self.gathered_tokens)
        exchanges, returned = give_back(b, [self.messages], halos, HALO_GRADIENTS)
        yield END
        exchanges.wait()
        for rows, part in returned:
            b.add(own, rows, part)
        return b.unpair(own)


def halo_zone(
    rows: slice,
    layout: ZoneLayout,
    reach: Reach,
    channel: Channel,
    units: Sequence[UnitLayout | None] = (),
) -> HaloZone:
    """Make this rank's part in a group.

    rows: of the zone among all rows of the rank. layout: the chunks of the group's ranks. reach:
    which keys a query reads. units: of each sequence, None for a plain one; none if all are plain.
    """
    tables = layout.tables
    segments = segments_of_cuts(layout.cuts, units, layout.ranks, layout.index)
    assert segments.tokens == layout.tokens, "segments are not the rows of the zone"
    found = keys_before(segments, reach)
    sent = tuple((peer, tables.order(of_peer)) for peer, of_peer in found.sent)
    key_rows, call = path_call(segments, found, reach, tables)
    return HaloZone(
        rows=rows,
        tokens=layout.tokens,
        messages=RowMessages(channel, "keys before segments", sent, found.received),
        key_rows=key_rows,
        call=call,
    )
