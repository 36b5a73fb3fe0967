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

import torch

from hf_flexseq.attention.types import Tensors
from hf_flexseq.distributed.communicator import Communicator, Exchange
from hf_flexseq.distributed.routing import RoutedExchange
from hf_flexseq.distributed.tags import REMAP
from hf_flexseq.plan.shard import Shard
from hf_flexseq.schedule.routing import NicFigures, Routing, make_routing
from hf_flexseq.schedule.transfers import move_transfers

PeerRows = tuple[tuple[int, int], ...]  # (peer, rows), in the order of the rows


class TokenRemap:
    """This rank's part in the moves of one micro-batch."""

    __slots__ = ("_routings", "communicator", "given", "got", "links", "moves")

    def __init__(
        self, shard: Shard, communicator: Communicator, links: NicFigures | None = None
    ) -> None:
        """links: see `SequenceContext`. With any, ranks that give and get nothing may have to pass
        something on."""
        self.communicator = communicator
        self.given: PeerRows = shard.given  # rows that stand on other ranks outside of attention
        self.got: PeerRows = shard.got  # rows of other ranks that stand here outside of attention
        self.moves = shard.moves
        self.links = links
        # by bytes of a row, and whether the trip leads to attention
        self._routings: dict[tuple[int, bool], Routing] = {}

    def linear_to_attention(self, tensors: Tensors) -> Tensors:
        """Move each [linear tokens, heads, head_dim] -> [attention tokens, heads, head_dim]."""
        return self._move(tensors, to_peers=self.got, from_peers=self.given, to_attention=True)

    def attention_to_linear(self, tensors: Tensors) -> Tensors:
        """Move each [attention tokens, heads, head_dim] -> [linear tokens, heads, head_dim]."""
        return self._move(tensors, to_peers=self.given, from_peers=self.got, to_attention=False)

    def _move(
        self, tensors: Tensors, *, to_peers: PeerRows, from_peers: PeerRows, to_attention: bool
    ) -> Tensors:
        """Send the last rows of every tensor to peers, and put the rows of other peers in their
        place: [tokens before, heads, head_dim] -> [tokens after, heads, head_dim]."""
        # 1. one tensor for all: [tokens before, heads of all tensors, head_dim]
        x = torch.cat(tensors, dim=1)
        rows_to_peers = [rows for _, rows in to_peers]
        kept = x.shape[0] - sum(rows_to_peers)

        # 2. the exchange: [rows to peers, heads of all, head_dim] -> [rows from peers, ...]
        exchange = self._make_exchange(x, to_attention=to_attention)
        parts = x[kept:].split(rows_to_peers)
        for part, (peer, _) in zip(parts, to_peers, strict=True):
            exchange.send([part], peer)
        arriving = []
        for peer, rows in from_peers:
            (part,) = exchange.recv([x], rows, peer)
            arriving.append(part)
        exchange.post(self.communicator, tag=REMAP, lane=self.communicator.remapping)
        exchange.wait()

        # 3. back to one tensor each: [tokens after, heads, head_dim]
        joined = torch.cat((x[:kept], *arriving))
        return joined.split([tensor.shape[1] for tensor in tensors], dim=1)

    def _make_exchange(self, x: torch.Tensor, *, to_attention: bool) -> Exchange:
        """Make the exchange for rows like those of x [tokens, heads, head_dim]."""
        if self.links is None:
            return Exchange(_label)
        routing = self._routing(self.links, x, to_attention=to_attention)
        if not routing.paths:
            return Exchange(_label)
        return RoutedExchange(
            _label, routing, self.communicator, x.device, within=", in remapping"
        )

    def _routing(self, links: NicFigures, x: torch.Tensor, *, to_attention: bool) -> Routing:
        """Return over which ranks the rows travel: decided once for each size of a row."""
        row_bytes = x.shape[1:].numel() * x.element_size()
        key = (row_bytes, to_attention)
        if key not in self._routings:
            transfers = move_transfers(self.moves, row_bytes, back=to_attention)
            self._routings[key] = make_routing(transfers, links)
        return self._routings[key]


def _label(peer: int, sent: bool) -> str:
    return "tokens on their way between the groups and the even layout"
