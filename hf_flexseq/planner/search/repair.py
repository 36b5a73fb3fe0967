"""Small changes that make a complete candidate faster: the fullest rank of each micro-batch gives
something away.

1. A sequence that stands on that rank alone is moved to where the most slack remains, or swapped
   for a shorter one.
2. Where that does not help, any sequence on that rank is moved to the block where the most slack
   remains, which may be wider or narrower.

Until nothing helps. Each change is the best of all pairs, so few are needed.
"""

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import Problem
from hf_flexseq.planner.search.fill import Filled, completed, free_clocks, lockstep_objective

REPAIRS = 100  # rounds over the micro-batches
WORK = 300_000  # (micro-batch, rank of a block) pairs that changes of degree may look at


def repair(problem: Problem, filled: Filled) -> Filled:
    """`filled` after moves and swaps off the fullest ranks."""
    if problem.free:
        return _repair_free(problem, filled)
    state = _copied(filled)
    load, held, block, batch = state
    active = list(range(len(load)))
    reshapes = WORK // (len(load) * len(problem.blocks.ranks))
    for _ in range(REPAIRS):
        stuck = [m for m in active if not _relieve(problem, state, m)]
        helped = [m for m in stuck[:reshapes] if _reshape(problem, state, m)]
        reshapes = max(0, reshapes - len(stuck))
        active = [m for m in active if m in helped or m not in stuck]
        if not active:
            break
    return Filled(
        objective=lockstep_objective(problem, load), block=block, batch=batch, load=load, held=held
    )


State = tuple[Int64Array, Int64Array, Int64Array, Int64Array]


def _copied(filled: Filled) -> State:
    return filled.load.copy(), filled.held.copy(), filled.block.copy(), filled.batch.copy()


def _repair_free(problem: Problem, filled: Filled) -> Filled:
    """The same for free ranks: the rank that ends last gives something to one that ends early."""
    state = load, held, block, batch = _copied(filled)
    clock = free_clocks(problem, block, batch, load)
    for _ in range(REPAIRS):
        last = int(clock.argmax())
        slack = clock[last] - clock - (held == 0) * problem.constant  # [M, W]
        found = _best_exchange(problem, state, np.flatnonzero(block == last), slack.ravel())
        if not found:
            break
        kept = block.copy(), batch.copy()
        _exchange(problem, state, *found)
        before, clock = clock, free_clocks(problem, block, batch, load)
        if clock.max() > before.max():  # a group waits for what was moved
            return completed(problem, *kept, len(load))
    return completed(problem, block, batch, len(load))


def _relieve(problem: Problem, state: State, m: int) -> bool:
    """Lower the fullest rank of micro-batch m by the best move or swap. False when none helps."""
    load, _, block, batch = state
    mine = np.flatnonzero((batch == m) & (block == int(load[m].argmax())))
    found = _best_exchange(problem, state, mine, (load.max(axis=1)[:, None] - load).ravel())
    if found:
        _exchange(problem, state, *found)
    return found is not None


def _best_exchange(
    problem: Problem, state: State, mine: Int64Array, slack: Int64Array
) -> tuple[int, int, int | None] | None:
    """Which of `mine`, rows on one rank each, goes to which slot, and which other row comes from
    there, if any.

    A slot is micro-batch x W + rank; slack: [M x W] nanoseconds, nothing where the rows of `mine`
    stand.
    """
    if not len(mine):
        return None
    _, held, block, batch = state
    rows = np.flatnonzero(block < problem.world)
    times, lengths = problem.times[:, 0], problem.lengths
    # Partners: every sequence that stands alone elsewhere, and nothing at all on every rank.
    slots = np.concatenate([batch[rows] * problem.world + block[rows], np.arange(held.size)])
    nothing = np.zeros(held.size, dtype=np.int64)
    gain = times[mine][:, None] - np.concatenate([times[rows], nothing])  # [mine, partners]
    tokens = lengths[mine][:, None] - np.concatenate([lengths[rows], nothing])
    value = np.minimum(gain, slack[slots] - gain)
    left = problem.cap - held
    value[
        (tokens > left.ravel()[slots]) | (-tokens > left[batch[mine], block[mine]][:, None])
    ] = -1
    mover, partner = np.unravel_index(int(value.argmax()), value.shape)
    if value[mover, partner] <= 0:
        return None
    return (
        int(mine[mover]),
        int(slots[partner]),
        int(rows[partner]) if partner < len(rows) else None,
    )


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


def _reshape(problem: Problem, state: State, m: int) -> bool:
    """Lower the fullest rank of micro-batch m by moving a row from there to any block, wider and
    narrower ones, too. False when none helps."""
    load, _, block, batch = state
    here = problem.blocks.inside[block, int(load[m].argmax())]
    mine = np.flatnonzero((batch == m) & here)
    if not len(mine):
        return False
    slack = _slack_after(problem, state, mine, m)
    gain = problem.times[mine, problem.blocks.shape_of[block[mine]]]
    value = np.minimum(slack, gain[:, None, None])
    best = int(value.argmax())
    if value.flat[best] <= 0:
        return False
    mover, there, spot = np.unravel_index(best, value.shape)
    _carry(problem, state, int(mine[mover]), -1)
    block[mine[mover]], batch[mine[mover]] = spot, there
    _carry(problem, state, int(mine[mover]), 1)
    return True


def _slack_after(problem: Problem, state: State, mine: Int64Array, m: int) -> Int64Array:
    """[mine, M, B] nanoseconds below the micro-batch's fullest rank, as it is now, that the ranks
    of a block have left once a row of micro-batch m has moved there; -1 where memory or an
    overlapping block forbids it."""
    load, held, block, batch = state
    blocks = problem.blocks
    shape, on = blocks.shape_of[block[mine]], blocks.inside[block[mine], : problem.world]
    fullest = []  # of each block, [mine, M, B] nanoseconds and tokens
    for total, amount in ((load, problem.times), (held, problem.needs)):
        top = np.repeat(_fullest(problem, total)[None], len(mine), axis=0)
        top[:, m] = _fullest(problem, total[m] - amount[mine, shape][:, None] * on)
        fullest.append(top + amount[mine][:, None, blocks.shape_of])
    slack: Int64Array = load.max(axis=1)[None, :, None] - fullest[0]
    slack[fullest[1] > problem.cap] = -1
    for used in np.unique(batch) if blocks.overlap else ():
        slack[:, used, blocks.crossing[block[batch == used]].any(axis=0)] = -1
    return slack


def _fullest(problem: Problem, total: Int64Array) -> Int64Array:
    """[..., B] what the fullest rank of each block has, of [..., W]."""
    fullest: Int64Array = np.maximum.reduceat(
        total[:, problem.blocks.ranks], problem.blocks.first, axis=1
    )
    return fullest


def _carry(problem: Problem, state: State, row: int, sign: int) -> None:
    """Add a row to the ranks it stands on, or take it away."""
    load, held, block, batch = state
    b = block[row]
    ranks = slice(problem.blocks.start[b], problem.blocks.stop[b])
    load[batch[row], ranks] += sign * problem.times[row, problem.blocks.shape_of[b]]
    held[batch[row], ranks] += sign * problem.needs[row, problem.blocks.shape_of[b]]
