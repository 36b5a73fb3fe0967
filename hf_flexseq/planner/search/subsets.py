"""Few sequences: the best lockstep plan, by dynamic programming over their subsets.

With ten sequences there are 1,024 sets of them and 59,049 pairs of a set and one of its subsets,
so every division of every set can be looked at. A set is an integer whose bit k says whether row k
is in it; a table is an array over all sets. From small to large:

1. alone(block)[S]: all of S on all ranks of a block, one after another: the sum of their times.
2. inside(block)[S]: some of S on all ranks of the block, the rest divided between the two parts of
   one cut of the block; the least possible slowest rank.
3. step[S]: inside(all ranks)[S] and the constant: S as one micro-batch.
4. plan[S]: S in any number of micro-batches, plan[part] + plan[rest].

Then the plan is read off the tables from large to small: which part of a set gave its least value.

Blocks of one shape share a table. Memory is a second index: a rank's memory is divided into steps,
and level L of a table holds what is possible with L steps left below the groups around a block.
What a group takes is rounded up to whole steps. The first try is without steps, as if memory were
unlimited: where the plan that comes out has memory all the same, no plan on these blocks is
better. Otherwise a second try has as many steps as counted work affords; its plan is the best but
for rounding.

The slow twins are tests/planner/brute.py (all laminar plans, one by one) and
tests/planner/exact.py (another dynamic programming, with memory rounded down, which bounds the
optimum from below); tests/planner/test_subsets.py and test_exact.py compare them.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.blocks import cuts
from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.fill import Filled, completed

RankRange = tuple[int, int]
"""A block's first rank, and one past its last."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Table:
    """The seconds and memory of every set of sequences on blocks of one shape."""

    alone: Int64Array
    """[sets] nanoseconds of a set on all of the block's ranks, NEVER where memory is short."""
    taken: Int64Array
    """[sets] steps of memory that the set takes on each of these ranks."""
    below: Int64Array
    """[levels, sets] nanoseconds of the slowest rank, the set divided between two parts."""
    inside: Int64Array
    """[levels, sets] nanoseconds of the slowest rank, some of the set on all ranks and the rest
    divided between the parts."""


