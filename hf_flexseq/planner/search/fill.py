"""Complete a candidate: its short sequences go to one rank each, on top of what the long ones
take.

The long sequences have left some time below the targets and some memory on every rank. Short
sequences are like water: there are many of them, each is small, so the best way to hold them is to
fill all ranks to one level.

1. Water level: how far all targets of a candidate must rise until the time and memory left below
   them hold the short sequences as if these were divisible. It is found by bisection for all
   candidates at once, is cheap, and ranks the candidates well.
2. Longest first, each short sequence goes to the (micro-batch, rank) with the most time left below
   the risen target. Memory counts as time, too: the tokens left times the short sequences' mean
   nanoseconds for each token; the smaller of the two is what is left.
3. A sequence that no single rank has memory for goes to the block of ranks where it costs least
   slack, so that memory can be filled up.

On free ranks step 2 is another: a rank's clock runs on over all micro-batches, so a sequence goes
to the rank that is free first, and there to a micro-batch with memory for it.

The slow twins are in tests/planner/test_parts.py: `step_ns` of the cost model for the objective, a
fresh count of every rank for what `completed` says, and `poured_one_by_one` and
`least_rise_by_search` of tests/planner/brute.py for the heap and the bisection.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.place import Candidates, Placement


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Filled:
    """A complete candidate: a block and a micro-batch for every sequence."""

    objective: int
    """Nanoseconds of the step."""
    row2block: Int64Array
    """[sequences] block of each row of the problem."""
    row2batch: Int64Array
    """[sequences] micro-batch of each row of the problem."""
    load: Int64Array
    """[micro_batches, ranks] nanoseconds."""
    tokens: Int64Array
    """[micro_batches, ranks] tokens."""


# ---- the water level of every candidate


def water_levels(problem: Problem, candidates: Candidates, placed: Placement) -> Int64Array:
    """Return [candidates] the least rises of targets that hold all sequences, or NEVER."""
    load, tokens = placed.rank_state(problem.world)  # each [candidates, micro_batches, ranks]
    # 1. What has to be poured: the tokens and one-rank nanoseconds of the short sequences.
    alone = np.where(problem.times[:, 0] < NEVER, problem.times[:, 0], 0)  # [sequences]
    short_tokens = _sums_from_each(problem.lengths)[candidates.long_rows]  # [candidates]
    short_time = _sums_from_each(alone)[candidates.long_rows]  # [candidates]
    # 2. What is left on every rank, memory counted as time.
    rate = short_time // np.maximum(short_tokens, 1) + 1  # [candidates] nanoseconds for each token
    memory = (problem.cap - tokens) * rate[:, None, None]  # [candidates, micro_batches, ranks]
    slack = placed.targets[:, :, None] - load  # [candidates, micro_batches, ranks]
    if problem.free:
        # A rank's clock is the same in all micro-batches: one target, and the sum of the memory.
        memory = memory.sum(axis=1, keepdims=True)  # [candidates, 1, ranks]
        slack = slack[:, :1]  # [candidates, 1, ranks]
    # 3. Bisection between no rise and one rank taking all of it.
    low = np.zeros_like(short_time)
    high = np.full_like(short_time, int(short_time.max(initial=0)))
    for _ in range(EFFORT.water_steps):
        middle = (low + high) // 2
        left = np.minimum(slack + middle[:, None, None], memory).clip(min=0)
        too_low = left.sum(axis=(1, 2)) < short_time  # [candidates]
        low = np.where(too_low, middle, low)
        high = np.where(too_low, high, middle)
    enough = memory.sum(axis=(1, 2)) >= short_time
    return np.where(placed.fits & enough, high, NEVER)


def _sums_from_each(amounts: Int64Array) -> Int64Array:
    """Return [sequences + 1] the sum of each row's amount and all later ones, 0 after the last."""
    sums = np.cumsum(amounts[::-1])[::-1]  # [sequences]
    return np.concatenate([sums, [0]])


# ---- one candidate


def fill_short(
    problem: Problem,
    placed: Placement,
    candidate: int,
    *,
    long_rows: int,
    rise: int,
) -> Filled | None:
    """Return a candidate with its short sequences, or None when memory does not hold them.

    candidate: index. long_rows: how many sequences are placed already. rise: the candidate's water
    level, nanoseconds that its targets rise by.
    """
    load, tokens = placed.rank_state(problem.world)[:, candidate]  # each [micro_batches, ranks]
    slack = placed.targets[candidate][:, None] + rise - load  # [micro_batches, ranks]
    memory = problem.cap - tokens  # [micro_batches, ranks]
    if problem.free:
        spots = _pour_free(problem, slack, memory, long_rows)
    else:
        out_of_use = placed.block_state[1, candidate] >= NEVER  # [micro_batches, blocks]
        spots = _pour(problem, slack, memory, out_of_use, long_rows)
    if spots is None:
        return None
    short2batch = [batch for batch, _ in spots]
    short2block = [block for _, block in spots]
    row2block = np.concatenate([placed.row2block[candidate, :long_rows], short2block])
    row2batch = np.concatenate([placed.row2batch[candidate, :long_rows], short2batch])
    return completed(
        problem,
        row2block.astype(np.int64),  # float64 where there is no short sequence
        row2batch.astype(np.int64),
        len(load),
    )


