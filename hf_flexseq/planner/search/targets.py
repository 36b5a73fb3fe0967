"""The candidates a search starts from: how much time each micro-batch should take, and which
sequences are long.

1. Cut the sequences, longest first, into as many chunks of tokens as there are micro-batches:
   equal chunks, or as full as memory allows from the first on.
2. A micro-batch's target mixes an equal share of the total cheapest device-time with its chunk's
   own share. Equal targets make every micro-batch alike; unequal ones let one hold the sequences
   that need many ranks.
3. A few candidates give the first micro-batch the time of one of the longest sequences at one of
   its smallest degrees (a breakpoint) and share out the rest: that suits batches with a giant.
4. Where sequences are few, every combination of degrees for the longest ones is a candidate.
5. Long are the sequences above one rank's memory, or whose time on one rank exceeds a fraction of
   the mean target.
"""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.place import ANY_SHAPE, Candidates

PERMILLE = 1000
FULL = 960  # per mille of a micro-batch's memory that a full chunk takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a density of sequences calls for; tuned on batches of 512 on 64 ranks, all numbers per
    mille but `fit`.

    mixes: (chunks as full as memory allows?, share of the chunk in the mix, factor on all
    targets). settings: (`fit` of place.py, fraction of the mean target above which a sequence is
    long). copies: how many changed copies of a good candidate a round tries.
    """

    mixes: tuple[tuple[bool, int, int], ...]
    settings: tuple[tuple[int, int], ...]
    free_settings: tuple[tuple[int, int], ...]
    breakpoint_settings: tuple[tuple[int, int], ...]
    copies: int


CROWDED = Recipe(
    mixes=(
        (True, 900, 1040),
        (True, 700, 1020),
        (False, 800, 1040),
        (True, 1000, 1000),
        (False, 1000, 1040),
        (True, 300, 1000),
    ),
    settings=((1, 600), (-1, 400), (1, 250)),
    free_settings=((1, 600), (-1, 400), (1, 250)),
    breakpoint_settings=((1, 600), (-1, 400)),
    copies=8,
)
SPARSE = Recipe(
    mixes=(
        (True, 800, 1060),
        (True, 300, 1060),
        (False, 0, 1060),
        (False, 600, 1060),
        (True, 900, 1060),
        (False, 300, 1040),
        (True, 1000, 1060),
        (True, 600, 1060),
        (True, 850, 1030),
        (True, 900, 1100),
    ),
    settings=((-1, 120),),
    free_settings=((-1, 120), (1, 120)),
    breakpoint_settings=(),
    copies=5,
)
WORK = 8_000_000  # (candidate, micro-batch, block, long row) quadruples of one round
FEWEST = 4  # candidates of a round, however much work
FORCED = 6  # longest rows whose shapes are tried in every combination
# quadruples of one of those candidates, at most, and of all of them
FORCED_EACH, FORCED_WORK = 20_000, 400_000
FREE_FACTORS = (1000, 1020, 1050, 1100)  # per mille, on the end of a free step
CROWDED_FROM, SPARSE_BELOW = 2.5, 3.0  # sequences per rank and micro-batch


def starting_candidates(problem: Problem, batches: int) -> Candidates:
    """The candidates for `batches` micro-batches; fewer where each of them means much work."""
    chosen = [
        (target, setting, fraction)
        for recipe in recipes_of(problem, batches)
        for target, (setting, fraction) in _targets(problem, batches, recipe)
    ]
    mean = max(1, int(problem.least_area.sum()) // problem.world // batches)
    long = {fraction: long_rows(problem, mean * fraction // PERMILLE) for _, _, fraction in chosen}
    chosen = list(dict.fromkeys(chosen))[: affordable(problem, batches, max(long.values()))]
    chosen.sort(key=lambda c: -long[c[2]])
    started = Candidates(
        targets=np.array([t for t, _, _ in chosen], dtype=np.int64),
        fit=np.array([fit for _, fit, _ in chosen], dtype=np.int64),
        long=np.array([long[fraction] for _, _, fraction in chosen], dtype=np.int64),
        shapes=np.full((len(chosen), FORCED), ANY_SHAPE, dtype=np.int64),
    )
    return _with_shapes(problem, started)


def _targets(
    problem: Problem, batches: int, recipe: Recipe
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """(targets, setting) of the recipe's candidates."""
    shares = {full: _shares(problem, batches, full) for full in (False, True)}
    mixed = [_mixed(problem, shares[full], own, factor) for full, own, factor in recipe.mixes]
    breakpoints = _breakpoints(problem, batches)
    if problem.free:
        mixed, breakpoints = [_clocks(problem, batches, factor) for factor in FREE_FACTORS], []
    settings = recipe.free_settings if problem.free else recipe.settings
    chosen = [(t, setting) for t in mixed for setting in settings]
    return chosen + [(t, setting) for t in breakpoints for setting in recipe.breakpoint_settings]


