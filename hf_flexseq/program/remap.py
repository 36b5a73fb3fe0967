"""Tokens on their way between the even layout outside of attention and the layout of the groups;
`planner/remap.py` decides where, and `plan/remap.py` which tokens move.

A rank with a surplus in attention gives its last rows away outside of attention; one with a
deficit has the rows that it is given behind its own. In every layer

    forward     queries, keys and values    linear_to_attention
                the output                  attention_to_linear
    backward    the output's gradient       linear_to_attention
                those of q, k and v         attention_to_linear

All tensors of one trip travel in one message per pair of ranks. Over links to other nodes the
messages may be routed over several ranks' NICs (`schedule/routing.py`).
"""

from hf_flexseq.plan.shard import Shard
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import STRAIGHT, Exchange, Label, post
from hf_flexseq.program.instructions import Value
from hf_flexseq.program.tags import REMAP
from hf_flexseq.schedule.routing import NicFigures, make_routing
from hf_flexseq.schedule.transfers import move_transfers

PeerRows = tuple[tuple[int, int], ...]  # (peer, rows), in the order of the rows


class TokenRemap:
    """This rank's part in the moves of one micro-batch."""

    __slots__ = ("given", "got", "links", "moves")

    def __init__(self, shard: Shard, links: NicFigures | None = None) -> None:
        """links: over which messages may be routed. With any, ranks that give and get nothing may
        have to pass something on."""
        self.given: PeerRows = shard.given  # rows that stand on other ranks outside of attention
        self.got: PeerRows = shard.got  # rows of other ranks that stand here outside of attention
        self.moves = shard.moves
        self.links = links

    def linear_to_attention(self, b: Builder, values: Values) -> Values:
        """Move each [linear tokens, heads, head_dim] -> [attention tokens, heads, head_dim]."""
        return self._move(b, values, to_peers=self.got, from_peers=self.given, to_attention=True)

    def attention_to_linear(self, b: Builder, values: Values) -> Values:
        """Move each [attention tokens, heads, head_dim] -> [linear tokens, heads, head_dim]."""
        return self._move(b, values, to_peers=self.given, from_peers=self.got, to_attention=False)

    def _move(
        self,
        b: Builder,
        values: Values,
        *,
        to_peers: PeerRows,
        from_peers: PeerRows,
        to_attention: bool,
    ) -> Values:
        """Send the last rows of every value to peers, and put the rows of other peers in their
        place: [tokens before, heads, head_dim] -> [tokens after, heads, head_dim]."""
        # 1. one value for all: [tokens before, heads of all values, head_dim]
        x = b.join(values, dim=1)
        kept = x.rows - sum(rows for _, rows in to_peers)

        # 2. the exchange: [rows to peers, heads of all, head_dim] -> [rows from peers, ...]
        exchange = self._exchange(b, x, to_attention=to_attention)
        start = kept
        for peer, rows in to_peers:
            exchange.send([b.part(x, start, start + rows)], peer)
            start += rows
        arriving = []
        for peer, rows in from_peers:
            (part,) = exchange.recv([x], rows, peer)
            arriving.append(part)
        post(b, [exchange])
        exchange.wait()

        # 3. back to one value each: [tokens after, heads, head_dim]
        joined = b.join([b.part(x, 0, kept), *arriving])
        return b.split_heads(joined, [value.shape[1] for value in values])

    def _exchange(self, b: Builder, x: Value, *, to_attention: bool) -> Exchange:
        """Make the exchange for rows like those of x [tokens, heads, head_dim]."""
        routing = STRAIGHT
        if self.links is not None:
            (row_bytes,) = b.row_bytes((x,))
            transfers = move_transfers(self.moves, row_bytes, back=to_attention)
            routing = make_routing(transfers, self.links)
        label = Label(None, _describe)
        return Exchange(b, REMAP, label, routing=routing, within=", in remapping", remaps=True)


def _describe(peer: int, sent: bool) -> str:
    return "tokens on their way between the groups and the even layout"
