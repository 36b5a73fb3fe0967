"""FlexSP's bucketed mixed-integer program (arXiv 2412.01523, equations 17 to 22), solved by HiGHS
through PuLP.

For virtual groups p of degree d_p and buckets q of b_q sequences, find m_p in {0, 1} (group used)
and integers A_qp (members of bucket q in group p):

    minimise C
    latency(d_p) m_p + sum_q time_q(d_p) A_qp <= C               every group
    sum_q tokens_q A_qp <= d_p cap m_p                           every group: memory, and nothing
                                                                 in unused groups
    sum_p slots(d_p) m_p <= slots of the ranks                   groups fit side by side
    sum_p A_qp = b_q                                             every bucket
    sum_qp d_p time_q(d_p) A_qp <= ranks C                       implied; without it the relaxation
                                                                 is loose
    m_p >= m_p+1 among groups of one degree                      they are interchangeable

C is at least every bucket's time at its best degree, and members whose own time exceeds the
solution in hand are left out: neither changes the optimum, and the first proves it early where one
long sequence sets the pace.

It starts from a solution in hand and ends at a relative gap, a count of nodes or one of
checkpoints, never by the clock, with one thread and a fixed seed. A program of very many integers,
which full memory asks for since buckets may add few tokens then, keeps that solution: at FlexSP's
own time limit such programs find no other. PuLP has no warm start for HiGHS, so the start is
handed to the solver's own model. Only this module and `checkpointing_milp.py` import PuLP.
Rejected: PuLP's bundled CBC, which comes as a separate process and a file per model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import pulp

from hf_flexseq.cost import Int64Array

GAP = 0.01  # relative
NODES = 40
INTEGERS = 8_000  # 16 buckets on 64 ranks make 2,032
# rounds of cuts, heuristics and nodes; with the others about 2 s per program on 64 ranks
CHECKPOINTS = 60
SCALE = 1e9  # nanoseconds to seconds

# (column of the degree, members of each bucket) per group
Chosen = list[tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupingTask:
    """One micro-batch.

    tokens, counts: [Q] length and members of each bucket. times: [Q, D] nanoseconds at each
    degree. latency: [D] nanoseconds of a group beside its members. degrees: [D] ascending. copies:
    [D] how many groups of each there may be. cap: most tokens of a rank. ranks: of the world.
    slots: per unit of `aligned.units` its slots and how many of them each degree takes, [D].
    """

    tokens: Int64Array
    counts: Int64Array
    times: Int64Array
    latency: tuple[int, ...]
    degrees: tuple[int, ...]
    copies: tuple[int, ...]
    cap: int
    ranks: int
    slots: tuple[tuple[int, tuple[int, ...]], ...]


def solve(task: GroupingTask, start: Chosen, *, gap: float = GAP, nodes: int = NODES) -> Chosen:
    """The best groups found, at worst those of `start`, and those at once where the program is
    large."""
    if len(task.counts) * sum(task.copies) > INTEGERS:
        return start
    model = _Model(task, slowest_ns(task, start))
    interrupt = highspy.cb.HighsCallbackType.kCallbackMipInterrupt
    solver = pulp.HiGHS(
        msg=False,
        gapRel=gap,
        threads=1,
        callbackTuple=(_Patience(), None),
        callbacksToActivate=[interrupt],
        random_seed=1,
        mip_max_nodes=nodes,
        parallel="off",
    )
    solver.createAndConfigureSolver(model.program)
    solver.buildSolverModel(model.program)
    highs = model.program.solverModel
    warm = highspy.HighsSolution()
    warm.col_value = model.values_of(start)
    highs.setSolution(warm)
    solver.callSolver(model.program)
    return model.groups_in(list(highs.getSolution().col_value)) or start


class _Patience:
    """Counts the times HiGHS asks whether to go on. Nodes alone do not bound its work: one may
    take minutes."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, kind: Any, message: str, state: Any, answer: Any, data: Any) -> None:
        self.asked += 1
        answer.user_interrupt = self.asked > CHECKPOINTS


