"""The candidates that a search starts from: a time target for each micro-batch, and which
sequences are long.

A good plan is easy to complete once it is known how long each micro-batch should take. So the
search guesses these seconds, many ways at once, and lets the later stages find out which guesses
fit.

1. Cut the sequences, longest first, into as many chunks as there are micro-batches: chunks of
   equal tokens, or chunks as full as memory allows from the first on.
2. Mix an equal share of the total device-time with the time of the micro-batch's own chunk. Equal
   targets make every micro-batch alike; unequal targets let one micro-batch hold the sequences
   that need many ranks.
3. Call a sequence long when no rank alone has memory for it, or when its time on one rank exceeds
   a fraction of the mean target.
4. Where sequences are few, put every combination of block shapes for the longest ones in front.

Rejected: targets that are the time of one of the longest sequences. On ten sets of batches plans
without them were as fast.

`effort.py` has the numbers. A wrong guess costs time of the step but never legality:
tests/planner/test_exact.py compares the finished plans with tests/planner/exact.py.
"""

import math
from itertools import product

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, PERMILLE, Problem
from hf_flexseq.planner.search.effort import EFFORT, Mix
from hf_flexseq.planner.search.place import ANY_SHAPE, Candidates


def starting_candidates(problem: Problem, batches: int) -> Candidates:
    """Return the candidates for `batches` micro-batches; fewer where each means much work."""
    # 1. Every mix's targets, each once.
    mixed = list(dict.fromkeys(_mixed_targets(problem, batches)))
    # 2. How many sequences are long: one rank has no memory for them, or needs much of a target;
    #    all where shapes are forced.
    forced = _forced_shapes(problem, batches)  # [combinations, forced rows]
    long = len(problem.lengths)
    if not len(forced):
        alone = problem.times[:, 0]  # [sequences] nanoseconds on one rank, or NEVER
        long = int((alone > min(mixed[0]) * EFFORT.long_above // PERMILLE).sum())
    # 3. As many as are affordable; the combinations have the first targets.
    cells_each = batches * len(problem.blocks.start) * long
    count = max(EFFORT.fewest_candidates, EFFORT.round_cells // max(1, cells_each))
    targets = [mixed[0]] * len(forced) + mixed[:count]
    open_shapes = np.full((len(mixed[:count]), EFFORT.forced_rows), ANY_SHAPE)
    return Candidates(
        targets=np.array(targets),
        long_rows=long,
        forced_shapes=np.concatenate([forced, open_shapes]),
    )


# ---- targets


def _mixed_targets(problem: Problem, batches: int) -> list[tuple[int, ...]]:
    """Return the targets of every mix, [mixes][micro_batches] nanoseconds."""
    # the tokens up to each chunk's end: chunks full of tokens, or of equal tokens
    numbers = np.arange(1, batches + 1)
    total = int(problem.lengths.sum())
    chunk = problem.cap * problem.world * EFFORT.full_chunk // PERMILLE
    full_shares = _chunk_shares(np.minimum(numbers * chunk, total), problem)
    even_shares = _chunk_shares(numbers * total // batches, problem)
    return [_mixed(problem, full_shares if mix.full else even_shares, mix) for mix in EFFORT.mixes]


def _chunk_shares(cuts: Int64Array, problem: Problem) -> Int64Array:
    """Return [micro_batches] device-nanoseconds of each chunk, of `cuts` [micro_batches]."""
    ends = np.cumsum(problem.lengths)  # [sequences] tokens
    areas = np.concatenate([[0], np.cumsum(problem.least_area)])  # [sequences + 1] device-ns
    cut_areas: Int64Array = areas[np.searchsorted(ends, cuts, side="right")]  # [micro_batches]
    cut_areas[-1] = areas[-1]  # the last chunk takes what is left
    return np.diff(cut_areas, prepend=0)


def _mixed(problem: Problem, shares: Int64Array, mix: Mix) -> tuple[int, ...]:
    """Return the targets [micro_batches] of a mix, of the chunks' device-ns [micro_batches]."""
    equal = int(problem.least_area.sum()) // len(shares)  # device-nanoseconds
    mixed = mix.chunk * shares + (PERMILLE - mix.chunk) * equal  # [micro_batches]
    mean_rank = mixed // PERMILLE // problem.world  # [micro_batches] nanoseconds
    targets = mean_rank * mix.factor // PERMILLE
    return tuple(targets.tolist())


# ---- shapes of the longest sequences


def _forced_shapes(problem: Problem, batches: int) -> Int64Array:
    """Return every combination of shapes for the longest rows, [combinations, forced rows].

    As many of the longest rows take part as is affordable, the others may take any shape; there is
    no combination where one candidate alone is much work.
    """
    cells_each = len(problem.lengths) * batches * len(problem.blocks.start)
    # 1. The shapes that each of the longest rows may take.
    possible = []
    for times in problem.times[: EFFORT.forced_rows]:
        possible.append(np.flatnonzero(times < NEVER).tolist())
    # 2. Fewer rows, until all combinations are affordable.
    while possible and math.prod(map(len, possible)) * cells_each > EFFORT.forced_cells:
        possible.pop()
    if not possible or cells_each > EFFORT.forced_cells_each:
        return np.empty((0, EFFORT.forced_rows), dtype=np.int64)
    shapes = np.array(list(product(*possible)))  # [combinations, rows that take part]
    open_rows = EFFORT.forced_rows - shapes.shape[1]
    return np.pad(shapes, ((0, 0), (0, open_rows)), constant_values=ANY_SHAPE)
