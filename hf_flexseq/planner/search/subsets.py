"""Few sequences: the best lockstep plan, by dynamic programming over their subsets.

    alone(block)[S]     S on all ranks of a block: the sum of its times
    inside(block)[S]    some of S on all ranks, the rest divided between the two parts of one cut;
                        the slowest rank
    step[S]             inside(all ranks)[S] and the constant: S as one micro-batch
    plan[S]             S in micro-batches: plan[part] + plan[rest]

Blocks of one shape share a table. Memory is a second index, the steps of it that are left below
the groups around a block; what a group takes is rounded up to whole steps. First without such
steps: where memory is plenty the plan found is legal, and then it is the best there is on these
blocks. Otherwise with as many steps as counted work affords; the plan is then a good one, and the
best but for rounding.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.blocks import cuts
from hf_flexseq.planner.problem import NEVER, Problem
from hf_flexseq.planner.search.fill import Filled, completed

MOST = 10  # sequences
WORK = 8_000_000  # (set and its subset, steps of memory, table) triples
STEPS = 64  # of memory, at most

Spot = tuple[int, int]  # a block's first rank, one past the last


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Table:
    """One shape of block. alone, taken: [sets] nanoseconds and steps of memory of a set on all its
    ranks. rest, inside: [steps, sets] the slowest rank, of a set on parts of the ranks only and on
    parts or all of them."""

    alone: Int64Array
    taken: Int64Array
    rest: Int64Array
    inside: Int64Array


def least_of_few(problem: Problem) -> tuple[Filled | None, bool]:
    """The best plan found for few sequences, and whether none on these blocks is better."""
    rows = len(problem.lengths)
    if rows > MOST or problem.free:
        return None, False
    roomy = _SubsetSearch(problem, 0)
    found = roomy.plan()
    if found and int(found.held.max()) <= problem.cap:
        return found, True
    steps = min(STEPS, WORK // (3**rows * roomy.divisions) - 1)
    return (_SubsetSearch(problem, steps).plan() if steps > 0 else None), False


class _SubsetSearch:
    """All tables of a problem with memory in `steps`, none at all for 0."""

    def __init__(self, problem: Problem, steps: int) -> None:
        self.problem, self.steps = problem, steps
        self.tables: dict[tuple[int, bool], _Table] = {}
        self.divisions = 0  # how often a table was made out of two
        self.root = self._table((0, problem.world))
        # An empty micro-batch costs nothing.
        full = _sums(problem.lengths) > problem.cap * problem.world
        inside = self.root.inside[steps]
        self.step = np.where(full | (inside >= NEVER), NEVER, inside + problem.constant)
        self.step[0] = 0
        self.least = self._least()

    def _least(self) -> Int64Array:
        """[sets] nanoseconds in any number of micro-batches: one or two, up to four, up to eight,
        ..."""
        least = self.step
        while True:
            part, rest, begins = _divisions(len(self.problem.lengths))
            joined = np.minimum.reduceat(least[part] + least[rest], begins)
            if (joined >= least).all():
                return least
            least = np.minimum(joined, least)

    def _table(self, spot: Spot) -> _Table:
        problem, (start, stop) = self.problem, spot
        shape = (stop - start, problem.topology.spans_nodes(start, stop))
        if shape not in self.tables:
            column = problem.blocks.shapes.index(shape)
            needs = _sums(problem.needs[:, column])
            alone = np.where(needs <= problem.cap, _sums(problem.times[:, column]), NEVER)
            alone[1:] = np.minimum(alone[1:] + problem.latency[column], NEVER)
            taken = -(-np.minimum(needs, problem.cap) * self.steps // problem.cap)
            rest = np.full((self.steps + 1, len(alone)), NEVER)
            rest[:, 0] = 0
            for cut in cuts(start, stop, problem.topology):
                rest = np.minimum(
                    rest,
                    _shared(self._table((start, cut)).inside, self._table((cut, stop)).inside),
                )
                self.divisions += 1
            inside = _on_top(alone, taken, rest)
            self.tables[shape] = _Table(alone=alone, taken=taken, rest=rest, inside=inside)
            self.divisions += 1
        return self.tables[shape]

    # ---- reading a plan off the tables

    def plan(self) -> Filled | None:
        """The best plan; None where no plan fits the steps of memory."""
        rows = len(self.problem.lengths)
        left, self.where, batches = (1 << rows) - 1, np.zeros((2, rows), dtype=np.int64), 0
        if self.least[left] >= NEVER:
            return None
        while left:
            part = _subsets_of(left)
            chosen = int(part[(self.step[part[1:]] + self.least[left ^ part[1:]]).argmin() + 1])
            self._place(chosen, (0, self.problem.world), self.steps, batches)
            left, batches = left ^ chosen, batches + 1
        return completed(self.problem, self.where[0], self.where[1], batches)

    def _place(self, members: int, spot: Spot, level: int, batch: int) -> None:
        """Put a set on a block and its parts with `level` steps of memory left."""
        if not members:
            return
        table, part = self._table(spot), _subsets_of(members)
        left = level - table.taken[part]
        sums = np.where(
            left >= 0, table.alone[part] + table.rest[np.maximum(left, 0), members ^ part], NEVER
        )
        best = int(sums.argmin())
        chosen, level = int(part[best]), int(left[best])
        for row in range(len(self.problem.lengths)):
            if chosen >> row & 1:
                self.where[:, row] = self.problem.blocks.index(*spot), batch
        self._divide(members ^ chosen, spot, level, batch)

    def _divide(self, members: int, spot: Spot, level: int, batch: int) -> None:
        """Put a set on the two parts of a block."""
        if not members:
            return
        part, options = _subsets_of(members), []
        for cut in cuts(*spot, self.problem.topology):
            parts = (spot[0], cut), (cut, spot[1])
            first, second = (self._table(p).inside[level] for p in parts)
            slower = np.maximum(first[part], second[members ^ part])
            options.append((int(slower.min()), int(part[slower.argmin()]), parts))
        _, chosen, parts = min(options)
        self._place(chosen, parts[0], level, batch)
        self._place(members ^ chosen, parts[1], level, batch)


def _sums(amounts: Int64Array) -> Int64Array:
    """[sets] the sum over each set's members, NEVER where one of them is."""
    sums = np.zeros(1, dtype=np.int64)
    for amount in amounts.tolist():
        sums = np.concatenate([sums, np.minimum(sums + amount, NEVER)])
    return sums


