"""The rank ranges a planner may make groups of.

* Up to eight ranks: every range that `Topology.allows`. Two of them may partly overlap; a
  micro-batch uses only one of such a pair.
* More ranks: the nodes of one binary tree. Inside a machine ranks are halved recursively (3 = 2 +
  1), machines are halved recursively above, and any two of its ranges are disjoint or nested.

Rejected: all ranges for any number of ranks. On 64 ranks other sizes than the tree's gained
nothing and cost time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import Int64Array
from hf_flexseq.topology import Topology

ALL_RANGES = 8  # ranks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """Arrays over B rank ranges; block r < W is rank r alone.

    start, stop: [B] ranks. shapes: the distinct (degree, spans nodes), ascending; the first is one
    rank alone. shape_of: [B] index into `shapes`. inside, around, crossing: [B, B], whether the
    second block lies inside the first or equals it, contains it and is larger, or partly overlaps
    it. overlap: whether any two blocks do that. ranks: the ranks of all blocks, one block after
    the other. first: [B] where each block's begin in `ranks`.
    """

    start: Int64Array
    stop: Int64Array
    shapes: tuple[tuple[int, bool], ...]
    shape_of: Int64Array
    inside: NDArray[np.bool_]
    around: NDArray[np.bool_]
    crossing: NDArray[np.bool_]
    overlap: bool
    ranks: Int64Array
    first: Int64Array

    def index(self, start: int, stop: int) -> int:
        """The block of these ranks."""
        return int(np.flatnonzero((self.start == start) & (self.stop == stop))[0])


def blocks_of(topology: Topology) -> Blocks:
    """The blocks of `topology`, narrow ones first."""
    world = topology.world_size
    if world <= ALL_RANGES:
        ranges = {
            (a, b) for a in range(world) for b in range(a + 1, world + 1) if topology.allows(a, b)
        }
    else:
        ranges = tree_ranges(topology)
    ordered = sorted(ranges, key=lambda r: (r[1] - r[0], r))
    shape = {(a, b): (b - a, topology.spans_nodes(a, b)) for a, b in ordered}
    shapes = sorted(set(shape.values()))
    start, stop = np.array(ordered, dtype=np.int64).T
    inside = (start[:, None] <= start) & (stop <= stop[:, None])
    around = inside.T & ~inside
    disjoint = (stop <= start[:, None]) | (stop[:, None] <= start)
    crossing = ~(inside | around | disjoint)
    return Blocks(
        start=start,
        stop=stop,
        shapes=tuple(shapes),
        shape_of=np.array([shapes.index(shape[block]) for block in ordered]),
        inside=inside,
        around=around,
        crossing=crossing,
        overlap=bool(crossing.any()),
        ranks=np.concatenate([np.arange(a, b) for a, b in ordered]),
        first=np.cumsum(stop - start) - (stop - start),
    )


def cuts(start: int, stop: int, topology: Topology) -> list[int]:
    """Where the block [start, stop) divides into two blocks; of two cuts that give the same two
    shapes the first."""
    if stop - start == 1:
        return []
    if topology.world_size > ALL_RANGES:
        return [_middle(start, stop, topology)]
    unit = _unit(start, stop, topology)
    return list(range(start + unit, start + (stop - start) // unit // 2 * unit + 1, unit))


def tree_ranges(topology: Topology) -> set[tuple[int, int]]:
    """(start, stop) of the binary tree's nodes: any two of them are disjoint or nested."""
    ranges: set[tuple[int, int]] = set()
    _halve(0, topology.world_size, topology, ranges)
    return ranges


def _halve(start: int, stop: int, topology: Topology, ranges: set[tuple[int, int]]) -> None:
    """Add [start, stop) and its recursive halves, the first the wider one."""
    ranges.add((start, stop))
    if stop - start > 1:
        cut = _middle(start, stop, topology)
        _halve(start, cut, topology, ranges)
        _halve(cut, stop, topology, ranges)


def _unit(start: int, stop: int, topology: Topology) -> int:
    """Parts of a block have a multiple of so many ranks."""
    return topology.ranks_per_node if topology.spans_nodes(start, stop) else 1


def _middle(start: int, stop: int, topology: Topology) -> int:
    unit = _unit(start, stop, topology)
    return start + -(-(stop - start) // unit // 2) * unit
