"""Groups of power-of-two degrees, as FlexSP and Megatron-LM use them, and the ranks that they get.

1. Degrees: powers of two inside a node, the node, powers of two of nodes, the world. Where nodes
   and ranks are powers of two these are all powers of two; on other worlds the node and the world
   keep every legal length plannable.
2. Room: several groups fit side by side if, for every degree d inside a node, the groups of d
   ranks and more leave enough slots of d ranks. Each of those degrees but the node's divides the
   next, so first fit by falling degree then finds room.
3. Ranks: first fit by falling degree, from rank 0 upward.

Example: two nodes of six ranks have the degrees 1, 2, 4, 6 and 12. Groups of 4, 4 and 2 ranks fit:
the groups of four take ranks 0 to 3 and 6 to 9, and the group of two takes ranks 4 and 5.

Left out: nothing is left out of the published rule where ranks are powers of two; the other
degrees are ours. The test "groups stand side by side on legal ranks" in
tests/published/test_flexsp.py tries random sets of degrees.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.base.topology import Topology
from hf_flexseq.planner.task import PlanTask


def aligned_degrees(topology: Topology) -> tuple[int, ...]:
    """Return the degrees of aligned groups, ascending."""
    widths = {stop - start for start, stop in topology.aligned_blocks()}
    return tuple(sorted(widths | {1}))


def allowed_degrees(task: PlanTask) -> tuple[int, ...]:
    """Return the aligned degrees that the strategy allows, ascending."""
    return (1,) if task.strategy == "local" else aligned_degrees(task.topology)


class Slots(NamedTuple):
    """The slots of one *unit* of ranks, for groups of as many ranks or more."""

    available: int
    """Slots of all ranks."""
    taken: dict[int, int]
    """By degree, the slots that a group takes."""


@functools.cache
def slots_of(topology: Topology) -> tuple[Slots, ...]:
    """Return the slots that have to be counted, by unit.

    Units are one rank, and the degrees inside a node that leave some ranks of the node over.
    """
    node = topology.ranks_per_node
    degrees = aligned_degrees(topology)
    found = []
    for unit in degrees:
        if unit > 1 and (unit >= node or node % unit == 0):
            continue
        taken = {}
        for degree in degrees:
            if degree >= unit:
                of_nodes = degree // node * (node // unit)
                taken[degree] = degree // unit if degree < node else of_nodes
        found.append(Slots(topology.nodes * (node // unit), taken))
    return tuple(found)


def fit_together(degrees: Sequence[int], topology: Topology) -> bool:
    """Return whether groups of these aligned degrees have room side by side."""
    for slots in slots_of(topology):
        if sum(slots.taken.get(degree, 0) for degree in degrees) > slots.available:
            return False
    return True


def rank_ranges(degrees: Sequence[int], topology: Topology) -> list[range]:
    """Return the ranks of groups that `fit_together`, from rank 0 upward by falling degree."""
    node = topology.ranks_per_node
    used = [0] * topology.nodes  # ranks of each node, always its first ones
    ranges = [range(0)] * len(degrees)
    for index in sorted(range(len(degrees)), key=lambda i: (-degrees[i], i)):
        degree = degrees[index]
        ranks_of_node = min(degree, node)
        first = None  # first node with room
        for candidate, used_ranks in enumerate(used):
            if used_ranks + ranks_of_node <= node:
                first = candidate
                break
        assert first is not None, f"groups of {sorted(degrees)} ranks do not fit {topology}"
        start = first * node + used[first]
        ranges[index] = range(start, start + degree)
        nodes = -(-degree // node)
        for taken in range(first, first + nodes):
            used[taken] += ranks_of_node
    return ranges
