"""Tokens on their way between the even layout outside of attention and the layout of the groups;
see `remap.py` above.

A rank with a surplus gives its last rows away, one with a deficit has what it got behind its own
rows. In every layer queries, keys and values come to the groups and the output leaves; in the
backward the gradient of the output comes and those of queries, keys and values leave. All tensors
of one trip travel in one message per pair of ranks.
"""

import torch

from hf_flexseq.attention.local import Tensors
from hf_flexseq.distributed.communicator import Communicator, Exchange
from hf_flexseq.distributed.routing import RoutedExchange
from hf_flexseq.plan.shard import Shard
from hf_flexseq.schedule.routing import NicFigures, Routing, make_routing
from hf_flexseq.schedule.transfers import move_transfers

TAG = 1 << 30  # beyond those of any zone
Parcels = tuple[tuple[int, int], ...]  # (peer, rows), in the order of the rows


class TokenRemap:
    """This rank's part in the moves of one micro-batch."""

    __slots__ = ("_routings", "communicator", "given", "got", "links", "moves")

    def __init__(
        self, shard: Shard, communicator: Communicator, links: NicFigures | None = None
    ) -> None:
        """links: see `SequenceContext`. With any, ranks that give and get nothing may have to pass
        something on."""
        self.communicator, self.given, self.got = communicator, shard.given, shard.got
        self.moves, self.links = shard.moves, links
        self._routings: dict[tuple[int, bool], Routing] = {}

    def to_groups(self, tensors: Tensors) -> Tensors:
        """Each [rows of the even layout, heads, D] -> [rows of the groups, heads, D]."""
        return self._together(tensors, self.got, self.given, back=True)

    def to_even(self, tensors: Tensors) -> Tensors:
        """Each [rows of the groups, heads, D] -> [rows of the even layout, heads, D]."""
        return self._together(tensors, self.given, self.got, back=False)

    def _together(
        self, tensors: Tensors, leaving: Parcels, coming: Parcels, *, back: bool
    ) -> Tensors:
        x = torch.cat(tensors, dim=1)
        kept = x.shape[0] - sum(rows for _, rows in leaving)
        exchange = self._exchange(x, back)
        for part, (peer, _) in zip(
            x[kept:].split([rows for _, rows in leaving]), leaving, strict=True
        ):
            exchange.send([part], peer)
        arriving = [exchange.recv([x], rows, peer)[0] for peer, rows in coming]
        exchange.post(self.communicator, tag=TAG)
        exchange.wait()
        return torch.cat((x[:kept], *arriving)).split([y.shape[1] for y in tensors], dim=1)

    def _exchange(self, x: torch.Tensor, back: bool) -> Exchange:
        """For rows like those of x. back: from the even layout to the groups."""
        row_bytes = x.shape[1:].numel() * x.element_size()
        if self.links is not None and (row_bytes, back) not in self._routings:
            self._routings[row_bytes, back] = make_routing(
                move_transfers(self.moves, row_bytes, back=back), self.links
            )
        routing = self._routings.get((row_bytes, back), Routing())
        if not routing.paths:
            return Exchange(_label)
        return RoutedExchange(
            _label, routing, self.communicator, x.device, within=", in remapping"
        )


def _label(peer: int, sent: bool) -> str:
    return "tokens on their way between the groups and the even layout"
