"""Nanoseconds that no lockstep plan beats, by a mixed-integer program: a higher bound than
`lower_bound.py` gives.

There is a program for each number M of micro-batches that may beat a known plan. T_b are the
nanoseconds of micro-batch b. x_isb in {0, 1} says whether the long row i is on d ranks of shape s
in b: for t nanoseconds, with u = tokens / (d cap) of the memory of each. Short rows are divisible:
a class of similar ones has shares x_isb, and the least per token of any of its rows.

    objective    minimise sum_b T_b + M constant
    row          sum_sb x_isb = 1                              every row and class i
    order        x_isb = 0 if b > i                            micro-batches are interchangeable
    time         sum_s t x_isb + sum_j t x_jab <= T_b          every long row i, b; j: the others,
                                                               a: all ranks
    memory       sum_is d f(u) x_isb <= ranks                  every b; f(u) = u, and
                                                               floor((k + 1) u) / k, k = 1, 2, 3
    idle         w_isb >= d (T_b - t - rest) if x_isb = 1      every long row with u > 1 / 2
    area         sum_is d t x_isb + sum_is w_isb <= ranks T_b  every b, and all b together, where a
                                                               class has its exact least area

Values of u that add up to 1 at most have values of floor((k + 1) u) / k that do, if it is u where
(k + 1) u is whole. Two rows with u > 1 / 2 share no rank. Other work of such a rank takes `rest`
at most: the tokens that are left, times the most nanoseconds per token of any row that fits there.

Waits of groups are left out: all rows of a group share them. Groups have the shapes of `auto`'s.
HiGHS stops at the optimum or at a time limit; its bound holds either way.
"""

from typing import Any

import highspy
import numpy as np

from hf_flexseq.cost.kernels import FloatArray
from hf_flexseq.planner.lower_bound import step_bound_ns
from hf_flexseq.planner.problem import NEVER, Problem, make_problem
from hf_flexseq.planner.solver import new_solver
from hf_flexseq.planner.task import PlanTask

LONG_ROWS = 24  # rows that are not divisible
CLASSES = 16  # of other rows, of equal area
PROGRAMS = 6  # more micro-batches are bounded by their area and constants
SECONDS = 20.0  # of a program, at most
GAP = 1e-3  # relative distance to the program's optimum at which it counts as solved
TOLERANCE = 1e-6  # relative error of the solver
SMALLEST = 1e-8  # coefficients below, all on the left of <=, are left out: the solver refuses them

Variables = dict[tuple[int, int], Any]  # of (row or class, shape)


def tight_bound_ns(task: PlanTask, known_ns: int) -> tuple[int, bool]:
    """Return nanoseconds that no plan of a lockstep task undercuts, and whether all programs were
    solved in time. The longest sequence has to fit. known_ns: of any plan of the task."""
    problem = make_problem(task, alone=False)
    bound, solved = known_ns, True
    least = step_bound_ns(task)
    fewest = problem.fewest_micro_batches
    for count in range(fewest, fewest + PROGRAMS):
        if least >= bound:
            break
        found, in_time = _Program(problem, count, known_ns).solve()
        bound = min(bound, max(least, found))
        solved = solved and in_time
        least += problem.constant
    return min(bound, least), solved and least >= bound


