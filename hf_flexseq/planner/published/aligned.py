"""Groups of power-of-two degrees, as FlexSP and Megatron-LM use them, and the ranks they stand on.

* Degrees: powers of two inside a node, the node, powers of two of nodes, the world. On powers of
  two these are all of them; on other worlds the node and the world keep every legal length
  plannable.
* Several groups fit side by side if for every degree d inside a node the groups from d upward
  leave enough slots of d ranks: each of those degrees but the node's divides the next, so first
  fit by falling degree then finds room.
"""

from collections.abc import Iterable, Sequence

from hf_flexseq.topology import Topology


def aligned_degrees(topology: Topology) -> tuple[int, ...]:
    """The degrees of aligned groups, ascending."""
    widths = {stop - start for start, stop in topology.aligned_blocks()}
    return tuple(sorted(widths | {1}))


def slots(topology: Topology, degree: int, unit: int) -> int:
    """How many groups of `unit` ranks a group of `degree` ranks keeps out; unit is at most a node,
    and degree."""
    node = topology.ranks_per_node
    return degree // unit if degree < node else degree // node * (node // unit)


def units(topology: Topology) -> list[int]:
    """The degrees whose slots have to be counted: one rank, and those that leave a rest of a
    node."""
    node = topology.ranks_per_node
    return [d for d in aligned_degrees(topology) if d == 1 or (d < node and node % d)]


def fit_together(degrees: Iterable[int], topology: Topology) -> bool:
    """Whether groups of these aligned degrees have room side by side."""
    node, wanted = topology.ranks_per_node, list(degrees)
    return all(
        sum(slots(topology, d, unit) for d in wanted if d >= unit)
        <= topology.nodes * (node // unit)
        for unit in units(topology)
    )


def rank_ranges(degrees: Sequence[int], topology: Topology) -> list[range]:
    """The ranks of each group, cut from rank 0 upward by falling degree. The groups must
    `fit_together`."""
    node = topology.ranks_per_node
    used = [0] * topology.nodes
    ranges = [range(0)] * len(degrees)
    for index in sorted(range(len(degrees)), key=lambda i: (-degrees[i], i)):
        taken = min(degrees[index], node)
        first = next((n for n, there in enumerate(used) if there + taken <= node), None)
        assert first is not None, f"groups of {sorted(degrees)} ranks do not fit {topology}"
        start = first * node + used[first]
        ranges[index] = range(start, start + degrees[index])
        for n in range(first, first + -(-degrees[index] // node)):
            used[n] += taken
    return ranges
