"""Place the long sequences of many candidate plans at once, as arrays over (candidate,
micro-batch, block).

A candidate is a time target for each micro-batch. A plan is good when every rank is as busy as its
micro-batch's target says: time above a target makes all ranks wait, time below it is lost. So each
long sequence goes where it costs least of both:

1. Walk over the sequences, longest first. All candidates take each step together.
2. Score every block of every micro-batch by the nanoseconds that the step would become longer:

       max(nanoseconds above the target, fit / ranks x nanoseconds below the target)
           + device-nanoseconds wasted / ranks

Wasted are device-nanoseconds above those at the sequence's cheapest degree. `fit` is 1 for best
fit and -1 for worst fit. All terms are nanoseconds of the objective, so they add.
3. Put the sequence on the block with the least score, among those whose ranks have memory left.
4. Count its time and tokens on that block and on all blocks that share ranks with it. A block's
   load is that of its fullest rank.
5. Raise the micro-batch's target to what the block has reached: all ranks wait for it anyway.

Time is counted in ticks of a power of two nanoseconds, so that arrays of 32 bits hold it: on
arrays this small their width is most of the work.

The slow twin is `placed_one_by_one` in tests/planner/brute.py: one candidate, one rank at a time;
tests/planner/test_parts.py compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem

# Ranks that `fit` is divided by, at least: on few ranks a whole rank's share would outweigh what
# is wasted. A power of two.
FIT_RANKS = 256
# Forced shape of a row that may take any shape.
ANY_SHAPE = -1
# Ticks or tokens of what is not possible. All else stays so far below that 32 bits hold any sum.
FAR = 2**30

# First index of arrays that hold both of a block's figures.
TIME, TOKENS = 0, 1

IntArray = NDArray[np.integer]
"""Whole numbers of 32 bits where all ticks and tokens fit, of 64 bits otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """The ways to start a plan that are tried together, those with most long rows first."""

    targets: Int64Array
    """[candidates, micro_batches] nanoseconds that each micro-batch should take."""
    fit: Int64Array
    """[candidates] 1 for best fit, -1 for worst fit."""
    long_rows: Int64Array
    """[candidates] how many sequences, from the longest on, count as long; falling."""
    forced_shapes: Int64Array
    """[candidates, forced rows] Shape of the first rows' blocks; ANY_SHAPE leaves it open."""

    def take(self, rows: Int64Array) -> "Candidates":
        """Return the candidates with these indices [chosen]."""
        arrays = {one.name: getattr(self, one.name)[rows] for one in fields(self)}
        return Candidates(**arrays)


def joined(candidates: Sequence[Candidates]) -> Candidates:
    """Return all candidates in one, in their order."""
    arrays = {}
    for one in fields(Candidates):
        arrays[one.name] = np.concatenate([getattr(some, one.name) for some in candidates])
    return Candidates(**arrays)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """The long sequences of all candidates on their blocks."""

    targets: Int64Array
    """[candidates, micro_batches] nanoseconds, raised to what the long sequences take."""
    block_state: Int64Array
    """[2, candidates, micro_batches, blocks] nanoseconds and tokens of each block's fullest rank;
    tokens are NEVER where a block partly overlaps one in use."""
    row2block: Int64Array
    """[candidates, most long rows] block of each long sequence."""
    row2batch: Int64Array
    """[candidates, most long rows] micro-batch of each long sequence."""
    fits: NDArray[np.bool_]
    """[candidates] whether memory sufficed for all long sequences."""

    def rank_state(self, world: int) -> Int64Array:
        """Return [2, candidates, micro_batches, ranks] nanoseconds and tokens of each rank."""
        return self.block_state[:, :, :, :world]  # block r < world is rank r alone


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Board:
    """All candidates while rows are placed. A page is one micro-batch of one candidate."""

    over: IntArray
    """[2, pages, blocks] Ticks above the target, tokens above the cap, of the fullest rank."""
    misfit: IntArray
    """[pages, blocks] ticks that any row costs there at least, for time left below the target."""
    targets: IntArray
    """[pages] ticks."""
    tables: IntArray
    """[most long rows, 3, shapes] ticks, ticks wasted for each rank of the world, and tokens."""
    slot2shape: Int64Array
    """[micro_batches * blocks] shape of the block of each slot."""
    minus_fit: IntArray
    """[candidates] -1 for best fit, 1 for worst fit."""
    fits: NDArray[np.bool_]
    """[candidates] whether memory has sufficed so far."""
    score: IntArray
    """[candidates, micro_batches * blocks] space for the scores of one row."""
    short: NDArray[np.bool_]
    """[candidates, micro_batches * blocks] space for where memory is short."""
    constant: int
    """Ticks of a micro-batch, whatever is in it."""

    @property
    def batches(self) -> int:
        return len(self.targets) // len(self.fits)