def least_of_few(problem: Problem) -> tuple[Filled | None, bool]:
    """Return the best plan found for few sequences, and whether no plan on these blocks is better.

    (None, False) for many sequences and for free ranks.
    """
    rows = len(problem.lengths)
    if rows > EFFORT.subset_sequences or problem.free:
        return None, False
    # 1. As if memory were unlimited.
    unlimited = _SubsetSearch(problem, 0)
    plan = unlimited.plan()
    if plan is not None and int(plan.tokens.max()) <= problem.cap:
        return plan, True
    # 2. With steps of memory, one level less than the counted work affords.
    cells_of_level = 3**rows * unlimited.divisions  # (set and its subset, table) pairs
    steps = min(EFFORT.memory_steps, EFFORT.subset_cells // cells_of_level - 1)
    if steps <= 0:
        return None, False
    return _SubsetSearch(problem, steps).plan(), False


class _SubsetSearch:
    """All tables of a problem, with a rank's memory in `steps` steps; 0 for unlimited memory."""

    def __init__(self, problem: Problem, steps: int) -> None:
        self.problem = problem
        self.steps = steps
        rows = len(problem.lengths)
        self.row2block = np.zeros(rows, dtype=np.int64)  # [sequences] of the plan, once it is read
        self.row2batch = np.zeros(rows, dtype=np.int64)  # [sequences] likewise
        self.tables: dict[tuple[int, bool], _Table] = {}
        self.divisions = 0  # tables made out of two, for counted work
        self.root = self._table((0, problem.world))
        # nanoseconds of each set as one micro-batch, [sets]
        too_many_tokens = _sums(problem.lengths) > problem.cap * problem.world
        inside = self.root.inside[steps]
        impossible = too_many_tokens | (inside >= NEVER)
        self.step = np.where(impossible, NEVER, inside + problem.constant)
        self.step[0] = 0  # an empty micro-batch costs nothing
        self.least = self._least()

    def _least(self) -> Int64Array:
        """Return [sets] the least nanoseconds in any number of micro-batches.

        Round by round in one or two, up to four, up to eight, ..., until nothing is gained.
        """
        least = self.step
        part, rest, begins = _divisions(len(self.problem.lengths))
        while True:
            joined = np.minimum.reduceat(least[part] + least[rest], begins)  # [sets]
            if (joined >= least).all():
                return least
            least = np.minimum(joined, least)

    def _table(self, ranks: RankRange) -> _Table:
        """Return the table of a block's shape, made at the first call."""
        start, stop = ranks
        problem = self.problem
        shape = (stop - start, problem.topology.spans_nodes(start, stop))
        if shape in self.tables:
            return self.tables[shape]
        column = problem.blocks.shapes.index(shape)
        # 1. Sets on all ranks of the block.
        needs = _sums(problem.needs[:, column])  # [sets] tokens
        times = _sums(problem.times[:, column])  # [sets] nanoseconds
        alone = np.where(needs <= problem.cap, times, NEVER)
        # The empty set, index 0, makes no group and pays no latency.
        with_latency = alone[1:] + problem.latency[column]
        alone[1:] = np.minimum(with_latency, NEVER)
        taken = -(-np.minimum(needs, problem.cap) * self.steps // problem.cap)
        # 2. Sets divided between the two parts, at the best cut.
        below = np.full((self.steps + 1, len(alone)), NEVER)  # [levels, sets]
        below[:, 0] = 0
        for cut in cuts(start, stop, problem.topology):
            first = self._table((start, cut)).inside
            second = self._table((cut, stop)).inside
            below = np.minimum(below, _shared(first, second))
            self.divisions += 1
        # 3. Both.
        inside = _on_top(alone, taken, below)
        self.divisions += 1
        table = _Table(alone=alone, taken=taken, below=below, inside=inside)
        self.tables[shape] = table
        return table

    # ---- reading a plan off the tables

    def plan(self) -> Filled | None:
        """Return the best plan, or None where no plan fits the steps of memory."""
        rows = len(self.problem.lengths)
        left = (1 << rows) - 1  # the set of all sequences
        if self.least[left] >= NEVER:
            return None
        batches = 0
        while left:
            parts = _subsets_of(left)[1:]  # none of them empty
            totals = self.step[parts] + self.least[left ^ parts]
            chosen = int(parts[totals.argmin()])
            self._put(chosen, (0, self.problem.world), self.steps, batches)
            left ^= chosen
            batches += 1
        return completed(self.problem, self.row2block, self.row2batch, batches)

    def _put(self, members: int, ranks: RankRange, level: int, batch: int) -> None:
        """Put a set on a block and its parts, with `level` steps of memory left."""
        if not members:
            return
        table = self._table(ranks)
        parts = _subsets_of(members)
        levels_left = level - table.taken[parts]  # [subsets]
        below = table.below[np.maximum(levels_left, 0), members ^ parts]  # [subsets]
        totals = np.where(levels_left >= 0, table.alone[parts] + below, NEVER)
        best = int(totals.argmin())
        chosen = int(parts[best])
        block = self.problem.blocks.index(*ranks)
        for row in range(len(self.problem.lengths)):
            if chosen >> row & 1:
                self.row2block[row] = block
                self.row2batch[row] = batch
        self._divide(members ^ chosen, ranks, int(levels_left[best]), batch)

    def _divide(self, members: int, ranks: RankRange, level: int, batch: int) -> None:
        """Put a set on the two parts of a block, with `level` steps of memory left."""
        if not members:
            return
        start, stop = ranks
        subsets = _subsets_of(members)
        options = []  # (nanoseconds, set of the first part, cut), compared in this order
        for cut in cuts(start, stop, self.problem.topology):
            first = self._table((start, cut)).inside[level]  # [sets]
            second = self._table((cut, stop)).inside[level]  # [sets]
            slower = np.maximum(first[subsets], second[members ^ subsets])  # [subsets]
            options.append((int(slower.min()), int(subsets[slower.argmin()]), cut))
        _, chosen, cut = min(options)
        self._put(chosen, (start, cut), level, batch)
        self._put(members ^ chosen, (cut, stop), level, batch)


# ---- arrays over sets


def _sums(amounts: Int64Array) -> Int64Array:
    """Return [sets] the sum of each set's amounts [sequences], NEVER where one of them is."""
    sums = np.zeros(1, dtype=np.int64)
    for amount in amounts.tolist():
        with_row = np.minimum(sums + amount, NEVER)
        sums = np.concatenate([sums, with_row])  # [2^k] -> [2^(k + 1)]
    return sums


def _shared(first: Int64Array, second: Int64Array) -> Int64Array:
    """Return [levels, sets] the slower of two parts that share a set, at the best division."""
    part, rest, begins = _divisions(first.shape[1].bit_length() - 1)
    least = []
    for first_level, second_level in zip(first, second, strict=True):  # [sets] each
        slower = np.maximum(first_level[part], second_level[rest])  # [divisions]
        least.append(np.minimum.reduceat(slower, begins))  # [divisions] -> [sets]
    return np.stack(least)


def _on_top(alone: Int64Array, taken: Int64Array, below: Int64Array) -> Int64Array:
    """Return [levels, sets] the least sum of a part on all ranks and the rest on parts of the
    ranks.

    The rest has the level of memory that the part leaves.
    """
    part, rest, begins = _divisions(len(alone).bit_length() - 1)
    steps = len(below) - 1
    # `steps` levels of NEVER in front, so that a level below zero is an index, too.
    never = np.full((steps, below.shape[1]), NEVER)
    padded = np.concatenate([never, below])  # [steps + levels, sets]
    level_zero = steps - taken[part]  # [divisions] what level 0 leaves, as an index of `padded`
    least = []
    for level in range(len(below)):
        sums = padded[level_zero + level, rest] + alone[part]  # [divisions]
        least.append(np.minimum.reduceat(sums, begins))  # [divisions] -> [sets]
    capped: Int64Array = np.minimum(np.stack(least), NEVER)
    return capped


@lru_cache(maxsize=EFFORT.subset_sequences + 1)
def _divisions(count: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return every division of every set of `count` rows into two: [divisions], [divisions],
    [sets].

    The first array has the one part, the second the rest of the set, and the third says where each
    set's divisions begin. Two rows make nine: sets 0, 1, 2 and 3 with 1, 2, 2 and 4 subsets.
    """
    subsets = [np.zeros(1, dtype=np.int64)]  # of each set, in the order of sets
    for row in range(count):
        subsets += [np.concatenate([s, s | (1 << row)]) for s in subsets]
    part = np.concatenate(subsets)  # [divisions]
    sizes = np.array([len(s) for s in subsets])  # [sets]
    whole = np.repeat(np.arange(1 << count), sizes)  # [divisions]
    return part, whole ^ part, np.cumsum(sizes) - sizes


def _subsets_of(members: int) -> Int64Array:
    """Return [subsets] every subset of a set, the empty one first."""
    subsets = np.zeros(1, dtype=np.int64)
    for row in range(members.bit_length()):
        if members >> row & 1:
            subsets = np.concatenate([subsets, subsets | (1 << row)])  # [n] -> [2 n]
    return subsets
