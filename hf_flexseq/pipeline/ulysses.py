"""Ulysses inside a stage: its ranks share every chunk's tokens, and exchange them for heads around
the carry.

A rank holds its part of the chunk's row. Around attention the parts become whole again, for a
share of the heads (`attention/ulysses.py`); there the chunk is worked on as on a stage of one
rank, and the carry holds keys and values of these heads alone. Ring strategies do not fit: their
blocks are causal squares, a chunk is a rectangle over its prefix.

A rank without a part in a chunk, because that has fewer tokens than ranks, holds a dummy token
instead, which has no target and attends to itself: no gradient comes back to it, and every
exchange happens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from hf_flexseq.attention.head_exchange import HeadExchange
from hf_flexseq.attention.heads import Repeats
from hf_flexseq.attention.types import Attention, Saved, Tensors, ZoneAttention
from hf_flexseq.attention.ulysses import UlyssesZone
from hf_flexseq.attention.weave import ZoneSteps, run_zones
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.communicator import Channel, Communicator
from hf_flexseq.plan import Group
from hf_flexseq.plan.shard import contiguous_part


@dataclass(frozen=True, slots=True)
class Sharing:
    """Ranks that share every chunk of a stage."""

    communicator: Communicator

    ranks: tuple[int, ...]
    """Contiguous ranks of the world."""

    index: int
    """This rank's index among them."""

    def part(self, tokens: int) -> tuple[int, int]:
        """Return [start, stop) of the tokens that this rank holds of a row of `tokens`."""
        return contiguous_part(tokens, self.index, len(self.ranks))


def own_columns(
    columns: Mapping[str, torch.Tensor], sharing: Sharing | None
) -> dict[str, torch.Tensor]:
    """Return this rank's part of a chunk's columns: [1, tokens of the chunk] -> [1, tokens of this
    rank], or a dummy token [1, 1]."""
    if sharing is None:
        return dict(columns)
    start, stop = sharing.part(columns["input_ids"].shape[1])
    own = {}
    for name, value in columns.items():
        if start < stop:
            own[name] = value[:, start:stop]
        else:
            own[name] = value.new_full((1, 1), IGNORE_INDEX if name == "labels" else 0)
    return own


def shared_chunk(
    tokens: int, inner: Sequence[ZoneAttention], sharing: Sharing, *, repeats: Repeats, wide: bool
) -> UlyssesZone:
    """Return the zone of this rank's part in a chunk of `tokens`.

    inner: the chunk's zones as a rank alone would have them
    repeats: of KV heads, the same in all layers of the chunk
    wide: see UlyssesZone
    """
    degree = len(sharing.ranks)
    sizes = []  # tokens of every rank
    for index in range(degree):
        start, stop = contiguous_part(tokens, index, degree)
        sizes.append(stop - start)
    start, stop = sharing.part(tokens)
    zones = Together(inner)
    group = Group(ranks=sharing.ranks, sequences=(0,), strategy="ulysses")
    channel = Channel(sharing.communicator, group, 0)
    return UlyssesZone(
        rows=slice(0, stop - start),
        exchange=HeadExchange(channel, sharing.ranks, sharing.index, sizes),
        inner=zones,
        repeats=repeats,
        wide=wide,
    )


class Together(Attention):
    """Zones that follow each other in the rows, as a single one. All are of this rank alone:
    nothing in them waits."""

    __slots__ = ("_saved", "zones")

    def __init__(self, zones: Sequence[ZoneAttention]) -> None:
        self.zones = tuple(zones)
        self._saved: list[int] = []  # how many tensors each of them keeps, once forward has run

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """Return out [tokens, heads, head_dim], and what `backward` needs.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], of all zones
        """
        yield 0.0
        steps = []
        for zone in self.zones:
            # [tokens, ...] -> [tokens of the zone, ...]
            steps.append(zone.forward(q[zone.rows], k[zone.rows], v[zone.rows], scale))
        outs = []
        tensors: list[torch.Tensor] = []
        self._saved = []
        for out, saved in run_zones(steps):
            outs.append(out)
            tensors += saved.tensors
            self._saved.append(len(saved.tensors))
        # [tokens of a zone, heads, head_dim] of each -> [tokens, heads, head_dim]
        return torch.cat(outs), Saved(tuple(tensors))

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        yield 0.0
        dout = dout.contiguous()
        tensors = iter(saved.tensors)
        steps = []
        for zone, count in zip(self.zones, self._saved, strict=True):
            own = Saved(tuple(islice(tensors, count)))
            steps.append(zone.backward(dout[zone.rows], own, scale))
        # (dq, dk, dv) of every zone -> each of all zones, [tokens, ...]
        dq, dk, dv = zip(*run_zones(steps), strict=True)
        return torch.cat(dq), torch.cat(dk), torch.cat(dv)
