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

from collections.abc import Iterable, Sequence

from hf_flexseq.base.topology import Topology
from hf_flexseq.planner.task import PlanTask


def aligned_degrees(topology: Topology) -> tuple[int, ...]:
    """Return the degrees of aligned groups, ascending."""
    widths = {stop - start for start, stop in topology.aligned_blocks()}
    return tuple(sorted(widths | {1}))


def allowed_degrees(task: PlanTask) -> tuple[int, ...]:
    """Return the aligned degrees that the strategy allows, ascending."""
    return (1,) if task.strategy == "local" else aligned_degrees(task.topology)


def slots(topology: Topology, degree: int, unit: int) -> int:
    """Return the slots of `unit` ranks, at most a node, that `degree` ranks take."""
    node = topology.ranks_per_node
    if degree < node:
        return degree // unit
    nodes = degree // node
    return nodes * (node // unit)


def units(topology: Topology) -> list[int]:
    """Return the degrees whose slots have to be counted, ascending.

    One rank, and the degrees inside a node that leave some ranks of the node over.
    """
    node = topology.ranks_per_node
    counted = []
    for degree in aligned_degrees(topology):
        leaves_ranks_over = degree < node and node % degree != 0
        if degree == 1 or leaves_ranks_over:
            counted.append(degree)
    return counted


def fit_together(degrees: Iterable[int], topology: Topology) -> bool:
    """Return whether groups of these aligned degrees have room side by side."""
    wanted = list(degrees)
    for unit in units(topology):
        taken = sum(slots(topology, degree, unit) for degree in wanted if degree >= unit)
        slots_of_node = topology.ranks_per_node // unit
        if taken > topology.nodes * slots_of_node:
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
