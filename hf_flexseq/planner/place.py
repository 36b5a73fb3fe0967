"""Placing the long sequences of many candidate plans at once, as arrays over (candidate, micro-batch, block).

A candidate is a time target per micro-batch. Its long sequences go, longest first, to the block with the least

    max(nanoseconds above the target, fit / ranks x nanoseconds below it) + device-nanoseconds wasted / ranks

among those with memory left. Both terms are nanoseconds of objective, so they add; `fit` is 1 for best fit and -1 for
worst fit. A sequence that ends above a micro-batch's target raises that target, because
all ranks wait for it anyway. A block's load is its fullest rank's.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem

FIT_RANKS = 256  # at least: on few ranks a whole rank's share would outweigh what is wasted; a power of two
ANY_SHAPE = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """C ways to start. targets: [C, M] nanoseconds. fit: [C]. long: [C], how many rows count as long, falling.
    shapes: [C, F] the shape of block that each of the first F rows must take; ANY_SHAPE leaves it open."""

    targets: Int64Array
    fit: Int64Array
    long: Int64Array
    shapes: Int64Array

    def take(self, rows: Int64Array) -> "Candidates":
        return Candidates(
            targets=self.targets[rows], fit=self.fit[rows], long=self.long[rows], shapes=self.shapes[rows]
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """Where the long rows stand. targets: [C, M], as raised. ok: [C], whether memory sufficed.

    state: [2, C, M, blocks] nanoseconds and tokens of each block's fullest rank; tokens are NEVER where a block partly
    overlaps one in use. block, batch: [C, most long rows], of each long row.
    """

    targets: Int64Array
    state: Int64Array
    block: Int64Array
    batch: Int64Array
    ok: NDArray[np.bool_]

    def rank_state(self, world: int) -> Int64Array:
        """[2, C, M, ranks] nanoseconds and tokens of each rank."""
        return self.state[:, :, :, :world]


def place_long(problem: Problem, candidates: Candidates) -> Placement:
    """All candidates' long sequences on the blocks."""
    (count, batches), blocks = candidates.targets.shape, problem.blocks
    rows = int(candidates.long.max(initial=0))
    placed = Placement(
        targets=candidates.targets.copy(),
        state=np.zeros((2, count, batches, len(blocks.start)), dtype=np.int64),
        block=np.zeros((count, rows), dtype=np.int64),
        batch=np.zeros((count, rows), dtype=np.int64),
        ok=np.ones(count, dtype=np.bool_),
    )
    degrees = np.array([degree for degree, _ in blocks.shapes])
    fits = problem.needs < NEVER
    areas = np.where(fits, problem.times, 0) * degrees
    waste = np.where(fits, areas - problem.least_area[:, None], 0) // problem.world
    for row in range(rows):
        active = int((candidates.long > row).sum())  # a prefix, since `long` falls
        first = int(problem.first_fit[row])
        score = _scores(problem, placed, candidates.fit[:active], row, waste[row])
        if row < candidates.shapes.shape[1]:
            _only(problem, score, candidates.shapes[:active, row], first)
        best = score.argmin(axis=1)
        placed.ok[:active] &= score[np.arange(active), best] < NEVER
        batch, block = np.divmod(best, len(blocks.start) - first)
        _put(problem, placed, row, batch, block + first)
    return placed


def _scores(problem: Problem, placed: Placement, fit: Int64Array, row: int, waste: Int64Array) -> Int64Array:
    """[C, M x blocks] nanoseconds of objective that putting a row there costs, NEVER where memory is short.

    Of the blocks, those that are wide enough for the row.
    """
    first, count = int(problem.first_fit[row]), len(fit)
    shape_of = problem.blocks.shape_of[first:]
    load, held = placed.state[:, :count, :, first:]
    free = placed.targets[:count, :, None] - load
    score = problem.times[row][shape_of] - free
    if problem.free:
        score += (held == 0) * problem.constant
    free *= fit[:, None, None]
    free >>= (max(problem.world, FIT_RANKS) - 1).bit_length()
    np.maximum(score, free, out=score)
    score += waste[shape_of]
    np.copyto(score, NEVER, where=held > problem.cap - problem.needs[row][shape_of])
    flat: Int64Array = score.reshape(count, -1)
    return flat


def _only(problem: Problem, score: Int64Array, shape: Int64Array, first: int) -> None:
    """Make the blocks from `first` on impossible that have not the shape [C] asked for."""
    other = (shape[:, None] != ANY_SHAPE) & (shape[:, None] != problem.blocks.shape_of[first:])  # [C, blocks]
    np.copyto(score, NEVER, where=np.tile(other, score.shape[1] // other.shape[1]))


def _put(problem: Problem, placed: Placement, row: int, batch: Int64Array, block: Int64Array) -> None:
    """Add a row to one micro-batch's block in each of the first candidates, as far as they are still ok."""
    blocks, which = problem.blocks, np.arange(len(block))
    placed.batch[which, row], placed.block[which, row] = batch, block
    shape, ok = blocks.shape_of[block], placed.ok[: len(block)]
    if problem.free:
        opened = (placed.state[1, which, batch, block] == 0) * problem.constant
        _meet(problem, placed, block, (problem.times[row][shape] + opened) * ok)
    else:
        load, reached = _added(problem, placed.state[0, which, batch], block, problem.times[row][shape] * ok)
        placed.state[0, which, batch] = load
        placed.targets[which, batch] = np.maximum(placed.targets[which, batch], reached)
    held, _ = _added(problem, placed.state[1, which, batch], block, problem.needs[row][shape] * ok)
    if blocks.overlap:
        held[blocks.crossing[block]] = NEVER
    placed.state[1, which, batch] = held


def _added(
    problem: Problem, state: Int64Array, block: Int64Array, amount: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """[C, blocks] with `amount` [C] more on every rank of `block` [C], and what the fullest of them has then."""
    state = state + amount[:, None] * problem.blocks.inside[block]
    reached = state[np.arange(len(block)), block]
    # A larger block's fullest rank is its own or the fullest in here: nothing outside has changed.
    return np.maximum(state, reached[:, None] * problem.blocks.around[block]), reached


def _meet(problem: Problem, placed: Placement, block: Int64Array, amount: Int64Array) -> None:
    """The ranks of `block` [C] wait for the last of them, then work `amount`: clocks that all micro-batches share."""
    which = np.arange(len(block))
    clock = placed.state[0, which, 0]
    reached = (clock[which, block] + amount)[:, None]
    clock = np.where(problem.blocks.inside[block], reached, np.maximum(clock, reached * problem.blocks.around[block]))
    placed.state[0, which] = clock[:, None]
    placed.targets[which] = np.maximum(placed.targets[which], reached)
