"""Ulysses inside a node, a zigzag ring across nodes: a composition of the two, for groups of whole
nodes.

    [my tokens, all heads]  --seq_to_head-->  [my node's tokens, my heads]  --zigzag of nodes-->
    ...  --head_to_seq-->  [my tokens, all heads]

1. The ranks of a node exchange tokens for heads over the fast link (`ulysses.py`).
2. Every rank puts the rows of its node in the order of the sequences.
3. Every rank runs the ring (`ring.py`) with one rank of each other node, the one that has the same
   index in its node and so the same heads: what crosses is one rank's share of the heads of each
   node's keys and values, in nodes - 1 steps instead of degree - 1.
4. The results go back the same way.

USP (arXiv 2405.07719) and LoongTrain (arXiv 2406.18485), with the head side inside.

The layout is that of `zigzag` over all ranks, whatever the size of a node: the chunks of a node's
ranks are two contiguous parts of a sequence, the very chunks of a zigzag over nodes. They only
have to be put in order.
"""

from collections.abc import Sequence

import torch

from hf_flexseq.attention.head_exchange import HeadExchange
from hf_flexseq.attention.ring import RingZone
from hf_flexseq.attention.turns import make_turns
from hf_flexseq.attention.types import Attention, Saved, Tensors
from hf_flexseq.attention.ulysses import Span, UlyssesZone
from hf_flexseq.attention.weave import ZoneSteps
from hf_flexseq.distributed.communicator import Channel
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan.shard import Cut, Zone, cuts, held_chunks
from hf_flexseq.schedule.attention import ChunkKey

# The part of the zone's time in which the ring computes. The exchanges of heads have the rest.
RING_SPAN = Span(0.25, 0.75)


def hybrid_zone(zone: Zone, channel: Channel, kernel: Kernel, device: torch.device) -> UlyssesZone:
    """Make this rank's part in a hybrid group; inside one node its ring has a single rank."""
    # 1. this rank's node, and its index in the node
    degree = zone.group.degree
    width = min(degree, channel.communicator.topology.ranks_per_node)
    assert degree % width == 0, f"a group of {degree} ranks is not made of whole nodes of {width}"
    node, index_in_node = divmod(zone.index, width)
    group_cuts = cuts("hybrid", zone.lengths, degree)

    # 2. the exchange among the ranks of the node
    node_start = node * width  # index in the group of the node's first rank
    chunks_by_rank = []
    tokens = []
    for index in range(node_start, node_start + width):
        chunks = _chunks_of_rank(group_cuts, index, degree)
        chunks_by_rank.append(chunks)
        tokens.append(sum(group_cuts[sequence].tokens((chunk,)) for sequence, chunk in chunks))
    first_rank = zone.group.start + node_start
    exchange = HeadExchange(channel, range(first_rank, first_rank + width), index_in_node, tokens)

    # 3. the ring among the ranks with this index in their nodes; its chunks are those of a node
    node_cuts = [Cut(bounds=cut.bounds[::width], mirrored=cut.mirrored) for cut in group_cuts]
    ring_ranks = range(zone.group.start + index_in_node, zone.group.start + degree, width)
    turns = make_turns("zigzag", node_cuts, node, ring_ranks, device)
    ring = RingZone(slice(0, sum(tokens)), turns, channel, kernel)
    ring2node = _rows_in_order(group_cuts, chunks_by_rank)

    return UlyssesZone(
        rows=slice(zone.start, zone.stop),
        exchange=exchange,
        inner=Reordered(ring2node, ring, device),
        span=RING_SPAN,
        wide=True,
    )


class Reordered:
    """An attention on rows that stand in another order outside than it wants them inside."""

    __slots__ = ("inner", "inner2outer", "outer2inner")

    def __init__(self, inner2outer: torch.Tensor, inner: Attention, device: torch.device) -> None:
        """inner2outer: [tokens] on the host, for every row inside its index outside."""
        self.inner2outer = to_device(inner2outer, device)
        self.outer2inner = to_device(inner2outer.argsort(), device)
        self.inner = inner

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """Return out [tokens, heads, head_dim]; what is saved stands in the inner order.

        q: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim].
        """
        out, saved = yield from self.inner.forward(
            q.index_select(0, self.inner2outer),
            k.index_select(0, self.inner2outer),
            v.index_select(0, self.inner2outer),
            scale,
        )
        return out.index_select(0, self.outer2inner), saved

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        inner_dout = dout.index_select(0, self.inner2outer)
        grads = yield from self.inner.backward(inner_dout, saved, scale)
        return tuple(grad.index_select(0, self.outer2inner) for grad in grads)

    def backward_of_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> ZoneSteps[Tensors]:
        """Return what `backward` does.

        q, out, dout: [tokens, heads, head_dim] and k, v: [tokens, kv_heads, head_dim] stand in the
        outer order, lse as `inner` saved it.
        """
        grads = yield from self.inner.backward_of_rows(
            q=q.index_select(0, self.inner2outer),
            k=k.index_select(0, self.inner2outer),
            v=v.index_select(0, self.inner2outer),
            out=out.index_select(0, self.inner2outer),
            dout=dout.index_select(0, self.inner2outer),
            lse=lse,
            scale=scale,
        )
        return tuple(grad.index_select(0, self.outer2inner) for grad in grads)


def _chunks_of_rank(group_cuts: Sequence[Cut], index: int, degree: int) -> list[ChunkKey]:
    """Return the chunks that the rank of `index` in the group holds, in the order of its rows."""
    chunks = []
    for sequence, cut in enumerate(group_cuts):
        for chunk in held_chunks("hybrid", index, degree, mirrored=cut.mirrored):
            chunks.append((sequence, chunk))
    return chunks


def _rows_in_order(
    group_cuts: Sequence[Cut], chunks_by_rank: Sequence[Sequence[ChunkKey]]
) -> torch.Tensor:
    """Return [tokens of the node] on the host, the rows of the node's tokens in the order of the
    sequences, first token to last.

    Rows are counted over the ranks of the node, one rank after the other. chunks_by_rank: what
    each of them holds.
    """
    rows_of_chunk = {}
    start = 0
    for chunks in chunks_by_rank:
        for sequence, chunk in chunks:
            stop = start + group_cuts[sequence].tokens((chunk,))
            rows_of_chunk[sequence, chunk] = torch.arange(start, stop)
            start = stop
    in_order = [rows_of_chunk[key] for key in sorted(rows_of_chunk)]
    return torch.cat(in_order)
