"""Small problems: a walk over single moves that does not stop at the first plan it cannot improve.

1. Every sequence is tried on every block of every micro-batch, as arrays over (sequence,
   micro-batch, block).
2. The best of these moves is made, even if it makes the step longer, except that a sequence moved
   lately stays put unless that gives the best plan so far.
3. The best plan met is the answer. The number of moves is bounded by counted work.

A tabu search (Glover 1989), for lockstep only. Few sequences leave the other parts of the planner
few places to even things out; with many, `repair.py` gets further in less time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.fill import Filled, completed

WORK = 600_000  # (sequence, micro-batch, block) triples that a walk may look at
MOST, FEWEST = 100, 20  # moves; with less than FEWEST affordable, none are made


def improved(problem: Problem, filled: Filled) -> Filled:
    """The best plan on a walk from `filled`."""
    rows, batches = len(filled.block), len(filled.load)
    moves = min(MOST, WORK // (rows * batches * len(problem.blocks.start)))
    if moves < FEWEST:
        return filled
    best, now = filled, filled
    free_from = np.zeros(rows, dtype=np.int64)  # the move from which on a row may be moved again
    for move in range(moves):
        objective = after_each_move(problem, now)
        least = objective.reshape(rows, -1).min(axis=1)
        least[(free_from > move) & (least >= best.objective)] = NEVER
        row = int(least.argmin())
        if least[row] >= NEVER:
            break
        batch, block = np.unravel_index(int(objective[row].argmin()), objective.shape[1:])
        now = _moved(problem, now, row, int(batch), int(block))
        free_from[row] = move + 2 + (rows + move) % 4
        if now.objective < best.objective:
            best = now
    return best


def _moved(problem: Problem, filled: Filled, row: int, batch: int, block: int) -> Filled:
    blocks, batches = filled.block.copy(), filled.batch.copy()
    blocks[row], batches[row] = block, batch
    return completed(problem, blocks, batches, len(filled.load))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Without:
    """What is left when each row in turn is taken away. load, held: [K, M, W]. crossed: [K, M, B],
    whether a block partly overlaps one in use. rows: [K, M] how many there are."""

    load: Int64Array
    held: Int64Array
    crossed: NDArray[np.bool_]
    rows: Int64Array


def after_each_move(problem: Problem, filled: Filled) -> Int64Array:
    """[K, M, B] the objective with one row moved there; NEVER where that is not legal, or where it
    stands."""
    blocks, rows, without = problem.blocks, np.arange(len(filled.block)), _without(problem, filled)
    time, need = (amount[:, None, blocks.shape_of] for amount in (problem.times, problem.needs))
    peak = without.load.max(axis=2)  # [K, M]
    within, held = (
        np.maximum.reduceat(state[:, :, blocks.ranks], blocks.first, axis=2)
        for state in (without.load, without.held)
    )
    spent = peak + (without.rows > 0) * problem.constant
    others = spent.sum(axis=1, keepdims=True) - spent
    objective: Int64Array = (
        others[:, :, None] + np.maximum(peak[:, :, None], within + time) + problem.constant
    )
    objective[(held > problem.cap - need) | without.crossed] = NEVER
    objective[rows, filled.batch, filled.block] = NEVER
    return objective


def _without(problem: Problem, filled: Filled) -> _Without:
    blocks, rows = problem.blocks, np.arange(len(filled.block))
    shape = blocks.shape_of[filled.block]
    ranks = blocks.inside[filled.block, : problem.world]  # [K, W] whether a row is on a rank
    states = []
    for total, amount in ((filled.load, problem.times), (filled.held, problem.needs)):
        state = np.repeat(total[None], len(rows), axis=0)
        state[rows, filled.batch] -= amount[rows, shape][:, None] * ranks
        states.append(state)
    there = np.zeros((len(rows), len(filled.load)), dtype=np.int64)
    there[rows, filled.batch] = 1
    crossing = blocks.crossing[filled.block].astype(np.int64)  # [K, B]
    crossed = (there.T @ crossing)[None] - there[:, :, None] * crossing[:, None, :]
    return _Without(
        load=states[0], held=states[1], crossed=crossed > 0, rows=there.sum(axis=0)[None] - there
    )
