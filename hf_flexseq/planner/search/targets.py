"""The candidates that a search starts from: a time target for each micro-batch, and which
sequences are long.

A good plan is easy to complete once it is known how long each micro-batch should take. So the
search guesses these seconds, many ways at once, and lets the later stages find out what fits.

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

For free ranks the clocks run on from micro-batch to micro-batch, so a candidate has a single
target: the end of the step.

The numbers are those of `effort.py`. A wrong guess costs time of the step but never legality:
tests/planner/test_exact.py compares the finished plans with tests/planner/exact.py.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.effort import (
    CROWDED,
    EFFORT,
    PERMILLE,
    SPARSE,
    Mix,
    Recipe,
    Setting,
)
from hf_flexseq.planner.search.place import ANY_SHAPE, Candidates, joined


class _Start(NamedTuple):
    """A starting candidate; equal ones are tried once."""

    targets: tuple[int, ...]
    """[micro_batches] Nanoseconds."""
    setting: Setting
    """Choice of long sequences, and their placement."""


def starting_candidates(problem: Problem, batches: int) -> Candidates:
    """Return the candidates for `batches` micro-batches; fewer where each means much work."""
    # 1. Every recipe's targets with its settings, each once.
    starts: dict[_Start, None] = {}
    for recipe in recipes_of(problem, batches):
        for start in _starts_of(problem, batches, recipe):
            starts[start] = None
    # 2. How many sequences are long, for each fraction of the mean target.
    mean = max(1, int(problem.least_area.sum()) // problem.world // batches)
    above2long: dict[int, int] = {}
    for _, setting in starts:
        limit = mean * setting.long_above // PERMILLE
        above2long[setting.long_above] = count_long(problem, limit)
    # 3. As many as a round can afford; those with most long sequences first, as `place.py` wants.
    most_long = max(above2long.values())
    chosen = list(starts)[: affordable(problem, batches, most_long)]
    chosen.sort(key=lambda start: -above2long[start.setting.long_above])
    shapes = (len(chosen), EFFORT.forced_rows)
    started = Candidates(
        targets=_int64([start.targets for start in chosen]),
        fit=_int64([start.setting.fit for start in chosen]),
        long_rows=_int64([above2long[start.setting.long_above] for start in chosen]),
        forced_shapes=np.full(shapes, ANY_SHAPE, dtype=np.int64),
    )
    return _with_forced_shapes(problem, started)


def _int64(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Int64Array:
    return np.array(values, dtype=np.int64)


def recipes_of(problem: Problem, batches: int) -> tuple[Recipe, ...]:
    """Return the recipe for the density of sequences, or both where either may be better."""
    density = len(problem.lengths) / (problem.world * batches)
    if density < EFFORT.crowded_from:
        return (SPARSE,)
    if density < EFFORT.sparse_below and not problem.free:
        return (CROWDED, SPARSE)
    return (CROWDED,)


def affordable(problem: Problem, batches: int, long: int) -> int:
    """Return how many candidates with `long` long rows a round may place."""
    cells_each = batches * len(problem.blocks.start) * long
    return max(EFFORT.fewest_candidates, EFFORT.round_cells // max(1, cells_each))


def count_long(problem: Problem, limit: int) -> int:
    """Count the sequences that one rank has no memory for, or needs above `limit` nanoseconds."""
    alone = problem.times[:, 0]  # [sequences] nanoseconds on one rank, NEVER where it does not fit
    return int((alone > limit).sum())


# ---- targets


def _starts_of(problem: Problem, batches: int, recipe: Recipe) -> list[_Start]:
    """Return the recipe's starting candidates, the most promising first."""
    if problem.free:
        ends = [_ends(problem, batches, factor) for factor in EFFORT.free_factors]
        return [_Start(*pair) for pair in product(ends, recipe.free_settings)]
    # the tokens up to each chunk's end: chunks full of tokens, or of equal tokens
    numbers = np.arange(1, batches + 1)
    total = int(problem.lengths.sum())
    chunk = problem.cap * problem.world * EFFORT.full_chunk // PERMILLE
    full_shares = _chunk_shares(np.minimum(numbers * chunk, total), problem)
    even_shares = _chunk_shares(numbers * total // batches, problem)
    mixed = []
    for mix in recipe.mixes:
        shares = full_shares if mix.full else even_shares
        mixed.append(_mixed(problem, shares, mix))
    return [_Start(*pair) for pair in product(mixed, recipe.settings)]


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


def _ends(problem: Problem, batches: int, factor: int) -> tuple[int, ...]:
    """Return [micro_batches] one end of the step, in nanoseconds, for all micro-batches alike."""
    mean_rank = int(problem.least_area.sum()) // problem.world
    end = mean_rank * factor // PERMILLE + batches * problem.constant
    return (end,) * batches


# ---- shapes of the longest sequences


def _with_forced_shapes(problem: Problem, started: Candidates) -> Candidates:
    """Put candidates with every combination of shapes for the longest rows before the others.

    As many of the longest rows take part as is affordable, none where one candidate alone is much
    work. All rows of these candidates count as long.
    """
    rows = len(problem.lengths)
    batches = started.targets.shape[1]
    cells_each = rows * batches * len(problem.blocks.start)
    # 1. The shapes that each of the longest rows may take.
    possible = []
    for times in problem.times[: EFFORT.forced_rows]:
        possible.append(np.flatnonzero(times < NEVER).tolist())
    # 2. Fewer rows, until all combinations are affordable.
    while possible and math.prod(map(len, possible)) * cells_each > EFFORT.forced_cells:
        possible.pop()
    if not possible or cells_each > EFFORT.forced_cells_each or problem.free:
        return started
    # 3. One candidate for each combination, with the first targets and worst fit.
    shapes = _int64(list(product(*possible)))  # [combinations, rows that take part]
    open_rows = EFFORT.forced_rows - shapes.shape[1]
    shapes = np.pad(shapes, ((0, 0), (0, open_rows)), constant_values=ANY_SHAPE)
    count = len(shapes)
    first_targets = np.repeat(started.targets[:1], count, axis=0)  # [combinations, micro_batches]
    forced = Candidates(
        targets=first_targets,
        fit=np.full(count, -1),
        long_rows=np.full(count, rows),
        forced_shapes=shapes,
    )
    return joined([forced, started])
