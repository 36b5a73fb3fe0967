"""The ranks of a job as attention sees them: who is near, and how messages reach them.

Below is a transport (`transport.py`), which moves tensors and knows nothing of plans. A
`Communicator` knows this rank, the topology, and the lanes that messages take.

Groups of any shape move their bytes by messages, so a plan never needs a new communicator: making
one in a step can hang a job. Messages take one of two lanes, opened at the start:

    inside nodes     between ranks of a node
    between nodes    between ranks of different nodes, which would hold up those inside

Where a collective is faster than many messages, each aligned block of the topology has a group
(`open_blocks`), made at the start, too, for the degrees that plans may use.
"""

from collections.abc import Iterable, Sequence

import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.connect import connect
from hf_flexseq.distributed.hosts import topology_of
from hf_flexseq.distributed.transport import CpuGroup, Lane, RankGroup, Transport


class Communicator:
    """This rank of the job, and its ways to the others."""

    def __init__(
        self, topology: Topology | None = None, *, transport: Transport | None = None
    ) -> None:
        """Open the lanes. Collective over the world.

        topology: nodes and ranks; None finds them out.
        transport: between the ranks; None takes this process's.
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
