"""Tokens on their way between the even layout outside of attention and the layout of the groups; see `remap.py` above.

A rank with a surplus gives its last rows away, one with a deficit has what it got behind its own rows. In every layer
queries, keys and values come to the groups and the output leaves; in the backward the gradient of the output comes
and those of queries, keys and values leave. All tensors of one trip travel in one message per pair of ranks.
"""

from collections.abc import Sequence

import torch

from hf_flexseq.attention.local import Tensors
from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.shard import Shard

TAG = 1 << 30  # beyond those of any zone
Parcels = tuple[tuple[int, int], ...]  # (peer, rows), in the order of the rows


class TokenRemap:
    """This rank's part in the moves of one micro-batch."""

    __slots__ = ("communicator", "given", "got")

    def __init__(self, shard: Shard, communicator: Communicator) -> None:
        self.communicator, self.given, self.got = communicator, shard.given, shard.got

    def to_groups(self, tensors: Tensors) -> Tensors:
        """Each [rows of the even layout, heads, D] -> [rows of the groups, heads, D]."""
        return self._together(tensors, self.got, self.given)

    def to_even(self, tensors: Tensors) -> Tensors:
        """Each [rows of the groups, heads, D] -> [rows of the even layout, heads, D]."""
        return self._together(tensors, self.given, self.got)

    def _together(self, tensors: Tensors, leaving: Parcels, coming: Parcels) -> Tensors:
        moved = self._moved(torch.cat(tensors, dim=1), leaving, coming)
        return moved.split([x.shape[1] for x in tensors], dim=1)

    def _moved(self, x: torch.Tensor, leaving: Parcels, coming: Parcels) -> torch.Tensor:
        kept = x.shape[0] - _rows(leaving)
        parts = x[kept:].split([rows for _, rows in leaving])
        arriving = x.new_empty(_rows(coming), *x.shape[1:])
        buffers = arriving.split([rows for _, rows in coming])
        Transfers(
            self.communicator,
            sends=[(part.contiguous(), peer) for part, (peer, _) in zip(parts, leaving, strict=True)],
            recvs=[(buffer, peer) for buffer, (peer, _) in zip(buffers, coming, strict=True)],
            tag=TAG,
            label=lambda peer, sent: "tokens on their way between the groups and the even layout",
        ).wait()
        return torch.cat((x[:kept], arriving))


def _rows(parcels: Sequence[tuple[int, int]]) -> int:
    return sum(rows for _, rows in parcels)