class _Model:
    """The program with the variables of every group at hand. `beat`: nanoseconds of a solution in
    hand."""

    def __init__(self, task: GroupingTask, beat: int) -> None:
        self.task, self.beat = task, beat
        self.program = pulp.LpProblem("flexsp", pulp.LpMinimize)
        self.slowest = self.program.add_variable("C", lowBound=least_slowest_ns(task) / SCALE)
        self.column = [c for c, copies in enumerate(task.copies) for _ in range(copies)]
        self.used = [
            self.program.add_variable(f"m{p}", cat=pulp.LpBinary) for p in range(len(self.column))
        ]
        self.held = [
            [self._members(q, p) for q in range(len(task.counts))] for p in range(len(self.column))
        ]
        self.program += self.slowest
        for constraint in (*self._per_group(), *self._together()):
            self.program += constraint

    def _members(self, q: int, p: int) -> Any:
        task, room = self.task, self.task.cap * self.task.degrees[self.column[p]]
        in_time = (self.beat - task.latency[self.column[p]]) // int(task.times[q, self.column[p]])
        most = min(int(task.counts[q]), room // int(task.tokens[q]), in_time)
        return self.program.add_variable(f"A{q}_{p}", 0, most, pulp.LpInteger)

    def _per_group(self) -> Iterator[Any]:
        task = self.task
        for p, column in enumerate(self.column):
            seconds = (task.times[:, column] / SCALE).tolist()
            waiting = (self.used[p], task.latency[column] / SCALE)
            yield _sum([waiting, *zip(self.held[p], seconds, strict=True)]) <= self.slowest
            shares = (task.tokens / (task.cap * task.degrees[column])).tolist()
            yield _sum(zip(self.held[p], shares, strict=True)) <= self.used[p]
            if p and self.column[p - 1] == column:
                yield self.used[p - 1] >= self.used[p]

    def _together(self) -> Iterator[Any]:
        task, groups = self.task, list(enumerate(self.column))
        for there, taken in task.slots:
            yield _sum((self.used[p], taken[column]) for p, column in groups) <= there
        for q, count in enumerate(task.counts.tolist()):
            yield _sum((self.held[p][q], 1) for p, _ in groups) == count
        areas = (task.times * task.degrees / SCALE / task.ranks).tolist()
        terms = [
            (self.held[p][q], areas[q][column])
            for p, column in groups
            for q in range(len(task.counts))
        ]
        yield _sum(terms) <= self.slowest

    def values_of(self, chosen: Chosen) -> list[float]:
        """A solver's vector of the solution in which these groups are used."""
        task, free = self.task, {c: self.column.index(c) for c in self.column}
        values = [0.0] * len(self.program.variables())
        for column, members in chosen:
            p, free[column] = free[column], free[column] + 1
            values[self.used[p].index] = 1.0
            for q, count in enumerate(members):
                values[self.held[p][q].index] = float(count)
        values[self.slowest.index] = slowest_ns(task, chosen) / SCALE
        return values

    def groups_in(self, values: list[float]) -> Chosen:
        """The groups with members in a solver's vector."""
        if not values:
            return []
        groups = [
            (column, tuple(round(values[variable.index]) for variable in self.held[p]))
            for p, column in enumerate(self.column)
        ]
        return [(column, members) for column, members in groups if any(members)]


def slowest_ns(task: GroupingTask, chosen: Chosen) -> int:
    """Nanoseconds of the slowest group, every sequence counted as long as its bucket's longest."""
    return max(
        task.latency[column] + int((task.times[:, column] * members).sum())
        for column, members in chosen
    )


def least_slowest_ns(task: GroupingTask) -> int:
    """Nanoseconds of the longest bucket's sequence at the best degree that holds it."""
    fits = -(-task.tokens[:, None] // np.array(task.degrees)) <= task.cap
    return int(np.where(fits, task.times, np.iinfo(np.int64).max).min(axis=1).max())


def _sum(terms: Any) -> Any:
    return pulp.LpAffineExpression([(variable, weight) for variable, weight in terms if weight])
