"""Placing the long sequences of many candidate plans at once, as arrays over (candidate,
micro-batch, block).

A candidate is a time target per micro-batch. Its long sequences go, longest first, to the block
with the least

    max(nanoseconds above the target, fit / ranks x nanoseconds below it) + device-nanoseconds
    wasted / ranks

among those with memory left. Both terms are nanoseconds of objective, so they add; `fit` is 1 for
best fit and -1 for worst fit. A sequence that ends above a micro-batch's target raises that
target, because all ranks wait for it anyway. A block's load is its fullest rank's. Time is counted
in ticks of a power of two nanoseconds, so that arrays of 32 bits hold it: on arrays this small
their width is most of the work.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem

# at least: on few ranks a whole rank's share would outweigh what is wasted; a power of two
FIT_RANKS = 256
ANY_SHAPE = -1
# ticks or tokens of what is not possible: all else stays so far below that 32 bits suffice
FAR = 2**30

IntArray = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """C ways to start. targets: [C, M] nanoseconds. fit: [C]. long: [C], how many rows count as
    long, falling. shapes: [C, F] the shape of block that each of the first F rows must take;
    ANY_SHAPE leaves it open."""

    targets: Int64Array
    fit: Int64Array
    long: Int64Array
    shapes: Int64Array

    def take(self, rows: Int64Array) -> "Candidates":
        return Candidates(
            targets=self.targets[rows],
            fit=self.fit[rows],
            long=self.long[rows],
            shapes=self.shapes[rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """Where the long rows stand. targets: [C, M], as raised. ok: [C], whether memory sufficed.

    state: [2, C, M, blocks] nanoseconds and tokens of each block's fullest rank; tokens are NEVER
    where a block partly overlaps one in use. block, batch: [C, most long rows], of each long row.
    """

    targets: Int64Array
    state: Int64Array
    block: Int64Array
    batch: Int64Array
    ok: NDArray[np.bool_]

    def rank_state(self, world: int) -> Int64Array:
        """[2, C, M, ranks] nanoseconds and tokens of each rank."""
        return self.state[:, :, :, :world]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Board:
    """All candidates while rows are placed. A page is one micro-batch of one candidate.

    over: [2, pages, blocks] ticks above the target and tokens above the cap of each block's
    fullest rank. misfit: [pages, blocks] ticks that a row costs there at least, for fitting badly.
    targets: [pages] ticks. tables: [K, 3, shapes] ticks, ticks wasted per rank, and tokens.
    shape_of: [M x blocks]. ok: [C]. less: [C] the sign of misfit: -1 for best fit. score, short:
    room for [C, M x blocks]. constant: ticks.
    """

    over: IntArray
    misfit: IntArray
    targets: IntArray
    tables: IntArray
    shape_of: Int64Array
    less: IntArray
    ok: NDArray[np.bool_]
    score: IntArray
    short: NDArray[np.bool_]
    constant: int

    @property
    def batches(self) -> int:
        return len(self.targets) // len(self.ok)


def place_long(problem: Problem, candidates: Candidates) -> Placement:
    """All candidates' long sequences on the blocks."""
    rows, (count, batches) = int(candidates.long.max(initial=0)), candidates.targets.shape
    tick = tick_bits(problem, candidates)
    board = _board(problem, candidates, rows, tick)
    spots, which = np.zeros((rows, count), dtype=np.int64), np.arange(count)
    for row, active in enumerate(_active(candidates.long, rows)):
        score = _scores(problem, board, active, row)
        if row < candidates.shapes.shape[1]:
            _only(board, score, candidates.shapes[:active, row])
        best = spots[row, :active] = score.argmin(axis=1)
        board.ok[:active] &= score[which[:active], best] < FAR
        _put(problem, board, row, best, which[:active])
    batch, block = np.divmod(spots.T, len(problem.blocks.start))
    over = board.over.reshape(2, count, batches, -1).astype(np.int64)
    targets = board.targets.reshape(count, batches).astype(np.int64)
    load, held = (
        (over[0] + targets[:, :, None]) << tick,
        np.where(over[1] < FAR, over[1] + problem.cap, NEVER),
    )
    return Placement(
        targets=targets << tick,
        state=np.stack([load, held]),
        block=block,
        batch=batch,
        ok=board.ok,
    )


def _active(long: Int64Array, rows: int) -> list[int]:
    """How many candidates count each row as long: a prefix, since `long` falls."""
    active: list[int] = (
        len(long) - np.searchsorted(long[::-1], np.arange(rows), side="right")
    ).tolist()
    return active


def tick_bits(problem: Problem, candidates: Candidates) -> int:
    """A tick is 2 to this power nanoseconds: so many that no rank's load comes near FAR."""
    longest = np.where(problem.times < NEVER, problem.times, 0).max(axis=1).sum()
    return max(
        0,
        (int(longest) + int(candidates.targets.max(initial=0))).bit_length()
        - FAR.bit_length()
        + 3,
    )