def place_long(problem: Problem, candidates: Candidates) -> Placement:
    """Place all candidates' long sequences on blocks, longest first."""
    count = len(candidates.targets)
    rows = int(candidates.long_rows.max(initial=0))
    tick = tick_bits(problem, candidates)
    board = _empty_board(problem, candidates, rows, tick)
    row2slot = np.zeros((rows, count), dtype=np.int64)
    which = np.arange(count)
    for row, active in enumerate(_active_candidates(candidates.long_rows, rows)):
        score = _scores(problem, board, active, row)  # [active, micro_batches * blocks]
        if row < candidates.forced_shapes.shape[1]:
            _forbid_other_shapes(board, score, candidates.forced_shapes[:active, row])
        slot = score.argmin(axis=1)  # [active]
        row2slot[row, :active] = slot
        board.fits[:active] &= score[which[:active], slot] < FAR
        _put(problem, board, row, slot, which[:active])
    return _placement(problem, board, row2slot, tick)


def _placement(problem: Problem, board: _Board, row2slot: Int64Array, tick: int) -> Placement:
    """Read the placement off a board, in nanoseconds, with [most long rows, candidates] slots."""
    count = len(board.fits)
    row2batch, row2block = np.divmod(row2slot.T, len(problem.blocks.start))
    # [2, pages, blocks] -> [2, candidates, micro_batches, blocks]
    over = board.over.reshape(2, count, board.batches, -1).astype(np.int64)
    targets = board.targets.reshape(count, board.batches).astype(np.int64)
    load = (over[TIME] + targets[:, :, None]) << tick
    tokens = np.where(over[TOKENS] < FAR, over[TOKENS] + problem.cap, NEVER)
    return Placement(
        targets=targets << tick,
        block_state=np.stack([load, tokens]),
        row2block=row2block,
        row2batch=row2batch,
        fits=board.fits,
    )


def _active_candidates(long_rows: Int64Array, rows: int) -> list[int]:
    """Return [rows] how many candidates, from the first on, count each row as long."""
    shorter = np.searchsorted(long_rows[::-1], np.arange(rows), side="right")
    active: list[int] = (len(long_rows) - shorter).tolist()
    return active


def tick_bits(problem: Problem, candidates: Candidates) -> int:
    """Return the power of two of a tick's nanoseconds, so large that no load comes near FAR."""
    slowest = np.where(problem.times < NEVER, problem.times, 0).max(axis=1)  # [sequences]
    largest_target = int(candidates.targets.max(initial=0))
    most = int(slowest.sum()) + largest_target  # nanoseconds
    bits = most.bit_length() - FAR.bit_length() + 3  # 3: a load is below a quarter of FAR
    return max(0, bits)


def _empty_board(problem: Problem, candidates: Candidates, rows: int, tick: int) -> _Board:
    """Return the board on which no sequence stands yet."""
    blocks = problem.blocks
    count, batches = candidates.targets.shape
    slots = batches * len(blocks.start)
    width = np.int32 if 4 * int(problem.lengths.sum()) < FAR else np.int64
    # 1. What each long row takes on each shape: time, waste for each rank, tokens.
    degrees = np.array([degree for degree, _ in blocks.shapes])  # [shapes]
    possible = problem.needs[:rows] < NEVER  # [rows, shapes]
    times = np.where(possible, problem.times[:rows], 0)
    wasted = times * degrees - problem.least_area[:rows, None]  # device-nanoseconds
    wasted = np.where(possible, wasted, 0) // problem.world
    needs = np.where(possible, problem.needs[:rows], FAR)
    tables = np.stack([times >> tick, wasted >> tick, needs], axis=1)  # [rows, 3, shapes]
    # 2. Every rank is below its target and its cap by all of them.
    targets = candidates.targets.reshape(-1) >> tick  # [pages]
    over = np.empty((2, count * batches, len(blocks.start)), dtype=width)
    over[TIME] = -targets[:, None]
    over[TOKENS] = -problem.cap
    minus_fit = -candidates.fit
    page_minus_fit: IntArray = np.repeat(minus_fit, batches).astype(width)  # [pages]
    return _Board(
        over=over,
        misfit=_misfit(problem, over[TIME], page_minus_fit),
        targets=targets.astype(width),
        tables=tables.astype(width),
        slot2shape=np.tile(blocks.shape_of, batches),
        minus_fit=minus_fit.astype(width),
        fits=np.ones(count, dtype=np.bool_),
        score=np.empty((count, slots), dtype=width),
        short=np.empty((count, slots), dtype=np.bool_),
        constant=problem.constant >> tick,
    )


