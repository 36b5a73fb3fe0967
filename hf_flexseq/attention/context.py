"""What attention must know of the micro-batch it works on, as one object that travels with the
call."""

import torch

from hf_flexseq.attention.allgather import AllGatherZone
from hf_flexseq.attention.deterministic import DeterministicZone
from hf_flexseq.attention.hybrid import hybrid_zone
from hf_flexseq.attention.local import LocalZone, NoZone, Tensors
from hf_flexseq.attention.remap import TokenRemap
from hf_flexseq.attention.remat import KeptAttention
from hf_flexseq.attention.ring import RingZone, Routes
from hf_flexseq.attention.turns import make_turns
from hf_flexseq.attention.ulysses import UlyssesZone, ulysses_zone
from hf_flexseq.distributed.communicator import Channel, Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan.shard import Shard, Zone, cuts
from hf_flexseq.schedule.loans import group_loans
from hf_flexseq.schedule.routing import NicFigures

ZoneAttention = NoZone | LocalZone | UlyssesZone | RingZone | AllGatherZone | DeterministicZone


class SequenceContext:
    """A rank's shard of one micro-batch, with the groups, kernel and schedules that its attention
    runs on.

    It is passed as the keyword `seq_ctx` to `model(...)` and arrives in every attention layer, in
    the forward and in the replay of a checkpointed one. Never a module-level "current" value: that
    is wrong as soon as two micro-batches are in flight. A plain class on purpose: FSDP2's input
    cast takes dataclasses, tuples and dicts apart and builds them anew at every unit.
    """

    __slots__ = ("kept", "remap", "shard", "zones")

    def __init__(
        self,
        shard: Shard,
        communicator: Communicator,
        kernel: Kernel,
        device: torch.device,
        *,
        attention_remat: bool = True,
        deterministic: bool = False,
        links: NicFigures | None = None,
    ) -> None:
        """attention_remat: whether checkpointed layers keep the result of attention, instead of
        attending again. deterministic: whether its bits are the same however sequences are shared.
        links: over which transfers between nodes may be routed, the same on all ranks; None: they
        go straight."""
        self.shard = shard
        self.kept = KeptAttention() if attention_remat else None
        moves = shard.moves if links is not None else (*shard.given, *shard.got)
        self.remap = TokenRemap(shard, communicator, links) if moves else None
        channels = [
            Channel(communicator, zone.group, number) for number, zone in enumerate(shard.zones)
        ]
        waits = max((zone.group.degree for zone in shard.zones), default=1)
        zones = tuple(
            DeterministicZone(zone, channel, kernel, device)
            if deterministic
            else _zone_attention(zone, channel, kernel, device, waits=waits, links=links)
            for zone, channel in zip(shard.zones, channels, strict=True)
        )
        self.zones = zones or (NoZone(),)

    @property
    def linear_tokens(self) -> int:
        """Tokens this rank holds in norms, MLP and head; differs from attention where the
        micro-batch is remapped."""
        return self.shard.linear_tokens

    def arriving(self, *tensors: torch.Tensor) -> Tensors:
        """Tensors of this rank's rows outside of attention, as the groups hold them."""
        return tensors if self.remap is None else self.remap.to_groups(tensors)

    def leaving(self, *tensors: torch.Tensor) -> Tensors:
        """The inverse of `arriving`."""
        return tensors if self.remap is None else self.remap.to_even(tensors)


def _zone_attention(
    zone: Zone,
    channel: Channel,
    kernel: Kernel,
    device: torch.device,
    *,
    waits: int,
    links: NicFigures | None,
) -> ZoneAttention:
    """waits: how often about the widest zone waits for transfers; a local one cuts its work into
    as many pieces."""
    rows, ranks = slice(zone.start, zone.stop), zone.group.ranks
    match zone.group.strategy:
        case "local":
            return LocalZone(rows, zone.lengths, kernel, device, pieces=waits)
        case "ulysses":
            return ulysses_zone(zone, channel, kernel, device)
        case "zigzag" | "balanced" as name:
            turns = make_turns(
                name, cuts(name, zone.lengths, len(ranks)), zone.index, ranks, device
            )
            return RingZone(rows, turns, channel, kernel, _routes(zone, channel, links))
        case "allgather":
            return AllGatherZone(zone, channel, kernel, device)
        case "hybrid":
            return hybrid_zone(zone, channel, kernel, device)
        case other:
            raise AssertionError(f"no attention for strategy {other!r}")


def _routes(zone: Zone, channel: Channel, links: NicFigures | None) -> Routes | None:
    """Those of a ring across nodes, which consists of whole ones: whoever passes something on is
    in it."""
    group = zone.group
    if links is None or not channel.communicator.topology.spans_nodes(group.start, group.stop):
        return None
    return Routes(group_loans(group, zone.lengths), group.start, links)
