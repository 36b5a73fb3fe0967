"""The best laminar lockstep plan of a few sequences on one or two nodes, by dynamic programming
over their subsets.

1. alone[n][S]: S on one group of n ranks: the sum of their times.
2. inside[n][b, S]: S on n ranks of a node: some on all n, the rest on two parts; the least
   possible slowest rank.
3. world[b, S]: S on all nodes: some on all of them, the rest inside the nodes.
4. plan[S]: S in micro-batches: one set after the other, and the constant for each.

Any sets of ranks of a node that are nested or disjoint can be numbered so that all are contiguous,
so only their sizes count. b is the memory left on the ranks, in 16 steps or more: what a group
takes is rounded down, so where memory is tight this is a bound close below the optimum, and
elsewhere the optimum.

A set is an integer whose bit k says whether sequence k is in it. tests/planner/test_exact.py
compares the default planner with this.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, Int64Array

NEVER = 2**60
FEWEST_LEVELS = 16  # steps of memory for many sequences
MOST_LEVELS = 256  # and for few
CELLS = 1_000_000  # (set, subset, level) triples that few sequences stay below


def least_lockstep_ns(
    lengths: Sequence[int], topology: Topology, cost: CostModel, *, cap: int
) -> int:
    """Return nanoseconds that no plan undercuts."""
    assert topology.nodes <= 2, "nodes are shared out two by two"
    node = topology.ranks_per_node
    levels = steps_of_memory(lengths, cap)
    sets = 1 << len(lengths)
    # 1. and 2. Groups inside a node, narrow ones first; no rank at all holds the empty set only.
    nothing = np.where(np.arange(sets) == 0, 0, NEVER)  # [sets]
    inside = [nothing + np.zeros((levels + 1, 1), dtype=np.int64)]  # each [levels, sets]
    for n in range(1, node + 1):
        rest = inside[n - 1]
        for m in range(1, n // 2 + 1):
            rest = np.minimum(rest, shared(inside[m], inside[n - m]))
        whole = alone(lengths, n, False, cost, cap)
        inside.append(on_top(whole, rest, need(lengths, n, cap, levels)))
    # 3. Groups of both nodes.
    world = inside[node]
    if topology.nodes == 2:
        whole = alone(lengths, 2 * node, True, cost, cap)
        world = on_top(whole, shared(world, world), need(lengths, 2 * node, cap, levels))
    # 4. Micro-batches.
    step = world[levels]  # [sets]
    possible = (total(lengths) <= cap * topology.world_size) & (step < NEVER)
    step = np.where(possible, step + cost.micro_batch_ns, NEVER)
    step[0] = 0
    plan = step
    for _ in range(len(lengths)):
        plan = on_top(step, plan[None], np.zeros(len(step), dtype=np.int64))[0]
    return int(plan[-1])


def steps_of_memory(lengths: Sequence[int], cap: int) -> int:
    """Return the steps that memory is divided into: none where all fits one rank."""
    if sum(lengths) <= cap:
        return 0
    affordable = CELLS // 3 ** len(lengths)
    return min(MOST_LEVELS, max(FEWEST_LEVELS, affordable))


def alone(
    lengths: Sequence[int], degree: int, spans: bool, cost: CostModel, cap: int
) -> Int64Array:
    """Return [sets] nanoseconds of each set on one group; NEVER when it does not fit there."""
    names = ("local",) if degree == 1 else cost.strategies("auto")
    times = [min(cost.sequence_ns(s, degree, name, spans) for name in names) for s in lengths]
    least = min(cost.waits(degree, name, spans).always for name in names)
    latency = np.where(np.arange(1 << len(lengths)) > 0, least, 0)  # [sets]
    fits = -(-total(lengths) // degree) <= cap  # [sets]
    return np.where(fits, total(times) + latency, NEVER)


def need(lengths: Sequence[int], degree: int, cap: int, levels: int) -> Int64Array:
    """Return [sets] the levels of memory that each set takes on a group, rounded down."""
    return -(-total(lengths) // degree) * levels // cap


def total(amounts: Sequence[int]) -> Int64Array:
    """Return [sets] the sum over each set's members."""
    sums = np.zeros(1, dtype=np.int64)
    for amount in amounts:
        sums = np.concatenate([sums, sums + amount])
    return sums


def shared(first: Int64Array, second: Int64Array) -> Int64Array:
    """Return [levels, sets] the slower of two parts that share a set, at the best division."""
    part, rest, begins = _parts(first.shape[1].bit_length() - 1)
    slower = np.maximum(first[:, part], second[:, rest])  # [levels, divisions]
    return np.minimum.reduceat(slower, begins, axis=1)


def on_top(whole: Int64Array, below: Int64Array, taken: Int64Array) -> Int64Array:
    """Return [levels, sets] the least sum of a part on the whole group and the rest below it.

    The rest has the memory that the part leaves; taken: [sets] levels.
    """
    part, rest, begins = _parts(len(whole).bit_length() - 1)
    left = np.arange(len(below))[:, None] - taken[part]  # [levels, divisions]
    sums = np.where(left >= 0, whole[part] + below[np.maximum(left, 0), rest], NEVER)
    return np.minimum(np.minimum.reduceat(sums, begins, axis=1), NEVER)


@lru_cache(maxsize=16)
def _parts(count: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return every division of every set into a part and a rest, and where each set's begin."""
    subsets = [np.zeros(1, dtype=np.int64)]
    for item in range(count):
        subsets += [np.concatenate([s, s | (1 << item)]) for s in subsets]
    part = np.concatenate(subsets)
    sizes = np.array([len(s) for s in subsets])
    whole = np.repeat(np.arange(1 << count), sizes)
    return part, whole ^ part, np.cumsum(sizes) - sizes
