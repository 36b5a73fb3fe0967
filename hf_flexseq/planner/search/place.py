"""Place the long sequences of many candidate plans at once, as arrays over (candidate,
micro-batch, block).

A candidate is a time target for each micro-batch. A plan is good when every rank is as busy as its
micro-batch's target says: time above a target makes all ranks wait, time below it is lost. So each
long sequence goes where it costs least of both:

1. Walk over the sequences, longest first. All candidates take each step together.
2. Score every block of every micro-batch by the nanoseconds that the step would become longer:

       max(nanoseconds above the target, -nanoseconds below the target / ranks)
           + device-nanoseconds wasted / ranks

Wasted are device-nanoseconds above those at the sequence's cheapest degree. Of blocks below the
target the emptiest is best (worst fit). All terms are nanoseconds of the objective, so they add.
3. Put the sequence on the block with the least score, among those whose ranks have memory left.
4. Count its time and tokens on that block and on all blocks that share ranks with it. A block's
   load is its fullest rank's.
5. Raise the micro-batch's target to the load that the block has reached: all ranks wait for it
   anyway.

The slow twin is `placed_one_by_one` in tests/planner/brute.py: one candidate, one rank at a time;
tests/planner/test_parts.py compares the two.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem

# Ranks that the time below the target is divided by, at least: on few ranks a whole rank's share
# would outweigh what is wasted. A power of two.
FIT_RANKS = 256
# Forced shape of a row that may take any shape.
ANY_SHAPE = -1

# First index of arrays that hold both of a block's figures.
TIME, TOKENS = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """The ways to start a plan that are tried together."""

    targets: Int64Array
    """[candidates, micro_batches] nanoseconds that each micro-batch should take."""
    long_rows: int
    """How many sequences, from the longest on, count as long."""
    forced_shapes: Int64Array
    """[candidates, forced rows] Shape of the first rows' blocks; ANY_SHAPE leaves it open."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """The long sequences of all candidates on their blocks."""

    targets: Int64Array
    """[candidates, micro_batches] nanoseconds, raised where the long sequences take more."""
    load: Int64Array
    """[candidates, micro_batches, ranks] nanoseconds."""
    tokens: Int64Array
    """[candidates, micro_batches, ranks] tokens."""
    row2block: Int64Array
    """[candidates, long rows] block of each long sequence."""
    row2batch: Int64Array
    """[candidates, long rows] micro-batch of each long sequence."""
    fits: NDArray[np.bool_]
    """[candidates] whether memory sufficed for all long sequences."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Board:
    """All candidates while rows are placed. A page is one micro-batch of one candidate."""

    over: Int64Array
    """[2, pages, blocks] Nanoseconds above the target, tokens above the cap, of the fullest rank.
    """
    misfit: Int64Array
    """[pages, blocks] nanoseconds that any row costs there at least, see `_misfit`."""
    targets: Int64Array
    """[pages] nanoseconds."""
    fits: NDArray[np.bool_]
    """[candidates] whether memory has sufficed so far."""


def place_long(problem: Problem, candidates: Candidates) -> Placement:
    """Place all candidates' long sequences on blocks, longest first."""
    blocks = problem.blocks
    count, batches = candidates.targets.shape
    rows = candidates.long_rows
    # 1. Every rank of the empty board is below its target and its cap by all of them.
    targets = candidates.targets.reshape(-1)  # [pages]
    over = np.empty((2, count * batches, len(blocks.start)), dtype=np.int64)
    over[TIME] = -targets[:, None]
    over[TOKENS] = -problem.cap
    board = _Board(
        over=over,
        misfit=_misfit(problem, over[TIME]),
        targets=targets.copy(),
        fits=np.ones(count, dtype=np.bool_),
    )
    # 2. Row by row.
    row2slot = np.zeros((rows, count), dtype=np.int64)
    for row, table in enumerate(_tables(problem, rows)):
        score = _scores(board, table)  # [candidates, micro_batches, blocks]
        if row < candidates.forced_shapes.shape[1]:
            shape = candidates.forced_shapes[:, row, None]  # [candidates, 1]
            other = (shape != ANY_SHAPE) & (shape != blocks.shape_of)  # [candidates, blocks]
            np.copyto(score, NEVER, where=other[:, None])
        score = score.reshape(count, -1)  # [candidates, micro_batches * blocks]
        slot = score.argmin(axis=1)  # [candidates]
        row2slot[row] = slot
        board.fits[:] &= score[np.arange(count), slot] < NEVER
        _put(problem, board, table, slot)
    # 3. What the board says; block r < world is rank r alone.
    row2batch, row2block = np.divmod(row2slot.T, len(blocks.start))
    on_ranks = board.over[:, :, : problem.world]  # [2, pages, ranks]
    by_rank = (count, batches, problem.world)
    return Placement(
        targets=board.targets.reshape(count, batches),
        load=(on_ranks[TIME] + board.targets[:, None]).reshape(by_rank),
        tokens=(on_ranks[TOKENS] + problem.cap).reshape(by_rank),
        row2block=row2block,
        row2batch=row2batch,
        fits=board.fits,
    )