def _board(problem: Problem, candidates: Candidates, rows: int, tick: int) -> _Board:
    """Nothing placed yet."""
    (count, batches), blocks = candidates.targets.shape, problem.blocks
    wide = np.int32 if 4 * int(problem.lengths.sum()) < FAR else np.int64
    degrees = np.array([degree for degree, _ in blocks.shapes])
    fits = problem.needs[:rows] < NEVER
    times = np.where(fits, problem.times[:rows], 0)
    waste = np.where(fits, times * degrees - problem.least_area[:rows, None], 0) // problem.world
    needs = np.where(fits, problem.needs[:rows], FAR)
    targets = candidates.targets.reshape(-1) >> tick
    over = np.empty((2, count * batches, len(blocks.start)), dtype=wide)
    over[0], over[1] = -targets[:, None], -problem.cap
    less = -candidates.fit
    return _Board(
        over=over,
        misfit=_misfit(problem, over[0], np.repeat(less, batches).astype(wide)),
        targets=targets.astype(wide),
        tables=np.stack([times >> tick, waste >> tick, needs], axis=1).astype(wide),
        shape_of=np.tile(blocks.shape_of, batches),
        less=less.astype(wide),
        ok=np.ones(count, dtype=np.bool_),
        score=np.empty((count, batches * len(blocks.start)), dtype=wide),
        short=np.empty((count, batches * len(blocks.start)), dtype=np.bool_),
        constant=problem.constant >> tick,
    )


def _misfit(problem: Problem, over: IntArray, less: IntArray) -> IntArray:
    """What leaving so much time below the target costs: [..., blocks], of `less` [...]."""
    misfit: IntArray = (over * less[..., None]) >> (max(problem.world, FIT_RANKS) - 1).bit_length()
    return misfit


def _scores(problem: Problem, board: _Board, active: int, row: int) -> IntArray:
    """[C, M x blocks] ticks of objective that putting a row there costs, FAR where memory is
    short."""
    time, waste, need = board.tables[row].take(board.shape_of, axis=1)
    score, short = board.score[:active], board.short[:active]
    over, held = board.over.reshape(2, len(board.ok), -1)[:, :active]
    np.add(over, time, out=score)
    if problem.free:
        score += (held == -problem.cap) * np.int32(board.constant)
    np.maximum(score, board.misfit.reshape(len(board.ok), -1)[:active], out=score)
    score += waste
    np.greater(held, -need, out=short)
    np.copyto(score, FAR, where=short)
    return score


def _only(board: _Board, score: IntArray, shape: Int64Array) -> None:
    """Make the blocks impossible that have not the shape [C] asked for."""
    np.copyto(score, FAR, where=(shape[:, None] != ANY_SHAPE) & (shape[:, None] != board.shape_of))


def _put(problem: Problem, board: _Board, row: int, spot: Int64Array, which: Int64Array) -> None:
    """Add a row to one spot of each of the candidates `which`, as far as they are still ok."""
    blocks = problem.blocks
    batch, block = np.divmod(spot, len(blocks.start))
    page = which * board.batches + batch
    now = board.over.take(page, axis=1)  # [2, C, blocks]
    added = board.tables[row].take(blocks.shape_of[block], axis=1)[::2] * board.ok[: len(which)]
    if problem.free:
        added[0] += (
            (now[1, which, block] == -problem.cap)
            * np.int32(board.constant)
            * board.ok[: len(which)]
        )
    inside = blocks.inside.take(block, axis=0)
    now += added[:, :, None] * inside
    # A larger block's fullest rank is its own or the fullest in here: nothing outside has changed.
    reached = now[:, which, block]
    if problem.free:  # all ranks wait for the last of them
        np.copyto(now[0], reached[0, :, None], where=inside)
    np.maximum(now, reached[:, :, None], out=now, where=blocks.around.take(block, axis=0))
    if blocks.overlap:
        now[1][blocks.crossing[block]] = FAR
    board.over[1, page] = now[1]
    # [C, 1], or [C, M] for free ranks, whose clocks are the same in all micro-batches
    changed = page[:, None]
    if problem.free:
        changed = which[:, None] * board.batches + np.arange(board.batches)
    _set_loads(
        problem,
        board,
        changed,
        now[0] + board.targets[page, None],
        reached[0] + board.targets[page],
    )


def _set_loads(
    problem: Problem, board: _Board, pages: Int64Array, load: IntArray, reached: IntArray
) -> None:
    """Give the pages [C, n] the loads [C, blocks], and targets that are not below what was reached
    [C]."""
    targets = board.targets[pages] = np.maximum(board.targets[pages], reached[:, None])
    over = board.over[0, pages] = load[:, None] - targets[:, :, None]
    board.misfit[pages] = _misfit(problem, over, board.less[: len(pages), None])
