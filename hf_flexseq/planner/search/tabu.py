"""Small problems: a walk over single moves that does not stop at the first plan it cannot improve.

Few sequences leave the other stages few spots to even things out. A walk that may also go uphill
finds its way out of a dead end:

1. Price every move: every sequence on every block of every micro-batch, as arrays over (sequence,
   micro-batch, block).
2. Make the best of these moves, even if it makes the step longer. A sequence moved lately stays
   where it is, unless moving it gives the best plan so far: so the walk does not turn back at
   once.
3. Return the best plan met. The number of moves is bounded by counted work.

A tabu search (Glover 1989), for lockstep only. With many sequences `repair.py` gets further in
less time.

The slow twin is the test "every move is priced as a fresh count would" in tests/planner/
test_parts.py, which makes each move and counts the whole plan again.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.fill import Filled, completed


def improved(problem: Problem, filled: Filled) -> Filled:
    """Return the best plan on a walk from `filled`, or `filled` where moves cost too much work."""
    rows = len(filled.row2block)
    cells = rows * len(filled.load) * len(problem.blocks.start)
    moves = min(EFFORT.walk_most_moves, EFFORT.walk_cells // cells)
    if moves < EFFORT.walk_fewest_moves:
        return filled
    best = filled
    current = filled
    movable_from = np.zeros(rows, dtype=np.int64)  # move from which on a row may be moved again
    for move in range(moves):
        objective = after_each_move(problem, current)  # [sequences, micro_batches, blocks]
        least = objective.reshape(rows, -1).min(axis=1)  # [sequences]
        # 1. Sequences moved lately stay, unless moving them gives the best plan so far.
        moved_lately = movable_from > move
        least[moved_lately & (least >= best.objective)] = NEVER
        row = int(least.argmin())
        if least[row] >= NEVER:
            break
        # 2. The best move of the best sequence.
        batch, block = np.unravel_index(int(objective[row].argmin()), objective.shape[1:])
        current = _moved(problem, current, row, int(batch), int(block))
        # 3. Two to five moves of rest; a changing number keeps the walk out of cycles.
        movable_from[row] = move + 2 + (rows + move) % 4
        if current.objective < best.objective:
            best = current
    return best


def _moved(problem: Problem, filled: Filled, row: int, batch: int, block: int) -> Filled:
    """Return the plan with one row moved to a block of a micro-batch."""
    row2block = filled.row2block.copy()
    row2batch = filled.row2batch.copy()
    row2block[row] = block
    row2batch[row] = batch
    return completed(problem, row2block, row2batch, len(filled.load))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Without:
    """The rest of a plan when each row in turn is taken away; the first index is that row."""

    load: Int64Array
    """[sequences, micro_batches, ranks] nanoseconds."""
    tokens: Int64Array
    """[sequences, micro_batches, ranks] tokens."""
    crossed: NDArray[np.bool_]
    """[sequences, micro_batches, blocks] whether a block partly overlaps one in use."""
    rows: Int64Array
    """[sequences, micro_batches] how many rows there are."""


def after_each_move(problem: Problem, filled: Filled) -> Int64Array:
    """Return [sequences, micro_batches, blocks] the objective in ns with one row moved there.

    NEVER where the move is not legal, and where the row is already.
    """
    blocks = problem.blocks
    rows = np.arange(len(filled.row2block))
    without = _without(problem, filled)
    # 1. What the row adds to each block: [sequences, shapes] -> [sequences, 1, blocks].
    time = problem.times[:, None, blocks.shape_of]
    need = problem.needs[:, None, blocks.shape_of]
    # 2. The fullest rank of each block without the row: [..., ranks] -> [..., blocks].
    load = np.maximum.reduceat(without.load[:, :, blocks.ranks], blocks.first, axis=2)
    tokens = np.maximum.reduceat(without.tokens[:, :, blocks.ranks], blocks.first, axis=2)
    # 3. The micro-batch with the row, and all others.
    slowest = without.load.max(axis=2)  # [sequences, micro_batches]
    batch_ns = slowest + (without.rows > 0) * problem.constant  # [sequences, micro_batches]
    others_ns = batch_ns.sum(axis=1, keepdims=True) - batch_ns  # [sequences, micro_batches]
    with_row = np.maximum(slowest[:, :, None], load + time)  # [sequences, micro_batches, blocks]
    objective: Int64Array = others_ns[:, :, None] + with_row + problem.constant
    # 4. What is not legal, or no move.
    no_memory = tokens > problem.cap - need
    objective[no_memory | without.crossed] = NEVER
    objective[rows, filled.row2batch, filled.row2block] = NEVER
    return objective


def _without(problem: Problem, filled: Filled) -> _Without:
    """Return what is left of a plan when each row in turn is taken away."""
    blocks = problem.blocks
    count = len(filled.row2block)
    rows = np.arange(count)
    shape = blocks.shape_of[filled.row2block]  # [sequences]
    on_rank = blocks.inside[filled.row2block, : problem.world]  # [sequences, ranks]
    # 1. Time and tokens of every rank.
    load = np.repeat(filled.load[None], count, axis=0)  # [sequences, micro_batches, ranks]
    load[rows, filled.row2batch] -= problem.times[rows, shape][:, None] * on_rank
    tokens = np.repeat(filled.tokens[None], count, axis=0)  # [sequences, micro_batches, ranks]
    tokens[rows, filled.row2batch] -= problem.needs[rows, shape][:, None] * on_rank
    # 2. Blocks that partly overlap one in use: count the rows on such blocks, without the row
    #    itself.
    in_batch = np.zeros((count, len(filled.load)), dtype=np.int64)  # [sequences, micro_batches]
    in_batch[rows, filled.row2batch] = 1
    crossing = blocks.crossing[filled.row2block].astype(np.int64)  # [sequences, blocks]
    crossing_all = in_batch.T @ crossing  # [micro_batches, blocks]
    # [sequences, micro_batches, 1] x [sequences, 1, blocks] -> [sequences, micro_batches, blocks]
    crossing_own = in_batch[:, :, None] * crossing[:, None, :]
    return _Without(
        load=load,
        tokens=tokens,
        crossed=crossing_all[None] - crossing_own > 0,
        rows=in_batch.sum(axis=0)[None] - in_batch,
    )
