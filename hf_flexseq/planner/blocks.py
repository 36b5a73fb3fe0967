"""The rank ranges a planner may make groups of: the nodes of one binary tree.

Inside a machine ranks are halved recursively (3 = 2 + 1), machines are halved recursively above,
and any two of its ranges are disjoint or nested.

Rejected: all ranges. On 64 ranks other sizes than the tree's gained nothing and cost time, and on
up to eight ranks, where two of them could partly overlap, plans were as fast to 0.1 %.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, Int64Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blocks:
    """Arrays over B rank ranges, narrow ones first; block r < W is rank r alone."""

    start: Int64Array
    """[B] First rank."""
    stop: Int64Array
    """[B] First rank after the block."""
    shapes: tuple[tuple[int, bool], ...]
    """Distinct (degree, spans nodes), ascending; the first is one rank alone."""
    shape_of: Int64Array
    """[B] Index in `shapes`."""
    inside: NDArray[np.bool_]
    """[B, B] Whether the second block lies inside the first or equals it."""
    around: NDArray[np.bool_]
    """[B, B] Whether the second block contains the first and is larger."""


def blocks_of(topology: Topology) -> Blocks:
    """Return the blocks of `topology`."""
    ordered = sorted(tree_ranges(topology), key=lambda block: (block[1] - block[0], block))
    # 1. shapes
    block_shapes = [_shape(block, topology) for block in ordered]
    shapes = sorted(set(block_shapes))
    # 2. how any two blocks lie to each other, [B, B] each
    start, stop = np.array(ordered, dtype=np.int64).T.copy()  # [B] each
    inside = (start[:, None] <= start) & (stop <= stop[:, None])
    around = inside.T.copy()
    np.fill_diagonal(around, False)  # no two blocks are equal
    return Blocks(
        start=start,
        stop=stop,
        shapes=tuple(shapes),
        shape_of=np.array([shapes.index(shape) for shape in block_shapes]),
        inside=inside,
        around=around,
    )


def shapes_of_ranges(topology: Topology) -> set[tuple[int, bool]]:
    """Return the (degree, spans nodes) of all blocks of `topology`."""
    return {_shape(block, topology) for block in tree_ranges(topology)}


def _shape(block: tuple[int, int], topology: Topology) -> tuple[int, bool]:
    """Return the degree of a block (start, stop), and whether it spans nodes."""
    start, stop = block
    return stop - start, topology.spans_nodes(start, stop)


def tree_ranges(topology: Topology) -> set[tuple[int, int]]:
    """Return (start, stop) of the binary tree's nodes: any two of them are disjoint or nested."""
    ranges: set[tuple[int, int]] = set()
    _halve(0, topology.world_size, topology, ranges)
    return ranges


def exchange_degrees(
    cost: CostModel, topology: Topology, *, strategy: str, sp_degree: int | None
) -> list[int]:
    """Return the numbers of ranks, ascending, that may exchange heads for tokens among each other.

    These are the sizes of aligned blocks (`Topology.aligned_blocks`) over which a strategy may
    spread heads, up to the number of heads: in wider blocks some ranks would have none. strategy:
    as in `CostModel.strategies`. sp_degree: the one degree of all groups; None for any.
    """
    strategies = cost.strategies(strategy)
    widest = topology.world_size if cost.heads is None else cost.heads
    degrees = set()
    for start, stop in topology.aligned_blocks():
        degree = stop - start
        # A hybrid exchanges heads inside nodes alone.
        by_ulysses = "ulysses" in strategies and sp_degree in (None, degree)
        by_hybrid = "hybrid" in strategies and degree <= topology.ranks_per_node
        if degree <= widest and (by_ulysses or by_hybrid):
            degrees.add(degree)
    return sorted(degrees)


def _halve(start: int, stop: int, topology: Topology, ranges: set[tuple[int, int]]) -> None:
    """Add [start, stop) and its recursive halves to `ranges`; the first half is the wider one."""
    ranges.add((start, stop))
    if stop - start > 1:
        unit = topology.ranks_per_node if topology.spans_nodes(start, stop) else 1
        units = (stop - start) // unit
        cut = start + -(-units // 2) * unit
        _halve(start, cut, topology, ranges)
        _halve(cut, stop, topology, ranges)
