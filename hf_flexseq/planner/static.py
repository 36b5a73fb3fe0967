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

from hf_flexseq.cost import CostModel, GroupKind, kinds_ns
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
    """Return micro-batches of groups of `degree` ranks.

    Every sequence must fit on `degree` ranks; see `check_degree`. lengths: tokens of every
    sequence, by sequence id. strategy: what groups of two ranks and more may use. cap: most tokens
    of a rank in a micro-batch.
    """
    starts = range(0, topology.world_size, degree)  # the first rank of each group
    room = cap * degree  # tokens of a group
    # Rows are sequences, longest first.
    row2id = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    tokens = [lengths[i] for i in row2id]
    shape = degree, topology.spans_nodes(0, degree)
    nanoseconds, _ = cheapest(cost, np.array(tokens, dtype=np.int64), shape, strategy)
    times = nanoseconds.tolist()
    # 1. as few groups as possible
    packed = best_fit(tokens, room)
    count = -(-len(packed) // len(starts)) * len(starts)
    # 2. the same groups, more even
    bins = least_loaded(tokens, times, count, room) or packed
    # 3. groups of similar time in one micro-batch
    bins.sort(key=lambda rows: -sum(times[row] for row in rows))
    ranks = []
    members = []
    for index, rows in enumerate(bins):
        start = starts[index % len(starts)]
        ranks.append(range(start, start + degree))
        members.append([row2id[row] for row in rows])
    groups = one_strategy_groups(ranks, members, (lengths, topology, cost, strategy))
    micro_batches = []
    for first in range(0, len(bins), len(starts)):
        micro_batches.append(MicroBatch(groups=tuple(groups[first : first + len(starts)])))
    return tuple(micro_batches)


def check_degree(degree: int, topology: Topology) -> None:
    """Raise ValueError unless equal groups of `degree` ranks can cover `topology`."""
    world = topology.world_size
    if world % degree:
        raise ValueError(f"sp_degree={degree} does not divide {world} ranks")
    if not all(topology.allows(start, start + degree) for start in range(0, world, degree)):
        raise ValueError(
            f"sp_degree={degree}: groups must lie inside a node of {topology.ranks_per_node} "
            "ranks or be made of whole nodes; choose a divisor or a multiple of that"
        )


def static_degrees(topology: Topology) -> list[int]:
    """Return the degrees that `check_degree` accepts, ascending."""
    world = topology.world_size
    node = topology.ranks_per_node
    degrees = []
    for degree in range(1, world + 1):
        inside_or_whole = node % degree == 0 or degree % node == 0
        if world % degree == 0 and inside_or_whole:
            degrees.append(degree)
    return degrees


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Return bins of rows, each row in the bin it fills best.

    lengths: tokens of each row, longest first. room: tokens of a bin.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for row, length in enumerate(lengths):
        fullest = bisect_left(rooms, (length, -1))  # the least room that is enough
        if fullest < len(rooms):
            left, index = rooms.pop(fullest)
        else:
            left = room
            index = len(bins)
            bins.append([])
        bins[index].append(row)
        insort(rooms, (left - length, index))
    return bins


def least_loaded(lengths: list[int], times: list[int], count: int, room: int) -> list[list[int]]:
    """Return at most `count` bins of rows, each row in the least loaded bin with room; no bins at
    all when a row finds none.

    lengths, times: tokens and nanoseconds of each row, longest first. room: tokens of a bin.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    left = [room] * count  # tokens
    heap = [(0, index) for index in range(count)]  # (nanoseconds, bin)
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


def one_strategy_groups(
    ranks: Sequence[range],
    members: Sequence[list[int]],
    scoring: tuple[Sequence[int], Topology, CostModel, str],
) -> list[Group]:
    """Return groups, each with the strategy that is cheapest for its sequences together.

    ranks, members: [groups] ranks of each group, and ids of its sequences. scoring: tokens of
    every sequence, topology, cost model, and what groups of two ranks and more may use.
    """
    lengths, topology, cost, strategy = scoring
    names = cost.strategies(strategy) or ("local",)
    # 1. every group by every strategy, [strategies, groups]
    by_name = []
    for name in names:
        kinds = []
        for of_group in ranks:
            spans_nodes = topology.spans_nodes(of_group.start, of_group.stop)
            named = "local" if len(of_group) == 1 else name
            kinds.append(GroupKind(len(of_group), named, spans_nodes))
        by_name.append(kinds_ns(cost, kinds, members, lengths))
    # 2. the cheapest strategy of each, of equal ones the first
    cheapest_of = np.stack(by_name).argmin(axis=0).tolist()  # [groups]
    groups = []
    for of_group, ids, index in zip(ranks, members, cheapest_of, strict=True):
        named = "local" if len(of_group) == 1 else names[index]
        group = Group(ranks=tuple(of_group), sequences=tuple(sorted(ids)), strategy=named)
        groups.append(group)
    return groups
