"""Attention in which blocks of tokens, such as those of one image, see both ways.

    a block in rows 4 to 7        causal           and of the block
                          4       .. 3 4           7 6 5
                          5       .. 3 4 5         7 6
                          6       .. 3 4 5 6       7
                          7       .. 3 4 5 6 7

1. The attention of all sequences, their blocks included, is causal as ever: with its windows,
   units and runs.
2. One more call takes the blocks alone, and each from its last token to its first. In this order
   the later keys come first, so it is causal, too: queries 6 5 4 over keys 7 6 5.
3. The results about a query are merged by their log-sum-exps. So every pair is computed once,
   without a mask. The last query of a block is not concerned.

Copies are made of the blocks' rows alone. In the backward both calls read the merged result, and
their gradients are added.
"""

from collections.abc import Sequence

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.blocks import Range
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.instructions import INPUT, WIDE, RowsSpec, Value
from hf_flexseq.program.sums import Total
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.weave import ZoneSteps
from hf_flexseq.program.zones import LayerRows, SavesRows, Sinks, ZoneAttention


class BothWaysZone(SavesRows):
    """Attention over whole sequences, with blocks."""

    __slots__ = ("call", "causal", "keys", "queries", "rows")

    def __init__(self, causal: ZoneAttention, blocks: Sequence[Range], tables: Tables) -> None:
        """causal: the same without blocks; its log-sum-exp is [heads, tokens]. blocks: rows, in
        ascending order, of two and more each."""
        self.rows = causal.rows
        self.causal = causal
        self.queries = tables.backwards([(start, stop - 1) for start, stop in blocks])
        self.keys = tables.backwards([(start + 1, stop) for start, stop in blocks])
        lengths = [stop - start - 1 for start, stop in blocks]
        self.call = tables.call(lengths, lengths, causal=True)

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim], and save q, k, v, out, lse [heads, tokens]."""
        causal_out, saved = yield from self.causal.forward(b, q, k, v)
        out = b.cast(causal_out, WIDE)
        lse = saved[-1]
        keys, values = b.take_all((k, v), self.keys)
        later_out, later_lse = b.attend(b.take(q, self.queries), keys, values, self.call)
        b.merge(out, b.turned(lse), self.queries, (later_out, b.turned(later_lse)))
        if sinks is not None:
            sinks.apply(b, out, lse)
        whole_out = b.cast(out, INPUT)
        return whole_out, (q, k, v, whole_out, lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim], in float32
        (float64 for float64)."""
        q, k, v, out, lse = saved
        if sinks is not None:
            sinks.add_gradient(b, dout, out, lse)
        rows = LayerRows(q, k, v, out, dout, lse)
        causal_grads = yield from self.causal.backward_of_rows(b, rows)
        own_dout, own_q, own_out, own_lse = b.take_all((dout, q, out, b.turned(lse)), self.queries)
        keys, values = b.take_all((k, v), self.keys)
        later_grads = b.gradients(
            own_dout, own_q, keys, values, own_out, b.kernel_lse(own_lse), self.call
        )
        totals = []
        own_rows = (self.queries, self.keys, self.keys)
        for causal, later, rows_of_later in zip(causal_grads, later_grads, own_rows, strict=True):
            total = Total(b, causal)
            total.add(RowsSpec(causal.rows, start=0), (causal,))
            total.add(rows_of_later, (later,))
            totals.append(total.value())
        return tuple(totals)


def seeing_both_ways(
    causal: ZoneAttention, blocks: Sequence[Range], reach: Reach, tables: Tables
) -> ZoneAttention:
    """Return attention over whole sequences with blocks, if there are any; reach: its keys."""
    if not blocks:
        return causal
    if reach.chunk is not None:
        raise ValueError(
            f"a layer reads chunks of {reach.chunk} tokens: its blocks cannot see both ways"
        )
    return BothWaysZone(causal, blocks, tables)
