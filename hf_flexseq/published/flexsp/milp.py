"""FlexSP's bucketed mixed-integer program (arXiv 2412.01523, equations 17 to 22), solved by HiGHS.

For virtual groups p of degree d_p and buckets q of b_q sequences, find m_p in {0, 1} (group used)
and integers A_qp (members of bucket q in group p). On the left the name of the equation in the
paper's program of single sequences, 6 to 10, which 17 to 22 repeat with buckets:

    objective      minimise C
    (6) time       latency(d_p) m_p + sum_q time_q(d_p) A_qp <= C     every group
    (7) memory     sum_q tokens_q A_qp <= d_p cap m_p                 every group
    (8) ranks      sum_p slots(d_p) m_p <= slots of the ranks         groups fit side by side
    (9) used       part of (7): nothing in groups that are not used
    (10) members   sum_p A_qp = b_q                                   every bucket
    ours           sum_qp d_p time_q(d_p) A_qp <= ranks C             implied; without it the
                                                                      relaxation is loose
    ours           m_p >= m_p+1 among groups of one degree            they are interchangeable

Two bounds are ours, too: C is at least every bucket's time at its best degree, and members whose
own time exceeds the known solution are left out. Neither changes the optimum, and the first
proves it early where one long sequence sets the pace. The paper's (8) counts ranks; slots are the
same where degrees are powers of two.

The solver starts from a known solution and ends at a relative gap, a count of nodes or a count
of checkpoints, never by the clock, with one thread and a fixed seed. A program of very many
integers, which full memory asks for since buckets may add few tokens then, keeps the solution in
hand: at FlexSP's own time limit such programs find no other.

The slow twin is `best_chosen` in tests/published/test_flexsp.py: every set of degrees, every
assignment.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.solver import new_solver
from hf_flexseq.published.aligned_groups import Slots

# Relative distance to the optimum at which the solver may stop.
GAP = 0.01
# Nodes of the search tree, at most.
NODES = 40
# Integers of a program that is solved at all; 16 buckets on 64 ranks make 2,032.
INTEGERS = 8_000
# Rounds of cuts, heuristics and nodes; with the limits above about 2 s for a program on 64 ranks.
CHECKPOINTS = 60
# Nanoseconds to seconds.
SCALE = 1e9

Chosen = list[tuple[int, tuple[int, ...]]]
"""The groups that are used: for each the column of its degree, and its members [buckets]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupingTask:
    """The numbers of the program for one micro-batch."""

    tokens: Int64Array
    """[buckets] length of each bucket's longest sequence."""
    counts: Int64Array
    """[buckets] sequences of each bucket."""
    times: Int64Array
    """[buckets, degrees] nanoseconds of one member at each degree."""
    latency: tuple[int, ...]
    """[degrees] Nanoseconds of a group besides its members."""
    degrees: tuple[int, ...]
    """[degrees] ranks of a group, ascending."""
    copies: tuple[int, ...]
    """[degrees] how many groups of each degree there may be."""
    cap: int
    """Most tokens of a rank."""
    ranks: int
    """Ranks of the world."""
    slots: tuple[Slots, ...]
    """Groups that must fit side by side, (8) of the program."""


def solve(task: GroupingTask, start: Chosen, *, gap: float = GAP, nodes: int = NODES) -> Chosen:
    """Return the best groups found, at worst `start`, which is kept if the program is large."""
    if len(task.counts) * sum(task.copies) > INTEGERS:
        return start
    # 1. A solver with fixed limits.
    limits = {"mip_rel_gap": gap, "mip_max_nodes": nodes}
    solver = new_solver(**limits, random_seed=1, parallel="off")
    solver.setCallback(_Patience(), None)
    solver.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    # 2. The program and a start.
    program = _Program(solver, task, slowest_ns(task, start))
    warm = highspy.HighsSolution()
    warm.col_value = program.values_of(start)
    solver.setSolution(warm)
    # 3. The best solution met.
    solver.solve()
    values = list(solver.getSolution().col_value)
    return program.groups_in(values) or start


class _Patience:
    """Counts how often HiGHS asks to continue, and ends the search after CHECKPOINTS.

    Nodes alone do not bound its work: one of them may take minutes.
    """

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, kind: Any, message: str, state: Any, answer: Any, data: Any) -> None:
        self.asked += 1
        answer.user_interrupt = self.asked > CHECKPOINTS