def _shared(first: Int64Array, second: Int64Array) -> Int64Array:
    """[steps, sets] the least slower one of two parts that take a set between them."""
    part, rest, begins = _divisions(first.shape[1].bit_length() - 1)
    slower = [
        np.minimum.reduceat(np.maximum(f[part], s[rest]), begins)
        for f, s in zip(first, second, strict=True)
    ]
    return np.stack(slower)


def _on_top(alone: Int64Array, taken: Int64Array, rest: Int64Array) -> Int64Array:
    """[steps, sets] the least sum of a part on all ranks and the rest below it in the memory then
    left."""
    part, others, begins = _divisions(len(alone).bit_length() - 1)
    never = np.full((len(rest) - 1, rest.shape[1]), NEVER)
    below, steps = np.concatenate([never, rest]), len(rest) - 1 - taken[part]
    sums = [
        np.minimum.reduceat(below[steps + left, others] + alone[part], begins)
        for left in range(len(rest))
    ]
    least: Int64Array = np.minimum(np.stack(sums), NEVER)
    return least


@lru_cache(maxsize=MOST + 1)
def _divisions(count: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Every subset of every set, the rest of the set, and where each set's subsets begin."""
    subsets = [np.zeros(1, dtype=np.int64)]
    for row in range(count):
        subsets += [np.concatenate([s, s | (1 << row)]) for s in subsets]
    part = np.concatenate(subsets)
    sizes = np.array([len(s) for s in subsets])
    return part, np.repeat(np.arange(1 << count), sizes) ^ part, np.cumsum(sizes) - sizes


def _subsets_of(members: int) -> Int64Array:
    """Every subset of a set, the empty one first."""
    subsets = np.zeros(1, dtype=np.int64)
    for row in range(members.bit_length()):
        if members >> row & 1:
            subsets = np.concatenate([subsets, subsets | (1 << row)])
    return subsets
