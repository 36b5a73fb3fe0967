"""The candidates a search starts from: how much time each micro-batch should take, and which sequences are long.

1. Cut the sequences, longest first, into as many chunks of tokens as there are micro-batches: equal chunks, or as full
   as memory allows from the first on.
2. A micro-batch's target mixes an equal share of the total cheapest device-time with its chunk's own share. Equal
   targets make every micro-batch alike; unequal ones let one hold the sequences that need many ranks.
3. A few candidates give the first micro-batch the time of one of the longest sequences at one of its smallest degrees
   (a breakpoint) and share out the rest: that suits batches with a giant.
4. Long are the sequences above one rank's memory, or whose time on one rank exceeds a fraction of the mean target.
"""

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.place import Candidates
from hf_flexseq.planner.problem import NEVER, Problem

PERMILLE = 1000
# (share of the chunk in the mix, factor on all targets), per mille
MIXES = ((1000, 1000), (1000, 1030), (800, 1000), (800, 1030), (600, 1010), (0, 1020))
BEST_FIT, WORST_FIT = 16, -16
FULL = 960  # per mille of a micro-batch's memory that a full chunk takes
FRACTIONS_CROWDED = (600, 400)  # of the mean target, per mille, when a rank holds many sequences
FRACTIONS_SPARSE = (350, 120)


def starting_candidates(problem: Problem, batches: int) -> Candidates:
    """The candidates for `batches` micro-batches."""
    targets = [_mixed(problem, shares, mix) for shares in _shares(problem, batches) for mix in MIXES]
    targets += _breakpoints(problem, batches)
    unique = sorted({tuple(t) for t in targets})
    return _with_settings(problem, np.array(unique, dtype=np.int64))


def _with_settings(problem: Problem, targets: Int64Array) -> Candidates:
    """Targets with every setting of `fit` and of what counts as long, in turn."""
    crowded = len(problem.lengths) >= 4 * problem.world * targets.shape[1]
    fractions = FRACTIONS_CROWDED if crowded else FRACTIONS_SPARSE
    settings = [(fit, fraction) for fraction in fractions for fit in (BEST_FIT, WORST_FIT)]
    chosen = [(t, *s) for t in targets for s in settings]
    mean = max(1, int(problem.least_area.sum()) // problem.world // targets.shape[1])
    long = {fraction: long_rows(problem, mean * fraction // PERMILLE) for fraction in fractions}
    chosen.sort(key=lambda c: -long[c[2]])
    return Candidates(
        targets=np.array([c[0] for c in chosen]),
        fit=np.array([c[1] for c in chosen]),
        long=np.array([long[c[2]] for c in chosen]),
    )


def long_rows(problem: Problem, limit: int) -> int:
    """How many sequences do not fit one rank or take longer than `limit` nanoseconds there."""
    return int((problem.times[:, 0] > limit).sum())


def _shares(problem: Problem, batches: int) -> list[Int64Array]:
    """Device-nanoseconds of each chunk, for both ways to cut."""
    ends = np.cumsum(problem.lengths)
    total, room = int(ends[-1]), problem.cap * problem.world * FULL // PERMILLE
    full = np.minimum(np.arange(1, batches + 1) * room, total)
    equal = np.arange(1, batches + 1) * total // batches
    areas = np.concatenate([[0], np.cumsum(problem.least_area)])
    return [np.diff(areas[np.searchsorted(ends, cuts, side="right")], prepend=0) for cuts in (equal, full)]


def _mixed(problem: Problem, shares: Int64Array, mix: tuple[int, int]) -> list[int]:
    own, factor = mix
    total, batches = int(problem.least_area.sum()), len(shares)
    mixed = (own * shares + (PERMILLE - own) * (total // batches)) // PERMILLE // problem.world
    return [int(t) for t in mixed * factor // PERMILLE]


def _breakpoints(problem: Problem, batches: int) -> list[list[int]]:
    total = int(problem.least_area.sum()) // problem.world
    times = sorted({int(t) for row in problem.times[:4] for t in row[row < NEVER][:3] if t < total})
    if batches == 1:
        return []
    return [[t] + [(total - t) // (batches - 1)] * (batches - 1) for t in times]
