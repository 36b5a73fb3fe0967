"""What no plan can beat: every rank busy all the time at each sequence's cheapest degree.

    bound = (sum over sequences of the least degree x time) / ranks + fewest micro-batches x
    constant

Free ranks may run fewer micro-batches than their neighbours, so for them the constant counts as
often as ranks must start a micro-batch to hold all tokens, shared by all ranks, and at least once:
whoever works longest works in one.

    bound = max(area / ranks + constant, (area + ceil(tokens / cap) x constant) / ranks)
"""

import numpy as np

from hf_flexseq.cost import CostModel, Int64Array
from hf_flexseq.planner.problem import NEVER, cheapest
from hf_flexseq.topology import Topology


def lower_bound_ns(
    lengths: Int64Array, topology: Topology, cost: CostModel, *, strategy: str, cap: int, sync: str
) -> int:
    """Nanoseconds that no step on these sequences can undercut. Every sequence must fit on some
    degree."""
    if not len(lengths):
        return 0
    least = np.full(len(lengths), NEVER)
    for degree, spans in shapes_of(topology):
        ns, _ = cheapest(cost, lengths, (degree, spans), strategy)
        fits = (-(-lengths // degree) <= cap) & (ns < NEVER)
        least = np.minimum(least, np.where(fits, ns * degree, NEVER))
    total: int = sum(least.tolist())
    tokens, world = int(lengths.sum()), topology.world_size
    if sync == "free":
        started = max(world, -(-tokens // cap))  # (rank, micro-batch) pairs
        return -(-(total + started * cost.micro_batch_ns) // world)
    return -(-total // world) + -(-tokens // (cap * world)) * cost.micro_batch_ns


def shapes_of(topology: Topology) -> list[tuple[int, bool]]:
    """Every (degree, spans nodes) a group can have: a part of one node, or whole nodes."""
    inside = [(degree, False) for degree in range(1, topology.ranks_per_node + 1)]
    return inside + [
        (nodes * topology.ranks_per_node, True) for nodes in range(2, topology.nodes + 1)
    ]
