"""The ranks of a job and their nodes.

Planning needs only the number of nodes and of ranks per node. Ranks are numbered node by node, as
every launcher does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hf_flexseq.base.records import Constants
from hf_flexseq.base.values import MAX_RANKS, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology(Constants):
    """Equal nodes; rank r is on node r // ranks_per_node."""

    what: ClassVar[str] = "a topology"

    nodes: int
    """Number of nodes."""
    ranks_per_node: int
    """Number of ranks per node."""

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("ranks_per_node", self.ranks_per_node)):
            whole(f"Topology: {name}", value, least=1, most=MAX_RANKS)
        if self.world_size > MAX_RANKS:
            raise ValueError(
                f"Topology of {self.nodes} x {self.ranks_per_node}: at most {MAX_RANKS:,} ranks "
                "can be planned for"
            )

    def __str__(self) -> str:
        return f"{self.nodes} x {self.ranks_per_node} ranks"

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @classmethod
    def from_world(cls, world_size: int, local_world_size: int) -> "Topology":
        """Return the topology of `world_size` ranks, `local_world_size` per node.

        Raises ValueError if the nodes would differ in size.
        """
        if local_world_size < 1 or world_size % local_world_size:
            raise ValueError(
                f"{world_size} ranks cannot be spread evenly over nodes of {local_world_size}: "
                "start the same number of processes on every node"
            )
        return cls(nodes=world_size // local_world_size, ranks_per_node=local_world_size)

    def node_of(self, rank: int) -> int:
        """Return the node of `rank`."""
        return rank // self.ranks_per_node

    def node_ranks(self) -> list[range]:
        """Return the ranks of each node."""
        per_node = self.ranks_per_node
        return [range(node * per_node, (node + 1) * per_node) for node in range(self.nodes)]

    def spans_nodes(self, start: int, stop: int) -> bool:
        """Return True if ranks [start, stop) are on more than one node."""
        return self.node_of(start) != self.node_of(stop - 1)

    def allows(self, start: int, stop: int) -> bool:
        """Return True if ranks [start, stop) may form a group: inside one node, or whole nodes."""
        if not 0 <= start < stop <= self.world_size:
            return False
        # Half of one node and half of the next would share links that no cost model prices.
        whole_nodes = start % self.ranks_per_node == 0 and stop % self.ranks_per_node == 0
        return whole_nodes or not self.spans_nodes(start, stop)

    def degrees(self) -> list[int]:
        """Return the degrees for which equal groups cover all ranks, ascending."""
        node = self.ranks_per_node
        degrees = []
        for degree in range(1, self.world_size + 1):
            inside_or_whole = node % degree == 0 or degree % node == 0
            if self.world_size % degree == 0 and inside_or_whole:
                degrees.append(degree)
        return degrees

    def aligned_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the rank ranges [start, stop) with a process group of their own, widest first.

        These are aligned powers of two from two ranks on, inside a node and then of whole nodes,
        each node and the world. There are fewer than `world_size`.
        """
        per_node = self.ranks_per_node
        # A set, since a range may be found twice: a single node is the world.
        blocks: set[tuple[int, int]] = set()
        if self.world_size > 1:
            blocks.add((0, self.world_size))
        for node in range(self.nodes):
            for start, stop in _aligned_ranges(per_node):
                blocks.add((node * per_node + start, node * per_node + stop))
        for start, stop in _aligned_ranges(self.nodes):
            blocks.add((start * per_node, stop * per_node))
        yield from sorted(blocks, key=lambda block: (block[0] - block[1], block))

    def blocks_of(self, degree: int) -> list[tuple[int, int]]:
        """Return the disjoint aligned blocks [start, stop) of `degree` ranks, possibly none."""
        blocks = []
        for start, stop in self.aligned_blocks():
            # A node of 6 ranks has blocks of 6, 4 and 2; of two nodes, the 12 stand alone.
            if stop - start == degree:
                blocks.append((start, stop))
        return blocks


def _aligned_ranges(count: int) -> Iterator[tuple[int, int]]:
    """Yield [k*w, (k+1)*w) in [0, count) for powers of two w >= 2, and [0, count) from 2 on."""
    if count >= 2:
        yield 0, count
    width = 2
    while width < count:
        for start in range(0, count - width + 1, width):
            yield start, start + width
        width *= 2