def completed(
    problem: Problem, row2block: Int64Array, row2batch: Int64Array, batches: int
) -> Filled:
    """Return the complete candidate in which row k is on block row2block[k], in row2batch[k]."""
    blocks = problem.blocks
    rows = np.arange(len(row2block))
    shape = blocks.shape_of[row2block]  # [sequences]
    start = blocks.start[row2block]  # [sequences] first rank
    stop = blocks.stop[row2block]  # [sequences] one past the last rank
    # What begins less what ends at each rank; its running sum is what each rank has.
    edges = np.zeros((2, batches, problem.world + 1), dtype=np.int64)
    for edge, amounts in zip(edges, (problem.times, problem.needs), strict=True):
        amount = amounts[rows, shape]  # [sequences] nanoseconds, then tokens
        np.add.at(edge, (row2batch, start), amount)
        np.subtract.at(edge, (row2batch, stop), amount)
    load, tokens = edges.cumsum(axis=2)[:, :, :-1]  # each [micro_batches, ranks]
    if problem.free:
        objective = int(free_clocks(problem, row2block, row2batch, load).max())
    else:
        objective = lockstep_objective(problem, load)
    return Filled(
        objective=objective,
        row2block=row2block,
        row2batch=row2batch,
        load=load,
        tokens=tokens,
    )


def lockstep_objective(problem: Problem, load: Int64Array) -> int:
    """Return the lockstep nanoseconds of loads [micro_batches, ranks]; empty ones are free."""
    slowest = load.max(axis=1)  # [micro_batches]
    started = int((slowest > 0).sum())
    return int(slowest.sum()) + started * problem.constant


def free_clocks(
    problem: Problem, row2block: Int64Array, row2batch: Int64Array, load: Int64Array
) -> Int64Array:
    """Return each rank's end in nanoseconds, [ranks], if ranks meet only in groups."""
    blocks = problem.blocks
    rows = np.arange(len(row2block))
    block_times = np.zeros((len(load), len(blocks.start)), dtype=np.int64)
    row_times = problem.times[rows, blocks.shape_of[row2block]]  # [sequences]
    np.add.at(block_times, (row2batch, row2block), row_times)  # [micro_batches, blocks]
    clock = np.zeros(problem.world, dtype=np.int64)  # [ranks]
    for times, worked in zip(block_times, load, strict=True):  # [blocks], [ranks]
        clock += (worked > 0) * problem.constant
        shared = np.flatnonzero(times[problem.world :]) + problem.world
        for block in shared[::-1].tolist():  # widest first
            ranks = slice(int(blocks.start[block]), int(blocks.stop[block]))
            clock[ranks] = clock[ranks].max() + times[block]
        clock += times[: problem.world]  # alone
    return clock


# ---- pouring


def _pour(
    problem: Problem,
    slack_of_ranks: Int64Array,
    memory_of_ranks: Int64Array,
    out_of_use: NDArray[np.bool_],
    long_rows: int,
) -> list[tuple[int, int]] | None:
    """Return the (micro-batch, block) of each row from `long_rows` on; None when memory is short.

    slack_of_ranks: [micro_batches, ranks] nanoseconds left below the target. memory_of_ranks:
    [micro_batches, ranks] tokens left. out_of_use: [micro_batches, blocks] blocks that may not be
    used; it is updated.
    """
    world = problem.world
    times = problem.times[long_rows:, 0].tolist()
    lengths = problem.lengths[long_rows:].tolist()
    rate = sum(times) // max(1, sum(lengths)) + 1  # nanoseconds for each token
    # A slot is one rank in one micro-batch: micro-batch x world + rank.
    slack = slack_of_ranks.ravel().tolist()
    memory = memory_of_ranks.ravel().tolist()
    # (-what is left, slot) of the slots that may have memory for the row, most left on top
    heap = []
    for slot, (time, tokens) in enumerate(zip(slack, memory, strict=True)):
        heap.append((-min(time, tokens * rate), slot))
    heapq.heapify(heap)
    # (-tokens left, slot) of slots too full for an earlier, longer row, most tokens left on top
    tight: list[tuple[int, int]] = []
    spots = []
    for row, (time, length) in enumerate(zip(times, lengths, strict=True), start=long_rows):
        # 1. Slots that were too full for longer rows, and have memory for this one.
        while tight and -tight[0][0] >= length:
            slot = heapq.heappop(tight)[1]
            if memory[slot] >= length:
                heapq.heappush(heap, (-min(slack[slot], memory[slot] * rate), slot))
            else:  # a row on several ranks has taken some since
                heapq.heappush(tight, (-memory[slot], slot))
        # 2. Slots with much time left but too little memory.
        while heap and memory[heap[0][1]] < length:
            slot = heapq.heappop(heap)[1]
            heapq.heappush(tight, (-memory[slot], slot))
        # 3. The slot with most left takes the row; where no rank has memory, several ranks do.
        if heap:
            slot = heap[0][1]
            slack_left = slack[slot] - time
            tokens_left = memory[slot] - length
            slack[slot] = slack_left
            memory[slot] = tokens_left
            memory_left = tokens_left * rate
            left = slack_left if slack_left < memory_left else memory_left
            heapq.heapreplace(heap, (-left, slot))
            spots.append(divmod(slot, world))  # block r < world is rank r alone
        else:
            spot = _pour_on_several(problem, slack, memory, out_of_use, row)
            if spot is None:
                return None
            spots.append(spot)
    return spots


