"""The transport over NCCL, for CUDA devices: a communicator, and so a stream, for every lane.

NCCL has no tags: messages between two ranks match in the order in which they were posted on one
communicator, and a communicator carries out one post after the other. `wait` makes the current
stream wait, so the host runs ahead.

NCCL connects two ranks at their first message, which blocks both hosts, and leaves undefined what
happens if a communicator's first use is by some of its ranks alone. So every new communicator is
used once by all of its ranks, and a lane also sends a message between the pairs that plans use
again and again (`open_lane` is told them).

When a rank is lost NCCL's `wait` does not fail: the process is ended by a watchdog after the
timeout, without a word about who was lost. The CPU group, over gloo, names it.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_flexseq.distributed.gloo_cpu_group import GlooCpuGroup
from hf_flexseq.distributed.process_groups import (
    OpenGroups,
    PendingTransfers,
    ProcessGroupRanks,
    new_group,
    post_batch,
)
from hf_flexseq.distributed.transport import (
    Capabilities,
    Label,
    Lane,
    Message,
    Messages,
    Parts,
    as_tuples,
    own_part,
    unnamed,
)
from hf_flexseq.program.tags import UNTAGGED


class NcclTransport:
    """One rank's way to all others over NCCL."""

    __slots__ = (
        "_communicators",
        "_device",
        "_groups",
        "_opened",
        "_timeout",
        "cpu_group",
        "rank",
        "world_size",
    )

    capabilities = Capabilities(ordered=True, waits_on_stream=True, fast_collectives=True)
    meshes = 1  # groups in which each rank has a socket to every other one: that of the CPUs

    def __init__(self, timeout: timedelta, device: torch.device) -> None:
        """Make the CPU group. Collective over the world. device: of this rank."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.cpu_group = GlooCpuGroup(timeout)
        self._timeout = timeout
        self._device = device
        self._opened: dict[tuple[str, Parts], Lane | None] = {}
        self._communicators: dict[Lane, dist.ProcessGroup] = {}
        self._groups = OpenGroups(self._new_group, self.cpu_group)

    def open_lane(
        self, kind: str, parts: Sequence[Sequence[int]], *, peers: Sequence[int] = ()
    ) -> Lane | None:
        """See `Transport.open_lane`."""
        key = (kind, as_tuples(parts))
        if key not in self._opened:
            self._opened[key] = None
            group = self._new_group(parts)
            own = own_part(parts, self.rank)
            if group is not None and own is not None:
                lane = Lane(kind, own, len(self._opened))
                self._opened[key] = lane
                self._communicators[lane] = group
                self._connect_pairs(lane, peers)
        return self._opened[key]

    def open_group(self, parts: Sequence[Sequence[int]]) -> ProcessGroupRanks | None:
        """See `Transport.open_group`."""
        return self._groups.open(parts)

    def _new_group(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Make this rank's communicator of disjoint ones, and use it once."""
        group = new_group(parts, "nccl", self._timeout, self.cpu_group)
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return group

    def post(
        self, lane: Lane, *, sends: Messages, recvs: Messages, label: Label = unnamed
    ) -> PendingTransfers:
        """See `Transport.post`."""
        return post_batch(self._communicators[lane], sends, recvs, label)

    def _connect_pairs(self, lane: Lane, peers: Sequence[int]) -> None:
        """Send a message to each of `peers` and receive one, so that they are connected.

        Collective over the lane: if a rank connects to another one, so does that one to it.
        """
        sends = []
        recvs = []
        for peer in peers:
            sends.append(Message(torch.zeros(1, device=self._device), peer, UNTAGGED))
            recvs.append(Message(torch.zeros(1, device=self._device), peer, UNTAGGED))
        if peers:
            self.post(lane, sends=sends, recvs=recvs).wait()
