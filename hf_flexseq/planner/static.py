"""One degree for every sequence: the plan of a run without flexible groups, and the floor under
the other planners.

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

from hf_flexseq.cost import groups_ns
from hf_flexseq.cost.lengths import shares_of
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.planner.problem import cheapest
from hf_flexseq.planner.task import PlanTask, longest_first


def static_micro_batches(task: PlanTask) -> tuple[MicroBatch, ...]:
    """Return micro-batches of groups of `task.sp_degree` ranks, one of `Topology.degrees`."""
    degree = task.sp_degree
    assert degree is not None, "planner='static' has a degree"
    topology = task.topology
    starts = range(0, topology.world_size, degree)  # the first rank of each group
    room = task.cap * degree  # tokens of a group
    # Rows are sequences, longest first.
    row2id = longest_first(task.lengths)
    tokens = [task.lengths[i] for i in row2id]
    shape = degree, topology.spans_nodes(0, degree)
    each = np.array(tokens, dtype=np.int64)
    shares = shares_of(task.lengths, row2id)
    nanoseconds, _ = cheapest(task.cost, each, shape, task.strategy, shares=shares)
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
    groups = one_strategy_groups(ranks, members, task)
    micro_batches = []
    for first in range(0, len(bins), len(starts)):
        micro_batches.append(MicroBatch(groups=tuple(groups[first : first + len(starts)])))
    return tuple(micro_batches)


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Return bins of `room` tokens, each row, longest first, in the bin it fills best."""
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
    task: PlanTask,
) -> list[Group]:
    """Return groups [groups], each with the strategy that is cheapest for all its sequences."""
    names = task.cost.strategies(task.strategy) or ("local",)
    # 1. every group by every strategy, [strategies][groups]
    by_name = []
    for name in names:
        groups = []
        for of_group, ids in zip(ranks, members, strict=True):
            named = "local" if len(of_group) == 1 else name
            group = Group(ranks=tuple(of_group), sequences=tuple(sorted(ids)), strategy=named)
            groups.append(group)
        by_name.append(groups)
    # 2. the cheapest strategy of each, of equal ones the first
    times = [groups_ns(task.cost, groups, task.lengths, task.topology) for groups in by_name]
    cheapest_of = np.stack(times).argmin(axis=0).tolist()  # [groups]
    return [by_name[best][index] for index, best in enumerate(cheapest_of)]