def _tables(problem: Problem, rows: int) -> Int64Array:
    """Return the costs of each of the first `rows` rows on each block, [rows, 3, blocks]:
    nanoseconds, nanoseconds wasted for each rank of the world, and tokens."""
    degrees = np.array([degree for degree, _ in problem.blocks.shapes])  # [shapes]
    possible = problem.needs[:rows] < NEVER  # [rows, shapes]
    times = np.where(possible, problem.times[:rows], 0)
    wasted = times * degrees - problem.least_area[:rows, None]  # device-nanoseconds
    wasted = np.where(possible, wasted, 0) // problem.world
    by_shape = np.stack([times, wasted, problem.needs[:rows]], axis=1)  # [rows, 3, shapes]
    by_block: Int64Array = by_shape.take(problem.blocks.shape_of, axis=2)
    return by_block


def _misfit(problem: Problem, over: Int64Array) -> Int64Array:
    """Return [pages, blocks] minus the nanoseconds below the target for each rank of the world."""
    # Divide by the ranks of the world, rounded up to a power of two.
    misfit: Int64Array = over >> (max(problem.world, FIT_RANKS) - 1).bit_length()
    return misfit


def _scores(board: _Board, table: Int64Array) -> Int64Array:
    """Return [candidates, micro_batches, blocks] nanoseconds of objective that a row costs there.

    NEVER where memory is short. table: [3, blocks], see `_tables`.
    """
    time, wasted, need = table
    # 1. Time above the target with the row, at least the price of the time below the target.
    score: Int64Array = np.maximum(board.over[TIME] + time, board.misfit)  # [pages, blocks]
    # 2. Device time that a cheaper degree would save.
    score += wasted
    # 3. Memory.
    np.copyto(score, NEVER, where=board.over[TOKENS] > -need)
    return score.reshape(len(board.fits), -1, len(time))


def _put(problem: Problem, board: _Board, table: Int64Array, slot: Int64Array) -> None:
    """Add a row to one slot [candidates] of each candidate that still fits."""
    blocks = problem.blocks
    which = np.arange(len(slot))  # [candidates]
    batch, block = np.divmod(slot, len(blocks.start))  # [candidates] each
    page = which * (len(board.targets) // len(slot)) + batch  # [candidates]
    added = table[::2, block] * board.fits  # [2, candidates] time and tokens
    over = board.over.take(page, axis=1)  # [2, candidates, blocks], a copy
    # 1. The block itself and the smaller blocks inside it.
    over += added[:, :, None] * blocks.inside.take(block, axis=0)
    # 2. The larger blocks around it: their fullest rank is the one they had, or the block's, since
    #    nothing outside of the block has changed.
    reached = over[:, which, block]  # [2, candidates]
    around = blocks.around.take(block, axis=0)  # [candidates, blocks]
    np.maximum(over, reached[:, :, None], out=over, where=around)
    # 3. The target rises to what the block has reached.
    rise = np.maximum(reached[TIME], 0)  # [candidates]
    over[TIME] -= rise[:, None]
    board.targets[page] += rise
    board.over[:, page] = over
    board.misfit[page] = _misfit(problem, over[TIME])
