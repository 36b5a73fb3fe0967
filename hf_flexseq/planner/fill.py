"""The short sequences: each on one rank, on top of what the long ones take, then small repairs.

1. Water level: the least common rise of a candidate's targets at which the time and memory left below them hold all
   short sequences as if they were divisible. Cheap, for all candidates at once, and ranks them well.
2. Longest first, each short sequence goes to the (micro-batch, rank) with the most time below the target, where memory
   counts as time at the short sequences' mean speed.
3. Repair: from the fullest rank of each micro-batch move a short sequence away, or swap it for a shorter one, to where
   the most slack remains, until nothing helps.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.place import Candidates, Placement
from hf_flexseq.planner.problem import NEVER, Problem

WATER_STEPS = 24
REPAIRS = 100


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Filled:
    """One complete candidate. objective: nanoseconds. block, batch: [K] per row of the problem.

    load, held: [M, W] nanoseconds and tokens. long: the rows below stand where `place_long` put them.
    """

    objective: int
    block: Int64Array
    batch: Int64Array
    load: Int64Array
    held: Int64Array
    long: int


def water_levels(problem: Problem, candidates: Candidates, placed: Placement) -> Int64Array:
    """[C] nanoseconds by which each candidate's targets must rise; NEVER where memory will not do."""
    load, held = placed.rank_state(problem.world)
    tokens_from = np.concatenate([np.cumsum(problem.lengths[::-1])[::-1], [0]])[candidates.long]
    alone = np.where(problem.times[:, 0] < NEVER, problem.times[:, 0], 0)
    time_from = np.concatenate([np.cumsum(alone[::-1])[::-1], [0]])[candidates.long]
    rate = (time_from // np.maximum(tokens_from, 1) + 1)[:, None, None]
    memory = (problem.cap - held) * rate
    slack = placed.targets[:, :, None] - load
    low, high = np.zeros_like(time_from), np.full_like(time_from, int(time_from.max(initial=0)))
    for _ in range(WATER_STEPS):
        middle = (low + high) // 2
        room = np.minimum(slack + middle[:, None, None], memory).clip(min=0).sum(axis=(1, 2))
        low, high = np.where(room < time_from, middle, low), np.where(room < time_from, high, middle)
    enough = memory.clip(min=0).sum(axis=(1, 2)) >= time_from
    return np.where(placed.ok & enough, high, NEVER)


def fill_short(problem: Problem, placed: Placement, which: int, long: int, rise: int) -> Filled | None:
    """Candidate `which` with its short sequences, longest first; None when memory does not hold them."""
    world = problem.world
    times, lengths = problem.times[long:, 0].tolist(), problem.lengths[long:].tolist()
    rate = sum(times) // max(1, sum(lengths)) + 1
    load, held = placed.rank_state(world)[:, which].copy()
    below = (placed.targets[which][:, None] + rise - load).ravel().tolist()
    left = (problem.cap - held).ravel().tolist()
    slots = _pour(times, lengths, below, left, rate)
    if slots is None:
        return None
    batch, block = np.divmod(np.array(slots, dtype=np.int64), world)
    np.add.at(load, (batch, block), problem.times[long:, 0])
    np.add.at(held, (batch, block), problem.lengths[long:])
    return Filled(
        objective=lockstep_objective(problem, load),
        block=np.concatenate([placed.block[which, :long], block]),
        batch=np.concatenate([placed.batch[which, :long], batch]),
        load=load,
        held=held,
        long=long,
    )


def _pour(times: list[int], lengths: list[int], below: list[int], left: list[int], rate: int) -> list[int] | None:
    """The slot of each short sequence, longest first: the one with most usable time that has the memory."""
    heap = [(-min(b, m * rate), slot) for slot, (b, m) in enumerate(zip(below, left, strict=True))]
    heapq.heapify(heap)
    slots = []
    for time, length in zip(times, lengths, strict=True):
        tight = []
        while heap and left[heap[0][1]] < length:
            tight.append(heapq.heappop(heap))
        if not heap:
            return None
        slot = heap[0][1]
        slots.append(slot)
        below[slot] -= time
        left[slot] -= length
        heapq.heapreplace(heap, (-min(below[slot], left[slot] * rate), slot))
        for entry in tight:
            heapq.heappush(heap, entry)
    return slots


def lockstep_objective(problem: Problem, load: Int64Array) -> int:
    """Nanoseconds of [M, W] loads when all ranks wait for each other in every micro-batch. Empty ones cost nothing."""
    slowest = load.max(axis=1)
    return int(slowest.sum()) + int((slowest > 0).sum()) * problem.constant


def repair(problem: Problem, filled: Filled) -> Filled:
    """`filled` after moves and swaps of short sequences off the fullest ranks."""
    load, held = filled.load.copy(), filled.held.copy()
    block, batch = filled.block.copy(), filled.batch.copy()
    rows = np.arange(filled.long, len(problem.lengths))
    stuck: set[int] = set()
    for _ in range(REPAIRS):
        open_batches = [m for m in range(len(load)) if m not in stuck]
        if not open_batches or not len(rows):
            break
        for m in open_batches:
            if _relieve(problem, (load, held, block, batch), rows, m):
                stuck.clear()
            else:
                stuck.add(m)
    return Filled(
        objective=lockstep_objective(problem, load), block=block, batch=batch, load=load, held=held, long=filled.long
    )


def _relieve(
    problem: Problem, state: tuple[Int64Array, Int64Array, Int64Array, Int64Array], rows: Int64Array, m: int
) -> bool:
    """Lower the fullest rank of micro-batch m by the best move or swap. False when none helps."""
    load, held, block, batch = state
    world, tops = problem.world, load.max(axis=1)
    rank = int(load[m].argmax())
    mine = rows[(batch[rows] == m) & (block[rows] == rank)]
    if not len(mine):
        return False
    times, lengths = problem.times[:, 0], problem.lengths
    # Partners: every short sequence elsewhere, and nothing at all on every rank.
    slots = np.concatenate([batch[rows] * world + block[rows], np.arange(load.size)])
    partner_time = np.concatenate([times[rows], np.zeros(load.size, dtype=np.int64)])
    partner_tokens = np.concatenate([lengths[rows], np.zeros(load.size, dtype=np.int64)])
    slack = np.repeat(tops, world) - load.ravel()
    left = problem.cap - held.ravel()
    gain = times[mine][:, None] - partner_time  # [mine, partners]
    tokens = lengths[mine][:, None] - partner_tokens
    value = np.minimum(gain, slack[slots] - gain)
    legal = (tokens <= left[slots]) & (-tokens <= left[m * world + rank]) & (slots != m * world + rank)
    value[~legal] = -1
    mover, partner = np.unravel_index(int(value.argmax()), value.shape)
    if value[mover, partner] <= 0:
        return False
    _exchange(
        problem, state, int(mine[mover]), (int(slots[partner]), int(rows[partner]) if partner < len(rows) else -1)
    )
    return True


def _exchange(
    problem: Problem,
    state: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
    row: int,
    partner: tuple[int, int],
) -> None:
    load, held, block, batch = state
    slot, other = partner
    here, there = (int(batch[row]), int(block[row])), divmod(slot, problem.world)
    time, tokens = problem.times[row, 0], problem.lengths[row]
    batch[row], block[row] = there
    if other >= 0:
        time, tokens = time - problem.times[other, 0], tokens - problem.lengths[other]
        batch[other], block[other] = here
    load[here] -= time
    load[there] += time
    held[here] -= tokens
    held[there] += tokens
