"""Ulysses inside a node, a zigzag ring across nodes: a composition of the two, for groups of whole
nodes.

    [my tokens, all heads]  --seq_to_head-->  [my node's tokens, my heads]  --zigzag of nodes-->
    ...  --head_to_seq-->

The ranks of a node exchange tokens for heads over the fast link. Then every rank runs the ring
with the ranks that have its place in the other nodes: what crosses is one rank's share of the
heads of each node's keys and values, in nodes - 1 steps instead of degree - 1 (USP, arXiv
2405.07719; LoongTrain, arXiv 2406.18485, with the head side inside).

The layout is that of `zigzag` over all ranks, whatever the size of a node: the chunks of a node's
ranks are two contiguous pieces of a sequence, the very chunks of a zigzag over nodes. They only
have to be put in order.
"""

from collections.abc import Sequence

import torch

from hf_flexseq.attention.local import Tensors
from hf_flexseq.attention.ring import RingZone
from hf_flexseq.attention.turns import make_turns
from hf_flexseq.attention.ulysses import HeadAttention, Span, UlyssesZone
from hf_flexseq.attention.weave import ZoneSteps
from hf_flexseq.distributed.communicator import Channel
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan.shard import Cut, Zone, cuts, held_chunks


def hybrid_zone(zone: Zone, channel: Channel, kernel: Kernel, device: torch.device) -> UlyssesZone:
    """This rank's part in a hybrid group. A group inside one node has no ring, only Ulysses."""
    group_cuts, start, degree = (
        cuts("hybrid", zone.lengths, zone.group.degree),
        zone.group.start,
        zone.group.degree,
    )
    width = min(degree, channel.communicator.topology.ranks_per_node)
    assert degree % width == 0, f"a group of {degree} ranks is not made of whole nodes of {width}"
    node, place = divmod(zone.index, width)
    rows = slice(zone.start, zone.stop)
    node_cuts = [Cut(bounds=cut.bounds[::width], mirrored=cut.mirrored) for cut in group_cuts]
    turns = make_turns(
        "zigzag", node_cuts, node, range(start + place, start + degree, width), device
    )
    members = range(node * width, (node + 1) * width)
    held = [_pieces(group_cuts, member, degree) for member in members]
    tokens = [sum(group_cuts[p].tokens((chunk,)) for p, chunk in pieces) for pieces in held]
    inner = Reordered(_in_order(group_cuts, held, device), RingZone(rows, turns, channel, kernel))
    ring = Span(0.25, 0.75)  # of the zone's time
    return UlyssesZone(
        rows,
        tokens,
        place,
        range(start + members[0], start + members[-1] + 1),
        channel,
        inner,
        span=ring,
        wide=True,
    )


class Reordered:
    """Attention on rows that stand in another order. order: which row comes first, second, and so
    on."""

    __slots__ = ("back", "inner", "order")

    def __init__(self, order: torch.Tensor, inner: HeadAttention) -> None:
        self.order, self.back, self.inner = order, order.argsort(), inner

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Tensors]]:
        q, k, v = (x.index_select(0, self.order) for x in (q, k, v))
        out, saved = yield from self.inner.forward(q, k, v, scale)
        return out.index_select(0, self.back), saved

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> ZoneSteps[Tensors]:
        grads = yield from self.inner.backward(dout.index_select(0, self.order), saved, scale)
        return tuple(x.index_select(0, self.back) for x in grads)

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> ZoneSteps[Tensors]:  # type: ignore[no-untyped-def]
        """`backward` from these rows and the last of what `forward` left, which is in the inner
        order."""
        q, k, v, out, dout = (x.index_select(0, self.order) for x in (q, k, v, out, dout))
        grads = yield from self.inner.backward_of_rows(q, k, v, out, dout, lse, scale)
        return tuple(x.index_select(0, self.back) for x in grads)


def _pieces(group_cuts: Sequence[Cut], index: int, degree: int) -> list[tuple[int, int]]:
    """(sequence, chunk) that the rank of `index` holds, in the order of its rows."""
    return [
        (place, chunk)
        for place, cut in enumerate(group_cuts)
        for chunk in held_chunks("hybrid", index, degree, mirrored=cut.mirrored)
    ]


def _in_order(
    group_cuts: Sequence[Cut], held: Sequence[Sequence[tuple[int, int]]], device: torch.device
) -> torch.Tensor:
    """Where, in the rows of a node's ranks one after the other, each sequence's tokens stand,
    first to last."""
    rows, start = {}, 0
    for piece in (piece for pieces in held for piece in pieces):
        tokens = group_cuts[piece[0]].tokens((piece[1],))
        rows[piece] = torch.arange(start, start + tokens)
        start += tokens
    return torch.cat([rows[piece] for piece in sorted(rows)]).to(device)
