"""Seconds that no plan can beat: every rank busy all the time at each sequence's cheapest degree.

    bound = (sum over sequences of the least degree x time) / ranks + fewest micro-batches x
    constant

and the seconds of experts on several ranks, evenly spread.

Free ranks may run fewer micro-batches than their neighbours, so for them the constant counts as
often as ranks must start a micro-batch to hold all tokens, shared by all ranks, and at least once:
the rank that works longest works in one.

    bound = max(area / ranks + constant, (area + ceil(tokens / cap) x constant) / ranks)
"""

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.evaluate import check_free
from hf_flexseq.cost.lengths import shares_of
from hf_flexseq.planner.problem import NEVER, cheapest
from hf_flexseq.planner.task import PlanTask


def step_bound_ns(task: PlanTask) -> int:
    """Return nanoseconds that no plan of a task undercuts. Every sequence must fit on some degree.

    Raises ValueError for experts on several ranks that are free.
    """
    if not task.lengths:
        return 0
    topology, cost, cap = task.topology, task.cost, task.cap
    lengths = np.array(task.lengths, dtype=np.int64)  # [sequences]
    shares = shares_of(task.lengths, range(len(lengths)))
    # 1. the least device-nanoseconds of each sequence, [sequences]
    least = np.full(len(lengths), NEVER)
    for shape in shapes_of(topology):
        degree, _ = shape
        nanoseconds, _ = cheapest(cost, lengths, shape, task.strategy, shares=shares)
        fits = (-(-lengths // degree) <= cap) & (nanoseconds < NEVER)
        least = np.where(fits, np.minimum(least, nanoseconds * degree), least)
    # 2. spread over all ranks, with the constants of the fewest micro-batches
    area: int = sum(least.tolist())
    tokens = int(lengths.sum())
    world = topology.world_size
    if task.sync == "free":
        check_free(cost)
        started = max(world, -(-tokens // cap))  # (rank, micro-batch) pairs
        return -(-(area + started * cost.micro_batch_ns) // world)
    fewest = -(-tokens // (cap * world))
    bound = -(-area // world) + fewest * cost.micro_batch_ns
    if cost.experts is not None:
        bound += cost.experts.least_ns(tokens, world)
    return bound


def shapes_of(topology: Topology) -> list[tuple[int, bool]]:
    """Return every (degree, spans nodes) of groups inside a node or of whole nodes, ascending."""
    shapes = [(degree, False) for degree in range(1, topology.ranks_per_node + 1)]
    for nodes in range(2, topology.nodes + 1):
        shapes.append((nodes * topology.ranks_per_node, True))
    return shapes
