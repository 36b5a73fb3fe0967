"""What attention must know of the micro-batch it works on, as one object that travels with the call."""

import torch

from hf_flexseq.attention.allgather import AllGatherZone
from hf_flexseq.attention.local import LocalZone
from hf_flexseq.attention.ring import RingZone
from hf_flexseq.attention.turns import make_turns
from hf_flexseq.attention.ulysses import UlyssesZone
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.shard import Shard, Zone

ZoneAttention = LocalZone | UlyssesZone | RingZone | AllGatherZone


class SequenceContext:
    """A rank's shard of one micro-batch, with the groups, kernel and schedules that its attention runs on.

    It is passed as the keyword `seq_ctx` to `model(...)` and arrives in every attention layer, in the forward and in
    the replay of a checkpointed one. Never a module-level "current" value: that is wrong as soon as two micro-batches
    are in flight. A plain class on purpose: FSDP2's input cast takes dataclasses, tuples and dicts apart and builds
    them anew at every unit.
    """

    __slots__ = ("shard", "zones")

    def __init__(self, shard: Shard, communicator: Communicator, kernel: Kernel, device: torch.device) -> None:
        self.shard = shard
        self.zones = tuple(_zone_attention(zone, communicator, kernel, device) for zone in shard.zones)

    @property
    def tokens(self) -> int:
        return self.shard.tokens


def _zone_attention(zone: Zone, communicator: Communicator, kernel: Kernel, device: torch.device) -> ZoneAttention:
    match zone.group.strategy:
        case "local":
            return LocalZone(zone, kernel, device)
        case "ulysses":
            return UlyssesZone(zone, communicator, kernel, device)
        case "zigzag" | "balanced" as name:
            turns = make_turns(name, zone.lengths, zone.index, zone.group.ranks, device)
            return RingZone(slice(zone.start, zone.stop), turns, communicator, kernel)
        case "allgather":
            return AllGatherZone(zone, communicator, kernel, device)
        case other:
            raise AssertionError(f"no attention for strategy {other!r}")
