"""Small changes that make a complete candidate faster: the fullest rank of each micro-batch gives something away.

A sequence that stands on that rank alone is moved to where the most slack remains, or swapped for a shorter one, until
nothing helps. Each change is the best of all pairs, so few are needed.
"""

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.fill import Filled, lockstep_objective
from hf_flexseq.planner.problem import Problem

REPAIRS = 100  # rounds over the micro-batches


def repair(problem: Problem, filled: Filled) -> Filled:
    """`filled` after moves and swaps off the fullest ranks."""
    state = (filled.load.copy(), filled.held.copy(), filled.block.copy(), filled.batch.copy())
    load, held, block, batch = state
    rows = np.flatnonzero(block < problem.world)
    active = list(range(len(load)))
    for _ in range(REPAIRS):
        active = [m for m in active if _relieve(problem, state, rows, m)]
        if not active:
            break
    return Filled(objective=lockstep_objective(problem, load), block=block, batch=batch, load=load, held=held)


State = tuple[Int64Array, Int64Array, Int64Array, Int64Array]


def _relieve(problem: Problem, state: State, rows: Int64Array, m: int) -> bool:
    """Lower the fullest rank of micro-batch m by the best move or swap. False when none helps."""
    load, held, block, batch = state
    world, times, lengths = problem.world, problem.times[:, 0], problem.lengths
    rank = int(load[m].argmax())
    mine = rows[(batch[rows] == m) & (block[rows] == rank)]
    if not len(mine):
        return False
    # Partners: every sequence that stands alone elsewhere, and nothing at all on every rank.
    slots = np.concatenate([batch[rows] * world + block[rows], np.arange(load.size)])
    nothing = np.zeros(load.size, dtype=np.int64)
    gain = times[mine][:, None] - np.concatenate([times[rows], nothing])  # [mine, partners]
    tokens = lengths[mine][:, None] - np.concatenate([lengths[rows], nothing])
    slack = (load.max(axis=1)[:, None] - load).ravel()[slots]
    left = (problem.cap - held).ravel()[slots]
    value = np.minimum(gain, slack - gain)
    value[(tokens > left) | (-tokens > problem.cap - held[m, rank]) | (slots == m * world + rank)] = -1
    mover, partner = np.unravel_index(int(value.argmax()), value.shape)
    if value[mover, partner] <= 0:
        return False
    other = int(rows[partner]) if partner < len(rows) else None
    _exchange(problem, state, int(mine[mover]), int(slots[partner]), other)
    return True


def _exchange(problem: Problem, state: State, row: int, slot: int, other: int | None) -> None:
    """Move a row to a slot, and the row `other` from there to where the first one stood."""
    load, held, block, batch = state
    here, there = (int(batch[row]), int(block[row])), divmod(slot, problem.world)
    time, tokens = problem.times[row, 0], problem.lengths[row]
    batch[row], block[row] = there
    if other is not None:
        time, tokens = time - problem.times[other, 0], tokens - problem.lengths[other]
        batch[other], block[other] = here
    load[here] -= time
    load[there] += time
    held[here] -= tokens
    held[there] += tokens
