"""One degree for every sequence: what a run without flexible groups does, and the floor under the
other planners.

1. Best fit, longest first, packs the sequences into as few groups as possible; their number gives
   the micro-batches.
2. Longest first onto the least loaded group with room, over all groups of those micro-batches,
   evens out the time; if memory is too tight for that, the packing of 1 stands.
3. Groups are sorted by time, so that micro-batches hold groups of similar time.

Best-fit packing is also the baseline of FlexSP (arXiv 2412.01523, section 6.1).
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from hf_flexseq.cost import CostModel, Int64Array
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.planner.problem import cheapest
from hf_flexseq.topology import Topology


def static_micro_batches(
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    degree: int,
    strategy: str,
    cap: int,
) -> tuple[MicroBatch, ...]:
    """The micro-batches of one-degree groups. Every sequence must fit on `degree` ranks; see
    `check_degree`."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ordered = np.array([lengths[i] for i in order], dtype=np.int64)
    starts = range(0, topology.world_size, degree)
    times = cheapest(cost, ordered, (degree, topology.spans_nodes(0, degree)), strategy)[
        0
    ].tolist()
    packed = best_fit(ordered.tolist(), cap * degree)
    groups = -(-len(packed) // len(starts)) * len(starts)
    bins = least_loaded(ordered.tolist(), times, groups, cap * degree) or packed
    bins.sort(key=lambda rows: -sum(times[row] for row in rows))
    return tuple(
        MicroBatch(
            groups=tuple(
                one_strategy_group(
                    range(start, start + degree),
                    [order[row] for row in rows],
                    (lengths, topology, cost, strategy),
                )
                for start, rows in zip(starts, bins[first : first + len(starts)], strict=False)
            )
        )
        for first in range(0, len(bins), len(starts))
    )


def check_degree(degree: int, topology: Topology) -> None:
    """Raise ValueError unless equal groups of `degree` ranks can cover `topology`."""
    world = topology.world_size
    if world % degree:
        raise ValueError(f"sp_degree={degree} does not divide {world} ranks")
    if not all(topology.allows(start, start + degree) for start in range(0, world, degree)):
        raise ValueError(
            f"sp_degree={degree}: groups must lie inside a node of {topology.ranks_per_node} "
            f"ranks or be made of "
            "whole nodes; choose a divisor or a multiple of that"
        )


def static_degrees(topology: Topology) -> list[int]:
    """The degrees that `check_degree` accepts, ascending."""
    world, node = topology.world_size, topology.ranks_per_node
    return [d for d in range(1, world + 1) if world % d == 0 and (node % d == 0 or d % node == 0)]


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Rows of `lengths`, longest first, each in the bin it fills best."""
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for row, length in enumerate(lengths):
        at = bisect_left(left, (length, -1))
        if at < len(left):
            free, index = left.pop(at)
        else:
            free, index = room, len(bins)
            bins.append([])
        bins[index].append(row)
        insort(left, (free - length, index))
    return bins


def least_loaded(lengths: list[int], times: list[int], count: int, room: int) -> list[list[int]]:
    """Rows, longest first, each in the least loaded of `count` bins with room; no bins at all when
    one has none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    left = [room] * count
    heap = [(0, index) for index in range(count)]
    for row, length in enumerate(lengths):
        full = []
        while heap and left[heap[0][1]] < length:
            full.append(heapq.heappop(heap))
        if not heap:
            return []
        load, index = heap[0]
        bins[index].append(row)
        left[index] -= length
        heapq.heapreplace(heap, (load + times[row], index))
        for entry in full:
            heapq.heappush(heap, entry)
    return [rows for rows in bins if rows]


def one_strategy_group(
    ranks: range, ids: list[int], scoring: tuple[Sequence[int], Topology, CostModel, str]
) -> Group:
    """A group whose strategy is the cheapest one for its sequences together.

    scoring: lengths, topology, cost model and what groups of two ranks and more may use.
    """
    lengths, topology, cost, strategy = scoring
    names = ("local",) if len(ranks) == 1 else cost.strategies(strategy)
    members: Int64Array = np.array([lengths[i] for i in ids], dtype=np.int64)
    spans = topology.spans_nodes(ranks.start, ranks.stop)
    totals = [int(cost.sequences_ns(members, len(ranks), name, spans).sum()) for name in names]
    return Group(
        ranks=tuple(ranks), sequences=tuple(sorted(ids)), strategy=names[totals.index(min(totals))]
    )
