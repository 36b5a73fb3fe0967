"""Ulysses inside a stage: its ranks share every chunk's tokens, and exchange them for heads around
the carry.

A rank holds its part of the chunk's row. Around attention the parts become whole again, for a
share of the heads (`program/ulysses.py`); there the chunk is worked on as on a stage of one
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

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan import Group
from hf_flexseq.plan.shard import contiguous_part, contiguous_parts
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.head_exchange import HeadExchange
from hf_flexseq.program.instructions import LayerShape, Value
from hf_flexseq.program.ulysses import UlyssesZone
from hf_flexseq.program.weave import ZoneSteps, run_zones
from hf_flexseq.program.zones import Attention, Sinks, ZoneAttention


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
    """Return this rank's part of a chunk's columns, [1, tokens], or a dummy token [1, 1]."""
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


def shared_chunk(tokens: int, inner: Sequence[ZoneAttention], sharing: Sharing) -> UlyssesZone:
    """Return the zone of this rank's part in a chunk of `tokens`. inner: zones of a rank alone."""
    sizes = [len(part) for part in contiguous_parts(tokens, len(sharing.ranks))]  # by rank
    group = Group(ranks=sharing.ranks, sequences=(0,), strategy="ulysses")
    return UlyssesZone(
        rows=slice(0, sizes[sharing.index]),
        exchange=HeadExchange(Channel(group, 0), sharing.ranks, sharing.index, sizes),
        inner=Together(inner),
    )


class Together(Attention):
    """Zones that follow each other in the rows, as one; nothing in them waits."""

    def __init__(self, zones: Sequence[ZoneAttention]) -> None:
        self.zones = tuple(zones)
        self._saved: dict[LayerShape, list[int]] = {}  # how many values each keeps, by layer

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim] of q, k and v [tokens, ...], and the backward's
        needs."""
        yield 0.0
        steps = []
        for zone in self.zones:
            # [tokens, ...] -> [tokens of the zone, ...]
            zone_q, zone_k, zone_v = (
                b.part(x, zone.rows.start, zone.rows.stop) for x in (q, k, v)
            )
            steps.append(zone.forward(b, zone_q, zone_k, zone_v, sinks))
        outs = []
        values: list[Value] = []
        counts = []
        for out, saved in run_zones(steps):
            outs.append(out)
            values += saved
            counts.append(len(saved))
        self._saved[b.shape] = counts
        # [tokens of a zone, heads, head_dim] of each -> [tokens, heads, head_dim]
        return b.join(outs), tuple(values)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        yield 0.0
        values = iter(saved)
        steps = []
        for zone, count in zip(self.zones, self._saved[b.shape], strict=True):
            own = tuple(islice(values, count))
            zone_dout = b.part(dout, zone.rows.start, zone.rows.stop)
            steps.append(zone.backward(b, zone_dout, own, sinks))
        # dq, dk and dv of every zone -> each of all zones, [tokens, ...]
        grads = []
        for parts in zip(*run_zones(steps), strict=True):
            grads.append(b.join(parts))
        return tuple(grads)
