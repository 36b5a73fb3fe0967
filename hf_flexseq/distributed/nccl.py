"""The transport over NCCL, for CUDA devices: a communicator, and so a stream, for every lane.

NCCL has no tags: messages between two ranks match in the order in which they were posted on one
communicator, and a communicator carries out one post after the other. `wait` makes the current
stream wait, so the host runs ahead.

NCCL connects two ranks at their first message, which blocks both hosts, and leaves undefined what
happens if a communicator's first use is by some of its ranks alone. So every new communicator is
used once by all of its ranks, a group for exchanges by an all-to-all, and a lane also sends a
message between the pairs that plans use again and again (`open_lane` is told them).

Streams have a high priority, as FSDP2's have: a kernel of attention that is launched behind a post
would otherwise take all multiprocessors, and the transfer begin with its last wave. Thread blocks
of transfers come one by one (`cga_cluster_size`) to fit into the remaining multiprocessors.

When a rank is lost NCCL's `wait` does not fail: a watchdog ends the process after the timeout and
does not say which rank was lost. The CPU group, over gloo, names it.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_flexseq.distributed.process_groups import (
    PendingTransfers,
    ProcessGroupRanks,
    ProcessGroupTransport,
)
from hf_flexseq.distributed.transport import (
    Capabilities,
    Label,
    Lane,
    Message,
    Messages,
    Parts,
    as_tuples,
    failure,
    own_part,
    unnamed,
)
from hf_flexseq.program.tags import UNTAGGED


class NcclTransport(ProcessGroupTransport):
    """One rank's way to all others over NCCL."""

    backend = "nccl"
    capabilities = Capabilities(ordered=True, fast_collectives=True)
    meshes = 1  # groups in which each rank has a socket to every other one: that of the CPUs

    def __init__(self, timeout: timedelta, device: torch.device) -> None:
        """Make the CPU group. Collective over the world. device: of this rank."""
        super().__init__(timeout)
        self._device = device
        self._opened: dict[tuple[str, Parts], Lane | None] = {}
        self._communicators: dict[Lane, dist.ProcessGroup] = {}
        self._used: set[tuple[Parts, bool]] = set()  # groups, and whether they exchange

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
                self._use(group)
                self._connect_pairs(lane, peers)
        return self._opened[key]

    def open_group(
        self, parts: Sequence[Sequence[int]], *, exchanges: bool = False
    ) -> ProcessGroupRanks | None:
        """See `Transport.open_group`."""
        group = super().open_group(parts)
        if group is not None and (as_tuples(parts), exchanges) not in self._used:
            self._used.add((as_tuples(parts), exchanges))
            self._use(group.process_group, exchanged=len(group.ranks) if exchanges else 0)
        return group

    def _options(self) -> object:
        """Return options for one communicator, which torch writes to."""
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.cga_cluster_size = 1
        options._timeout = self._timeout
        return options

    def _use(self, group: dist.ProcessGroup, *, exchanged: int = 0) -> None:
        """Use a communicator by all of its ranks. exchanged: their number, to connect them all."""
        sent = torch.zeros(exchanged or 1, device=self._device)
        if exchanged:
            dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
        else:
            dist.all_reduce(sent, group=group)

    def post(
        self, lane: Lane, *, sends: Messages, recvs: Messages, label: Label = unnamed
    ) -> PendingTransfers:
        """See `Transport.post`. A single message is batched, too: unbatched ones make NCCL connect
        a communicator of their own."""
        group = self._communicators[lane]
        ops = []
        for message in recvs:
            ops.append(dist.P2POp(dist.irecv, message.tensor, message.peer, group, message.tag))
        for message in sends:
            ops.append(dist.P2POp(dist.isend, message.tensor, message.peer, group, message.tag))
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:  # a peer is known to be gone
            raise failure(self.rank, sends, recvs, label, error) from error
        return PendingTransfers(works, sends, recvs, label)

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
