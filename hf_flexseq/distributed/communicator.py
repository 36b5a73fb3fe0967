"""The ranks of a job as attention sees them: who is near, and how messages reach them.

Below is a transport (`transport.py`), which moves tensors and knows nothing of plans. This module
has the operations that plans need:

    Communicator    this rank, the topology, and the lanes that messages take
    Transfers       some sends and receives, posted at once and waited for once

Groups of any shape move their bytes by messages, so a plan never needs a new communicator: making
one in a step can hang a job. Messages take one of two lanes, opened at the start:

    inside nodes     between ranks of a node
    between nodes    between ranks of different nodes, which would hold up those inside

Where a collective is faster than many messages, each aligned block of the topology has a group
(`open_blocks`), made at the start, too, for the degrees that plans may use.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.connect import connect
from hf_flexseq.distributed.hosts import topology_of
from hf_flexseq.distributed.transport import (
    CpuGroup,
    Label,
    Lane,
    Message,
    Pending,
    RankGroup,
    Transport,
    unnamed,
)
from hf_flexseq.program.tags import UNTAGGED

# ---- the ranks of a job


class Communicator:
    """This rank of the job, and its ways to the others."""

    __slots__ = ("blocks", "lanes", "rank", "topology", "transport")

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        transport: Transport | None = None,
        use_blocks: bool = False,
    ) -> None:
        """Open the lanes. Collective over the world.

        topology: nodes and ranks; None finds them out.
        transport: between the ranks; None takes this process's.
        use_blocks: whether to make a group for every aligned block at once.
        Raises ValueError when `topology` does not have as many ranks as the job.
        """
        self.transport = transport or connect()
        self.rank = self.transport.rank
        world_size = self.transport.world_size
        self.topology = topology or topology_of(self.transport)
        if self.topology.world_size != world_size:
            raise ValueError(
                f"the topology has {self.topology.world_size} ranks, the job {world_size}"
            )
        everyone = [range(world_size)]
        mates, counterparts = _usual_peers(self.rank, self.topology)
        # Lanes of attention, near peers first: all ranks post in this order.
        if self.transport.capabilities.ordered:
            nodes = self.topology.node_ranks()
            self.lanes = [self._open_lane("inside nodes", nodes, mates)]
            if self.topology.nodes > 1:
                self.lanes.append(self._open_lane("between nodes", everyone, counterparts))
        else:
            # Posts are independent: messages to near and far peers go in one post.
            self.lanes = [self._open_lane("between ranks", everyone, mates + counterparts)]
        self.blocks: dict[tuple[int, int], RankGroup] = {}  # by [start, stop) of ranks
        if use_blocks:
            self.open_blocks(range(2, world_size + 1))

    def _open_lane(self, kind: str, parts: Sequence[Sequence[int]], peers: Sequence[int]) -> Lane:
        """Open lanes of disjoint sets that hold all ranks, and return this rank's. Collective."""
        lane = self.transport.open_lane(kind, parts, peers=peers)
        assert lane is not None, f"rank {self.rank} has no lane {kind}"
        return lane

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.topology.world_size

    @property
    def cpu_group(self) -> CpuGroup:
        """Exchanges of values on the CPU."""
        return self.transport.cpu_group

    def open_blocks(self, degrees: Iterable[int]) -> None:
        """Make a group for the aligned blocks of these degrees. Collective over the world.

        Each degree takes one step, whatever the number of its blocks.
        """
        for degree in sorted(set(degrees)):
            blocks = self.topology.blocks_of(degree)
            if not blocks:
                continue
            parts = [range(start, stop) for start, stop in blocks]
            group = self.transport.open_group(parts, exchanges=True)
            if group is not None:
                self.blocks[group.ranks[0], group.ranks[-1] + 1] = group

    def open_fast_blocks(self, degrees: Iterable[int]) -> None:
        """Make the groups of `open_blocks` if collectives are faster than messages. Collective."""
        if self.transport.capabilities.fast_collectives:
            self.open_blocks(degrees)

    def open_world(self) -> RankGroup | None:
        """Return the group of all ranks, None for one rank. Collective over the world at first."""
        return self.transport.open_group([range(self.world_size)])

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor of any shape by its sum over all ranks. Collective over the world."""
        everyone = self.open_world()
        if everyone is not None:
            everyone.all_reduce(tensor)

    def lane(self, peer: int) -> Lane:
        """Return the lane of messages between this rank and `peer` in attention."""
        if self.topology.node_of(peer) == self.topology.node_of(self.rank):
            return self.lanes[0]
        return self.lanes[-1]


def _usual_peers(rank: int, topology: Topology) -> tuple[list[int], list[int]]:
    """Return the usual peers in plans: the other ranks of the node, and its counterparts."""
    mates = []
    counterparts = []
    for other in range(topology.world_size):
        if other == rank:
            continue
        if topology.node_of(other) == topology.node_of(rank):
            mates.append(other)
        elif (other - rank) % topology.ranks_per_node == 0:
            counterparts.append(other)
    return mates, counterparts


# ---- transfers


class Transfers:
    """Messages that are posted together; `wait` ends them, exactly once."""

    __slots__ = ("_pending",)

    def __init__(
        self,
        communicator: Communicator,
        *,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
        tag: int = UNTAGGED,
        label: Label = unnamed,
    ) -> None:
        """Post contiguous tensors to and from global ranks, each a (tensor, peer).

        Nothing is posted for a tensor without elements, which both sides know. Both sides must
        list several tensors for one peer in the same order; they take the tags from `tag` on.
        """
        # 1. the messages of each lane
        sends_by_lane: dict[Lane, list[Message]] = {}
        recvs_by_lane: dict[Lane, list[Message]] = {}
        for tensor, peer, own_tag in _tagged(sends, tag):
            message = Message(tensor, peer, own_tag)
            sends_by_lane.setdefault(communicator.lane(peer), []).append(message)
        for tensor, peer, own_tag in _tagged(recvs, tag):
            message = Message(tensor, peer, own_tag)
            recvs_by_lane.setdefault(communicator.lane(peer), []).append(message)

        # 2. one post for each; all ranks take the lanes in one order
        self._pending: list[Pending] | None = []  # None once waited for
        for lane in communicator.lanes:
            lane_sends = sends_by_lane.get(lane, [])
            lane_recvs = recvs_by_lane.get(lane, [])
            if lane_sends or lane_recvs:
                pending = communicator.transport.post(
                    lane, sends=lane_sends, recvs=lane_recvs, label=label
                )
                self._pending.append(pending)

    def wait(self) -> None:
        """Wait until every tensor has been sent or received.

        Raises RuntimeError naming peer and message when a transfer fails or takes too long.
        """
        assert self._pending is not None, "these transfers were already waited for"
        for pending in self._pending:
            pending.wait()
        self._pending = None


def _tagged(
    transfers: Sequence[tuple[torch.Tensor, int]], tag: int
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield (tensor, peer, tag) for each tensor that has elements.

    The first tensor for a peer has `tag`, the next one for the same peer `tag` + 1, and so on.
    """
    before: Counter[int] = Counter()  # tensors so far, by peer
    for tensor, peer in transfers:
        if tensor.numel():
            yield tensor, peer, tag + before[peer]
            before[peer] += 1