def recipes_of(problem: Problem, batches: int) -> tuple[Recipe, ...]:
    """One, or both where either may be the better one."""
    density = len(problem.lengths) / (problem.world * batches)
    if density < CROWDED_FROM:
        return (SPARSE,)
    return (CROWDED, SPARSE) if density < SPARSE_BELOW and not problem.free else (CROWDED,)


def _with_shapes(problem: Problem, started: Candidates) -> Candidates:
    """The candidates, before them those in which the longest rows have every combination of
    shapes, as far as that is affordable; all rows of those count as long."""
    rows, batches = len(problem.lengths), started.targets.shape[1]
    each = rows * batches * len(problem.blocks.start)
    possible = [[int(s) for s in np.flatnonzero(row < NEVER)] for row in problem.times[:FORCED]]
    while possible and math.prod(map(len, possible)) * each > FORCED_WORK:
        possible.pop()
    if not possible or each > FORCED_EACH or problem.free:
        return started
    shapes = np.array(list(product(*possible)), dtype=np.int64)
    shapes = np.pad(shapes, ((0, 0), (0, FORCED - shapes.shape[1])), constant_values=ANY_SHAPE)
    count = len(shapes)
    return Candidates(
        targets=np.concatenate([np.repeat(started.targets[:1], count, axis=0), started.targets]),
        fit=np.concatenate([np.full(count, -1), started.fit]),
        long=np.concatenate([np.full(count, rows), started.long]),
        shapes=np.concatenate([shapes, started.shapes]),
    )


def affordable(problem: Problem, batches: int, long: int) -> int:
    """How many candidates with `long` long rows a round may place."""
    return max(FEWEST, WORK // max(1, batches * len(problem.blocks.start) * long))


def long_rows(problem: Problem, limit: int) -> int:
    """How many sequences do not fit one rank or take longer than `limit` nanoseconds there."""
    return int((problem.times[:, 0] > limit).sum())


def _shares(problem: Problem, batches: int, full: bool) -> Int64Array:
    """Device-nanoseconds of each chunk of the sequences, longest first."""
    ends = np.cumsum(problem.lengths)
    total, steps = int(ends[-1]), np.arange(1, batches + 1)
    cuts = (
        np.minimum(steps * (problem.cap * problem.world * FULL // PERMILLE), total)
        if full
        else steps * total // batches
    )
    areas = np.concatenate([[0], np.cumsum(problem.least_area)])
    cut_areas: Int64Array = areas[np.searchsorted(ends, cuts, side="right")]
    cut_areas[-1] = areas[-1]
    return np.diff(cut_areas, prepend=0)


def _mixed(problem: Problem, shares: Int64Array, own: int, factor: int) -> tuple[int, ...]:
    """Targets of which `own` per mille follow the chunks' shares and the rest is equal, all times
    `factor`."""
    equal = int(problem.least_area.sum()) // len(shares)
    mixed = (own * shares + (PERMILLE - own) * equal) // PERMILLE // problem.world
    return tuple((mixed * factor // PERMILLE).tolist())


def _clocks(problem: Problem, batches: int, factor: int) -> tuple[int, ...]:
    """The same end of the step for all micro-batches of free ranks."""
    end = (
        int(problem.least_area.sum()) // problem.world * factor // PERMILLE
        + batches * problem.constant
    )
    return (end,) * batches


def _breakpoints(problem: Problem, batches: int) -> list[tuple[int, ...]]:
    """Targets whose first one is the time of one of the longest sequences at one of its smallest
    degrees, where that is above the mean."""
    total = int(problem.least_area.sum()) // problem.world
    times = {
        int(t)
        for row in problem.times[:4]
        for t in row[row < NEVER][:3]
        if total // batches < t < total
    }
    return [(t, *[(total - t) // (batches - 1)] * (batches - 1)) for t in sorted(times)]
