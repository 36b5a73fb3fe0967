"""Ulysses inside a node, a zigzag ring across nodes: a composition of the two, for groups of whole
nodes.

    [my tokens, all heads]  --seq_to_head-->  [my node's tokens, my heads]  --zigzag of nodes-->
    ...  --head_to_seq-->  [my tokens, all heads]

1. The ranks of a node exchange tokens for heads over the fast link (`ulysses.py`).
2. Every rank puts the rows of its node in the order of the sequences.
3. Every rank runs the ring (`ring.py`) with the rank of each other node that has the same index in
   its node, and so the same heads: of each node's keys and values only one rank's share of the
   heads crosses, in nodes - 1 steps instead of degree - 1.
4. The results go back the same way.

USP (arXiv 2405.07719) and LoongTrain (arXiv 2406.18485), with the head side inside.

The layout is `zigzag`'s over all ranks, whatever a node's size: the chunks of a node's ranks are
two contiguous parts of a sequence, the very chunks of a zigzag over nodes. They only have to be
put in order.
"""

from collections.abc import Sequence

import numpy as np

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.shard import Cut, Zone, cuts
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.head_exchange import HeadExchange
from hf_flexseq.program.instructions import Value
from hf_flexseq.program.ring import ring_zone
from hf_flexseq.program.ring_steps import ZoneLayout
from hf_flexseq.program.tables import IntArray, Tables
from hf_flexseq.program.ulysses import Span, UlyssesZone
from hf_flexseq.program.weave import ZoneSteps
from hf_flexseq.program.zones import Attention, LayerRows, Machine, Sinks

# The part of the zone's time in which the ring computes. The exchanges of heads have the rest.
RING_SPAN = Span(0.25, 0.75)


def hybrid_zone(
    zone: Zone,
    channel: Channel,
    tables: Tables,
    machine: Machine,
    reach: Reach,
) -> UlyssesZone:
    """Make this rank's part in a hybrid group; inside one node its ring has a single rank.

    reach: which keys a query reads.
    """
    # 1. this rank's node, and its index in the node
    degree = zone.group.degree
    width = min(degree, machine.topology.ranks_per_node)
    assert degree % width == 0, f"a group of {degree} ranks is not made of whole nodes of {width}"
    node, index_in_node = divmod(zone.index, width)
    group_cuts = cuts("hybrid", zone.lengths, degree)

    # 2. the exchange among the ranks of the node
    node_start = node * width  # index in the group of the node's first rank
    of_node = []
    for index in range(node_start, node_start + width):
        of_node.append(ZoneLayout(group_cuts, "hybrid", index, zone.group.ranks, tables))
    tokens = [one.tokens for one in of_node]
    first_rank = zone.group.start + node_start
    exchange = HeadExchange(channel, range(first_rank, first_rank + width), index_in_node, tokens)

    # 3. the ring among the ranks with this index in their nodes; its chunks are those of a node
    node_cuts = [Cut(bounds=cut.bounds[::width], mirrored=cut.mirrored) for cut in group_cuts]
    ring_ranks = range(zone.group.start + index_in_node, zone.group.start + degree, width)
    rows = slice(0, sum(tokens))
    layout = ZoneLayout(node_cuts, "zigzag", node, ring_ranks, tables)
    across = ring_zone(rows, layout, reach, channel, machine, zone.group.trees)
    ring2node = _rows_in_order(of_node)

    return UlyssesZone(
        rows=slice(zone.start, zone.stop),
        exchange=exchange,
        inner=Reordered(ring2node, across, tables),
        span=RING_SPAN,
        wide=True,
    )


class Reordered:
    """An attention whose rows have another order outside than inside."""

    __slots__ = ("inner", "inner2outer", "outer2inner")

    def __init__(self, inner2outer: IntArray, inner: Attention, tables: Tables) -> None:
        """inner2outer: int64 [tokens], for every row inside its index outside."""
        self.inner2outer = tables.order(inner2outer)
        self.outer2inner = tables.order(np.argsort(inner2outer))
        self.inner = inner

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim]; saved values are in the inner order.

        q: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim].
        """
        inner_q, inner_k, inner_v = (b.take(x, self.inner2outer) for x in (q, k, v))
        out, saved = yield from self.inner.forward(b, inner_q, inner_k, inner_v, sinks)
        return b.take(out, self.outer2inner), saved

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        inner_dout = b.take(dout, self.inner2outer)
        grads = yield from self.inner.backward(b, inner_dout, saved, sinks)
        return tuple(b.take(grad, self.outer2inner) for grad in grads)

    def backward_of_rows(
        self, b: Builder, rows: LayerRows, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return the same gradients as `backward`. rows: in the outer order, but lse as `inner`
        saved it."""
        *outer, lse = rows
        inner_rows = LayerRows._make((*(b.take(x, self.inner2outer) for x in outer), lse))
        grads = yield from self.inner.backward_of_rows(b, inner_rows, sinks)
        return tuple(b.take(grad, self.outer2inner) for grad in grads)


def _rows_in_order(of_node: Sequence[ZoneLayout]) -> IntArray:
    """Return int64 [tokens of the node], the rows of the node's tokens in the order of the
    sequences, first token to last.

    Rows are counted over the ranks of the node, one rank after the other. of_node: the layout of
    each.
    """
    rows_of_chunk = {}
    first = 0  # row of the rank
    for layout in of_node:
        for (sequence, chunk), row in layout.starts.items():
            start = first + row
            stop = start + layout.cuts[sequence].tokens((chunk,))
            rows_of_chunk[sequence, chunk] = np.arange(start, stop)
        first += layout.tokens
    in_order = [rows_of_chunk[key] for key in sorted(rows_of_chunk)]
    return np.concatenate(in_order)
