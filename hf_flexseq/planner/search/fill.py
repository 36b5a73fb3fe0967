"""The short sequences of a candidate: each on one rank, on top of what the long ones take.

1. Water level: the least common rise of a candidate's targets at which the time and memory left
   below them hold all short sequences as if they were divisible. Cheap, for all candidates at
   once, and ranks them well.
2. Longest first, each short sequence goes to the (micro-batch, rank) with the most time below the
   target, where memory counts as time at the short sequences' mean speed.
3. One that no single rank has memory for goes to the block where it costs least, so that memory
   can be filled up.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.place import Candidates, Placement

WATER_STEPS = 24


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Filled:
    """One complete candidate. objective: nanoseconds of the step. block, batch: [K] per row of the
    problem.

    load, held: [M, W] nanoseconds and tokens of each rank.
    """

    objective: int
    block: Int64Array
    batch: Int64Array
    load: Int64Array
    held: Int64Array


def water_levels(problem: Problem, candidates: Candidates, placed: Placement) -> Int64Array:
    """[C] nanoseconds by which each candidate's targets must rise; NEVER where memory will not
    do."""
    load, held = placed.rank_state(problem.world)
    tokens_from = np.concatenate([np.cumsum(problem.lengths[::-1])[::-1], [0]])[candidates.long]
    alone = np.where(problem.times[:, 0] < NEVER, problem.times[:, 0], 0)
    time_from = np.concatenate([np.cumsum(alone[::-1])[::-1], [0]])[candidates.long]
    rate = (time_from // np.maximum(tokens_from, 1) + 1)[:, None, None]
    memory = (problem.cap - held) * rate
    slack = placed.targets[:, :, None] - load
    if problem.free:  # a rank's clock is the same in all micro-batches
        memory, slack = memory.sum(axis=1, keepdims=True), slack[:, :1]
    low, high = np.zeros_like(time_from), np.full_like(time_from, int(time_from.max(initial=0)))
    for _ in range(WATER_STEPS):
        middle = (low + high) // 2
        room = np.minimum(slack + middle[:, None, None], memory).clip(min=0).sum(axis=(1, 2))
        low, high = (
            np.where(room < time_from, middle, low),
            np.where(room < time_from, high, middle),
        )
    enough = memory.sum(axis=(1, 2)) >= time_from
    return np.where(placed.ok & enough, high, NEVER)


def fill_short(
    problem: Problem, placed: Placement, which: int, *, long: int, rise: int
) -> Filled | None:
    """Candidate `which` with its short sequences; None when memory does not hold them."""
    load, held = placed.rank_state(problem.world)[:, which]
    below = placed.targets[which][:, None] + rise - load
    closed = placed.state[1, which] >= NEVER
    pour = _pour_free if problem.free else _pour
    spots = pour(problem, below, problem.cap - held, closed, long)
    if spots is None:
        return None
    return completed(
        problem,
        np.concatenate([placed.block[which, :long], [block for _, block in spots]]).astype(
            np.int64
        ),
        np.concatenate([placed.batch[which, :long], [batch for batch, _ in spots]]).astype(
            np.int64
        ),
        len(load),
    )


def completed(problem: Problem, block: Int64Array, batch: Int64Array, batches: int) -> Filled:
    """The candidate in which every row stands where `block` and `batch` say."""
    blocks, rows = problem.blocks, np.arange(len(block))
    shape = blocks.shape_of[block]
    # what begins less what ends at each rank
    edges = np.zeros((2, batches, problem.world + 1), dtype=np.int64)
    for edge, amount in zip(
        edges, (problem.times[rows, shape], problem.needs[rows, shape]), strict=True
    ):
        np.add.at(edge, (batch, blocks.start[block]), amount)
        np.subtract.at(edge, (batch, blocks.stop[block]), amount)
    load, held = edges.cumsum(axis=2)[:, :, :-1]
    if problem.free:
        objective = int(free_clocks(problem, block, batch, load).max())
    else:
        objective = lockstep_objective(problem, load)
    return Filled(objective=objective, block=block, batch=batch, load=load, held=held)


def lockstep_objective(problem: Problem, load: Int64Array) -> int:
    """Nanoseconds of [M, W] loads when all ranks wait for each other in every micro-batch. Empty
    ones cost nothing."""
    slowest = load.max(axis=1)
    return int(slowest.sum()) + int((slowest > 0).sum()) * problem.constant


def free_clocks(
    problem: Problem, block: Int64Array, batch: Int64Array, load: Int64Array
) -> Int64Array:
    """[W] when each rank ends, with the rows on their blocks and [M, W] loads, if ranks meet only
    in groups; see `cost.free_ns`."""
    blocks, clock = problem.blocks, np.zeros(problem.world, dtype=np.int64)
    sums = np.zeros((len(load), len(blocks.start)), dtype=np.int64)
    np.add.at(sums, (batch, block), problem.times[np.arange(len(block)), blocks.shape_of[block]])
    for times, worked in zip(sums, load, strict=True):
        clock += (worked > 0) * problem.constant
        # widest first
        for b in (np.flatnonzero(times[problem.world :]) + problem.world)[::-1].tolist():
            ranks = slice(int(blocks.start[b]), int(blocks.stop[b]))
            clock[ranks] = clock[ranks].max() + times[b]
        clock += times[: problem.world]
    return clock


def _pour(
    problem: Problem, below: Int64Array, left: Int64Array, closed: NDArray[np.bool_], long: int
) -> list[tuple[int, int]] | None:
    """(micro-batch, block) of each row from `long` on.

    below: [M, W] nanoseconds below the target. left: [M, W] tokens. closed: [M, B] blocks that may
    not be used.
    """
    times, lengths = problem.times[long:, 0].tolist(), problem.lengths[long:].tolist()
    rate = sum(times) // max(1, sum(lengths)) + 1
    world, slack, room = problem.world, below.ravel().tolist(), left.ravel().tolist()
    heap = [
        (-min(time, tokens * rate), slot)
        for slot, (time, tokens) in enumerate(zip(slack, room, strict=True))
    ]
    heapq.heapify(heap)
    # (-tokens left, slot) of slots too full for the row before, roomiest on top
    tight: list[tuple[int, int]] = []
    spots = []
    for row, (time, length) in enumerate(zip(times, lengths, strict=True), start=long):
        while tight and -tight[0][0] >= length:
            slot = heapq.heappop(tight)[1]
            if room[slot] >= length:
                heapq.heappush(heap, (-min(slack[slot], room[slot] * rate), slot))
            else:  # a spread sequence has taken some
                heapq.heappush(tight, (-room[slot], slot))
        while heap and room[heap[0][1]] < length:
            slot = heapq.heappop(heap)[1]
            heapq.heappush(tight, (-room[slot], slot))
        if heap:
            slot = heap[0][1]
            slack[slot] = now = slack[slot] - time
            room[slot] = left_there = room[slot] - length
            memory = left_there * rate
            heapq.heapreplace(heap, (-now if now < memory else -memory, slot))
            spots.append(divmod(slot, world))
        else:
            spot = _spread(problem, slack, room, closed, row)
            if spot is None:
                return None
            spots.append(spot)
    return spots


def _pour_free(
    problem: Problem, below: Int64Array, left: Int64Array, closed: NDArray[np.bool_], long: int
) -> list[tuple[int, int]] | None:
    """`_pour` for ranks whose clocks run on: each row goes to the rank with most time below the
    target, there to the last micro-batch it works in with memory for it, or to the first it does
    not work in yet."""
    times, lengths = problem.times[long:, 0].tolist(), problem.lengths[long:].tolist()
    room, slack = left.tolist(), below[0].tolist()
    heap = [(-time, rank) for rank, time in enumerate(slack)]
    heapq.heapify(heap)
    spots = []
    for time, length in zip(times, lengths, strict=True):
        full, batch, opening = [], None, 0
        while heap:
            lost, rank = heap[0]
            batch = _last_with_room(room, rank, length, problem.cap)
            if batch is None:
                full.append(heapq.heappop(heap))
                continue
            opening = (room[batch][rank] == problem.cap) * problem.constant
            if opening - slack[rank] <= lost:
                break
            # others may have room without another micro-batch
            heapq.heapreplace(heap, (opening - slack[rank], rank))
        if batch is None:
            return None
        slack[rank] -= time + opening
        room[batch][rank] -= length
        heapq.heapreplace(heap, (-slack[rank], rank))
        for entry in full:
            heapq.heappush(heap, entry)
        spots.append((batch, rank))
    return spots


def _last_with_room(room: list[list[int]], rank: int, length: int, cap: int) -> int | None:
    fitting = [batch for batch, there in enumerate(room) if there[rank] >= length]
    working = [batch for batch in fitting if room[batch][rank] < cap]
    return working[-1] if working else fitting[0] if fitting else None


def _spread(
    problem: Problem, slack: list[int], room: list[int], closed: NDArray[np.bool_], row: int
) -> tuple[int, int] | None:
    """Put a row that fits no rank on the block with memory where the least slack is lost; update
    all three."""
    blocks, world = problem.blocks, problem.world
    state = np.array([slack, room]).reshape(2, -1, world)
    # [M, B] each
    least_slack, least_room = np.minimum.reduceat(state[:, :, blocks.ranks], blocks.first, axis=2)
    time, need = problem.times[row][blocks.shape_of], problem.needs[row][blocks.shape_of]
    value = np.where((least_room >= need) & ~closed, least_slack - time, -NEVER)
    batch, block = divmod(int(value.argmax()), len(blocks.start))
    if value[batch, block] == -NEVER:
        return None
    closed[batch] |= blocks.crossing[block]
    for rank in range(int(blocks.start[block]), int(blocks.stop[block])):
        slack[batch * world + rank] -= int(time[block])
        room[batch * world + rank] -= int(need[block])
    return batch, block