class _Program:
    """The program of one number of micro-batches. Times are relative to the known plan's, without
    its constants; variables and sums of highspy are Any."""

    def __init__(self, problem: Problem, count: int, known_ns: int) -> None:
        self.problem = problem
        self.constant_ns = count * problem.constant
        self.unit_ns = max(1, known_ns - self.constant_ns)
        self.solver = new_solver(time_limit=SECONDS, mip_rel_gap=GAP)
        # 1. [items, shapes] figures of long rows, then of classes of equal area
        self.degrees = np.array([degree for degree, _ in problem.blocks.shapes], dtype=np.float64)
        self.tokens = problem.lengths[:, None]
        self.long_rows = min(LONG_ROWS, len(self.tokens))
        items = np.arange(len(self.tokens))  # of each row
        short_area = problem.least_area[self.long_rows :]
        before = np.cumsum(short_area) - short_area
        items[self.long_rows :] = self.long_rows + CLASSES * before // max(1, short_area.sum())
        self.first = np.unique(items, return_index=True)[1]  # row at which each item begins
        self.row_times = np.where(problem.times < NEVER, problem.times / self.unit_ns, np.inf)
        self.times = self._of_items(self.row_times)
        least_area = problem.least_area[:, None] / self.unit_ns
        more_area = self._of_items(self.row_times * self.degrees - least_area)
        # 2. variables, and what holds for rows and for all micro-batches together
        self.slowest = [self.solver.addVariable() for _ in range(count)]  # T_b
        self.x: list[Variables] = [{} for _ in range(count)]
        for item, shape in np.argwhere(np.isfinite(self.times)).tolist():
            is_long = item < self.long_rows
            for of_b in self.x[: item + 1] if is_long else self.x:
                new = self.solver.addBinary() if is_long else self.solver.addVariable(0, 1)
                of_b[item, shape] = new
        for item in range(len(self.first)):
            own = [x for of_b in self.x for key, x in of_b.items() if key[0] == item]
            self.solver.addConstr(self.solver.qsum(own) == 1)
        self.solver.addConstr(self.solver.qsum(self.slowest) <= 1)
        lost = [self._constrain(*one) for one in zip(self.x, self.slowest, strict=True)]
        lost += [self._sum(of_b, more_area) for of_b in self.x]
        all_time = problem.world * self.solver.qsum(self.slowest)
        self.solver.addConstr(float(least_area.sum()) + self.solver.qsum(lost) <= all_time)

    def _constrain(self, of_b: Variables, slowest: Any) -> Any:
        """Add the constraints of one micro-batch, and return its ranks' summed idle time."""
        world, solver = self.problem.world, self.solver
        everywhere = {key: x for key, x in of_b.items() if self.degrees[key[1]] == world}
        for item in range(self.long_rows):
            own = {key: x for key, x in of_b.items() if key[0] == item}
            solver.addConstr(self._sum(own | everywhere, self.times) <= slowest)
        room = self.degrees * self.problem.cap  # tokens of a group
        usage = self.tokens / room
        for k in (0, 1, 2, 3):  # 0 for f(u) = u
            steps, left = np.divmod((k + 1) * self.tokens, room)
            held = usage if k == 0 else np.where(left > 0, steps / k, usage)
            solver.addConstr(self._sum(of_b, self._of_items(held) * self.degrees) <= world)
        idle = []
        for (item, shape), x in of_b.items():
            if item < self.long_rows and usage[item, shape] > 1 / 2:
                degree = float(self.degrees[shape])
                busy = float(self.times[item, shape]) + self._rest(1 - usage[item, shape])
                if busy < 1 - TOLERANCE:  # 1 is more than any T_b
                    idle.append(solver.addVariable())
                    solver.addConstr(idle[-1] >= degree * (slowest - busy - (1 - busy) * (1 - x)))
        area = self._sum(of_b, self.times * self.degrees)
        solver.addConstr(area + solver.qsum(idle) <= world * slowest)
        return solver.qsum(idle)

    def _rest(self, share: float) -> float:
        """Return the most time that rows take in a share of a rank's memory."""
        usage = self.tokens / (self.degrees * self.problem.cap)  # [rows, shapes]
        fits = np.isfinite(self.row_times) & (usage <= share + TOLERANCE)
        return float(np.max(self.row_times / usage, where=fits, initial=0.0)) * share

    def _of_items(self, of_rows: FloatArray) -> FloatArray:
        """Return [items, shapes] tokens x the least per token. of_rows: [rows, shapes]"""
        least = np.minimum.reduceat(of_rows / self.tokens, self.first)
        found: FloatArray = least * np.add.reduceat(self.tokens, self.first)
        return found

    def _sum(self, variables: Variables, weights: FloatArray) -> Any:
        """Return the sum of variables times their weights, [items, shapes]."""
        used = [key for key in variables if weights[key] > SMALLEST]
        return self.solver.qsum([float(weights[key]) * variables[key] for key in used])

    def solve(self) -> tuple[int, bool]:
        """Return nanoseconds that no plan with these micro-batches undercuts if it is faster than
        the known one, and whether the program was solved in time."""
        self.solver.minimize(self.solver.qsum(self.slowest))
        status = self.solver.getModelStatus()
        slower = status == highspy.HighsModelStatus.kInfeasible
        least = 1.0 if slower else max(0.0, self.solver.getInfo().mip_dual_bound)
        solved = slower or status == highspy.HighsModelStatus.kOptimal
        return self.constant_ns + int(least * (1 - TOLERANCE) * self.unit_ns), solved
