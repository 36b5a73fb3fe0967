"""What attention must know of the micro-batch it works on, as one object that travels with the
call."""

import torch

from hf_flexseq.attention.allgather import AllGatherZone
from hf_flexseq.attention.deterministic import DeterministicZone
from hf_flexseq.attention.hybrid import hybrid_zone
from hf_flexseq.attention.local import LocalZone
from hf_flexseq.attention.remap import TokenRemap
from hf_flexseq.attention.remat import KeptAttention
from hf_flexseq.attention.ring import RingZone, Routes
from hf_flexseq.attention.turns import make_turns
from hf_flexseq.attention.types import NoZone, Tensors, ZoneAttention
from hf_flexseq.attention.ulysses import ulysses_zone
from hf_flexseq.distributed.communicator import Channel, Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan.shard import Shard, Zone, cuts
from hf_flexseq.schedule.routing import NicFigures


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
        """Make the zones of this rank; no communication.

        attention_remat: whether checkpointed layers keep the result of attention, instead of
        attending again. deterministic: whether the bits of the result are the same however
        sequences are shared. links: over which transfers between nodes may be routed, the same on
        all ranks; with None all of them go straight.
        """
        self.shard = shard
        self.kept = KeptAttention() if attention_remat else None

        # 1. the way between the layouts of linear layers and of attention
        self.remap = None
        if _takes_part_in_remap(shard, links):
            self.remap = TokenRemap(shard, communicator, links)

        # 2. the attention of every group, widest first, as the plan has them
        # The widest zone waits for a transfer about this often: once for every rank of its group.
        waits = max((zone.group.degree for zone in shard.zones), default=1)
        zones: list[ZoneAttention] = []
        for number, zone in enumerate(shard.zones):
            channel = Channel(communicator, zone.group, number)
            if deterministic:
                zones.append(DeterministicZone(zone, channel, kernel, device))
            else:
                zones.append(
                    _zone_attention(zone, channel, kernel, device, waits=waits, links=links)
                )
        self.zones: tuple[ZoneAttention, ...] = tuple(zones) or (NoZone(),)

    @property
    def linear_tokens(self) -> int:
        """Tokens this rank holds in norms, MLP and head; differs from attention where the
        micro-batch is remapped."""
        return self.shard.linear_tokens

    def linear_to_attention(self, *tensors: torch.Tensor) -> Tensors:
        """Move each [linear tokens, heads, head_dim] -> [attention tokens, heads, head_dim]."""
        if self.remap is None:
            return tensors
        return self.remap.linear_to_attention(tensors)

    def attention_to_linear(self, *tensors: torch.Tensor) -> Tensors:
        """Move each [attention tokens, heads, head_dim] -> [linear tokens, heads, head_dim]."""
        if self.remap is None:
            return tensors
        return self.remap.attention_to_linear(tensors)


def _takes_part_in_remap(shard: Shard, links: NicFigures | None) -> bool:
    """Return True where this rank moves tokens in remapping, its own or routed ones of others."""
    if links is not None:
        return bool(shard.moves)
    return bool(shard.given or shard.got)


def _zone_attention(
    zone: Zone,
    channel: Channel,
    kernel: Kernel,
    device: torch.device,
    *,
    waits: int,
    links: NicFigures | None,
) -> ZoneAttention:
    """Make the attention of a zone by its group's strategy.

    waits: how often about the widest zone of this rank waits for transfers; a local zone cuts its
    work into as many runs.
    """
    rows = slice(zone.start, zone.stop)
    ranks = zone.group.ranks
    match zone.group.strategy:
        case "local":
            return LocalZone(rows, zone.lengths, kernel, device, most_runs=waits)
        case "ulysses":
            return ulysses_zone(zone, channel, kernel, device)
        case "zigzag" | "balanced" as strategy:
            group_cuts = cuts(strategy, zone.lengths, len(ranks))
            turns = make_turns(strategy, group_cuts, zone.index, ranks, device)
            return RingZone(rows, turns, channel, kernel, _routes(zone, channel, links))
        case "allgather":
            return AllGatherZone(zone, channel, kernel, device)
        case "hybrid":
            return hybrid_zone(zone, channel, kernel, device)
        case other:
            raise AssertionError(f"no attention for strategy {other!r}")


def _routes(zone: Zone, channel: Channel, links: NicFigures | None) -> Routes | None:
    """Return the routes of a ring across nodes; None where every transfer goes straight.

    A group across nodes consists of whole nodes, so any rank that passes something on is in it.
    """
    group = zone.group
    if links is None:
        return None
    if not channel.communicator.topology.spans_nodes(group.start, group.stop):
        return None
    return Routes(group, zone.lengths, links, rank=channel.communicator.rank)