class _Program:
    """The program with the variables of every virtual group. Variables and sums of highspy are
    Any."""

    def __init__(self, solver: Any, task: GroupingTask, in_hand: int) -> None:
        """Build the program in a solver. in_hand: nanoseconds of a solution that is known."""
        self.solver = solver
        self.task = task
        self.in_hand = in_hand
        self.group2column: list[int] = []  # column of the degree of each virtual group
        for column, copies in enumerate(task.copies):
            self.group2column += [column] * copies
        groups = range(len(self.group2column))
        buckets = range(len(task.counts))
        # 1. Variables: C, which is minimised, m_p and A_qp.
        self.slowest = solver.addVariable(least_slowest_ns(task) / SCALE, obj=1)
        self.used = [solver.addBinary() for _ in groups]
        self.members = []  # [groups][buckets]
        for p in groups:
            self.members.append([self._members_variable(q, p) for q in buckets])
        # 2. What holds.
        for constraint in self._constraints_of_groups():
            solver.addConstr(constraint)
        for constraint in self._constraints_of_all():
            solver.addConstr(constraint)

    def _members_variable(self, q: int, p: int) -> Any:
        """Return the variable A_qp, bounded by memory and the known solution."""
        task = self.task
        column = self.group2column[p]
        in_memory = task.cap * task.degrees[column] // int(task.tokens[q])
        in_time = (self.in_hand - task.latency[column]) // int(task.times[q, column])
        most = max(0, min(int(task.counts[q]), in_memory, in_time))
        return self.solver.addIntegral(0, most)

    def _constraints_of_groups(self) -> Iterator[Any]:
        """Yield the constraints of every virtual group."""
        task = self.task
        for p, column in enumerate(self.group2column):
            # (6) time
            seconds = (task.times[:, column] / SCALE).tolist()  # [buckets]
            latency = (self.used[p], task.latency[column] / SCALE)
            yield self._sum([latency, *zip(self.members[p], seconds, strict=True)]) <= self.slowest
            # (7) memory, and (9): divided by the group's memory, so that 1 is a full group
            shares = (task.tokens / (task.cap * task.degrees[column])).tolist()  # [buckets]
            yield self._sum(zip(self.members[p], shares, strict=True)) <= self.used[p]
            # ours: groups of one degree are used in order
            if p and self.group2column[p - 1] == column:
                yield self.used[p - 1] >= self.used[p]

    def _constraints_of_all(self) -> Iterator[Any]:
        """Yield the constraints of all groups together."""
        task = self.task
        groups = list(enumerate(self.group2column))
        # (8) ranks
        for slots in task.slots:
            taken = [
                (self.used[p], slots.taken.get(task.degrees[column], 0)) for p, column in groups
            ]
            yield self._sum(taken) <= slots.available
        # (10) members
        for q, count in enumerate(task.counts.tolist()):
            yield self._sum([(self.members[p][q], 1) for p, _ in groups]) == count
        # ours: the mean rank is no slower than the slowest
        areas = (task.times * task.degrees / SCALE / task.ranks).tolist()  # [buckets][degrees]
        terms = []
        for p, column in groups:
            for q in range(len(task.counts)):
                terms.append((self.members[p][q], areas[q][column]))
        yield self._sum(terms) <= self.slowest

    def _sum(self, terms: Iterable[tuple[Any, float]]) -> Any:
        """Return the sum of variables times weights, without the terms of weight 0."""
        return self.solver.qsum([weight * variable for variable, weight in terms if weight])

    def values_of(self, chosen: Chosen) -> list[float]:
        """Return the solver's vector [variables] of a solution with these groups."""
        values = [0.0] * self.solver.numVariables
        # next unused virtual group of each column
        column2group = {column: self.group2column.index(column) for column in self.group2column}
        for column, members in chosen:
            p = column2group[column]
            column2group[column] += 1
            values[self.used[p].index] = 1.0
            for q, count in enumerate(members):
                values[self.members[p][q].index] = float(count)
        values[self.slowest.index] = slowest_ns(self.task, chosen) / SCALE
        return values

    def groups_in(self, values: list[float]) -> Chosen:
        """Return the groups with members in a solver's vector [variables], which may be empty."""
        if not values:
            return []
        groups: Chosen = []
        for p, column in enumerate(self.group2column):
            members = tuple(round(values[variable.index]) for variable in self.members[p])
            if any(members):
                groups.append((column, members))
        return groups


def slowest_ns(task: GroupingTask, chosen: Chosen) -> int:
    """Return the slowest group's nanoseconds, sequences as long as the longest of their bucket."""
    slowest = []
    for column, members in chosen:
        nanoseconds = int((task.times[:, column] * members).sum())
        slowest.append(task.latency[column] + nanoseconds)
    return max(slowest)


def least_slowest_ns(task: GroupingTask) -> int:
    """Return a lower bound on the slowest group: the longest member at its best degree."""
    tokens_of_rank = -(-task.tokens[:, None] // np.array(task.degrees))  # [buckets, degrees]
    fits = tokens_of_rank <= task.cap
    times = np.where(fits, task.times, np.iinfo(np.int64).max)  # [buckets, degrees]
    return int(times.min(axis=1).max())