def _misfit(problem: Problem, over: IntArray, minus_fit: IntArray) -> IntArray:
    """Return [..., blocks] the ticks that the time left below the target costs, for fits [...]."""
    # Divide by the ranks of the world, rounded up to a power of two.
    bits = (max(problem.world, FIT_RANKS) - 1).bit_length()
    misfit: IntArray = (over * minus_fit[..., None]) >> bits
    return misfit


def _scores(problem: Problem, board: _Board, active: int, row: int) -> IntArray:
    """Return [active, micro_batches * blocks] ticks of objective that a row costs on each slot.

    FAR where memory is short. The array is the board's own and lasts until the next call.
    """
    count = len(board.fits)
    score = board.score[:active]
    short = board.short[:active]
    time, wasted, need = board.tables[row].take(board.slot2shape, axis=1)  # each [slots]
    # [2, pages, blocks] -> [2, active, micro_batches * blocks]
    over_target, over_cap = board.over.reshape(2, count, -1)[:, :active]
    # 1. Time above the target, with the row.
    np.add(over_target, time, out=score)
    if problem.free:
        # A first sequence also starts the micro-batch on these ranks.
        score += (over_cap == -problem.cap) * np.int32(board.constant)
    # 2. At least the price of the time below the target.
    misfit = board.misfit.reshape(count, -1)[:active]
    np.maximum(score, misfit, out=score)
    # 3. Device time that a cheaper degree would save.
    score += wasted
    # 4. Memory.
    np.greater(over_cap, -need, out=short)
    np.copyto(score, FAR, where=short)
    return score


def _forbid_other_shapes(board: _Board, score: IntArray, shape: Int64Array) -> None:
    """Set the score of all blocks to FAR that have not the shape [active] asked for."""
    forced = shape[:, None] != ANY_SHAPE  # [active, 1]
    other = shape[:, None] != board.slot2shape  # [active, micro_batches * blocks]
    np.copyto(score, FAR, where=forced & other)


def _put(problem: Problem, board: _Board, row: int, slot: Int64Array, which: Int64Array) -> None:
    """Add a row to one slot [active] of each candidate `which` [active] that still fits."""
    blocks = problem.blocks
    fits = board.fits[: len(which)]  # [active]
    batch, block = np.divmod(slot, len(blocks.start))  # [active] each
    page = which * board.batches + batch  # [active]
    # 1. What the row adds: time and tokens of the block's shape, the first and last of its table.
    shape = blocks.shape_of[block]
    added = board.tables[row].take(shape, axis=1)[::2] * fits  # [2, active]
    over = board.over.take(page, axis=1)  # [2, active, blocks], a copy
    if problem.free:
        empty = over[TOKENS, which, block] == -problem.cap
        added[TIME] += empty * np.int32(board.constant) * fits
    # 2. The block itself and the smaller blocks inside it.
    inside = blocks.inside.take(block, axis=0)  # [active, blocks]
    over += added[:, :, None] * inside
    reached = over[:, which, block]  # [2, active]
    if problem.free:
        # All ranks of the block wait for the last of them.
        np.copyto(over[TIME], reached[TIME, :, None], where=inside)
    # 3. The larger blocks around it: their fullest rank is the one they had, or the block's, since
    #    nothing outside of the block has changed.
    around = blocks.around.take(block, axis=0)  # [active, blocks]
    np.maximum(over, reached[:, :, None], out=over, where=around)
    # 4. The blocks that partly overlap it are out of use.
    if blocks.overlap:
        over[TOKENS][blocks.crossing[block]] = FAR
    board.over[TOKENS, page] = over[TOKENS]
    # 5. The loads, on all pages of a candidate where ranks are free: their clocks run on.
    changed = page[:, None]  # [active, 1]
    if problem.free:
        first_page = which[:, None] * board.batches  # [active, 1]
        changed = first_page + np.arange(board.batches)  # [active, micro_batches]
    load = over[TIME] + board.targets[page, None]  # [active, blocks]
    reached_load = reached[TIME] + board.targets[page]  # [active]
    _set_loads(problem, board, changed, load, reached_load)


def _set_loads(
    problem: Problem,
    board: _Board,
    pages: Int64Array,
    load: IntArray,
    reached: IntArray,
) -> None:
    """Set pages [active, n] to loads [active, blocks], targets to `reached` [active] or more."""
    targets = np.maximum(board.targets[pages], reached[:, None])  # [active, n]
    over = load[:, None] - targets[:, :, None]  # [active, n, blocks]
    board.targets[pages] = targets
    board.over[TIME, pages] = over
    board.misfit[pages] = _misfit(problem, over, board.minus_fit[: len(pages), None])