def _pour_on_several(
    problem: Problem,
    slack: list[int],
    memory: list[int],
    out_of_use: NDArray[np.bool_],
    row: int,
) -> tuple[int, int] | None:
    """Return the (micro-batch, block) with memory for a row that keeps most slack; None if none
    has.

    slack, memory: [micro_batches * ranks] nanoseconds and tokens left. They and `out_of_use`
    [micro_batches, blocks] are updated.
    """
    blocks = problem.blocks
    world = problem.world
    state = np.array([slack, memory]).reshape(2, -1, world)  # [2, micro_batches, ranks]
    # [2, micro_batches, ranks] -> [2, micro_batches, blocks], the least of each block's ranks
    least_slack, least_memory = np.minimum.reduceat(
        state[:, :, blocks.ranks], blocks.first, axis=2
    )
    time = problem.times[row][blocks.shape_of]  # [blocks]
    need = problem.needs[row][blocks.shape_of]  # [blocks]
    possible = (least_memory >= need) & ~out_of_use  # [micro_batches, blocks]
    slack_left = np.where(possible, least_slack - time, -NEVER)  # [micro_batches, blocks]
    batch, block = divmod(int(slack_left.argmax()), len(blocks.start))
    if slack_left[batch, block] == -NEVER:
        return None
    out_of_use[batch] |= blocks.crossing[block]
    for rank in range(int(blocks.start[block]), int(blocks.stop[block])):
        slack[batch * world + rank] -= int(time[block])
        memory[batch * world + rank] -= int(need[block])
    return batch, block


def _pour_free(
    problem: Problem, slack_of_ranks: Int64Array, memory_of_ranks: Int64Array, long_rows: int
) -> list[tuple[int, int]] | None:
    """Return the (micro-batch, rank) of each row from `long_rows` on, for ranks whose clocks run
    on.

    Each row goes to the rank with most time below the target; there to the last micro-batch that
    the rank works in and that has memory for the row, or to the first that it does not work in
    yet. None when memory is short. The arrays are those of `_pour`, the slack alike in all
    micro-batches.
    """
    times = problem.times[long_rows:, 0].tolist()
    lengths = problem.lengths[long_rows:].tolist()
    memory = memory_of_ranks.tolist()  # [micro_batches][ranks] tokens left
    slack = slack_of_ranks[0].tolist()  # [ranks] nanoseconds left
    heap = [(-time, rank) for rank, time in enumerate(slack)]  # most time left on top
    heapq.heapify(heap)
    spots = []
    for time, length in zip(times, lengths, strict=True):
        without_memory = []  # entries of the heap
        batch = None
        opening = 0
        while heap:
            minus_left, rank = heap[0]
            batch = _last_with_memory(memory, rank, length, problem.cap)
            if batch is None:
                without_memory.append(heapq.heappop(heap))
                continue
            opening = (memory[batch][rank] == problem.cap) * problem.constant
            if opening - slack[rank] <= minus_left:
                break
            # The rank would start a micro-batch for this row; others may have memory without that.
            heapq.heapreplace(heap, (opening - slack[rank], rank))
        if batch is None:
            return None
        slack[rank] -= time + opening
        memory[batch][rank] -= length
        heapq.heapreplace(heap, (-slack[rank], rank))
        for entry in without_memory:
            heapq.heappush(heap, entry)
        spots.append((batch, rank))
    return spots


def _last_with_memory(memory: list[list[int]], rank: int, length: int, cap: int) -> int | None:
    """Return the micro-batch in which a rank takes a row of `length` tokens; None where none can.

    It is the last one that the rank works in already, or else the first that is still empty there.
    """
    empty = None
    for batch in range(len(memory) - 1, -1, -1):
        left = memory[batch][rank]
        if left < length:
            continue
        if left < cap:
            return batch
        empty = batch
    return empty
