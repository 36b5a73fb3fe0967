"""The default planner: groups of every degree, micro-batches with unequal time targets.

1. As few micro-batches as memory allows; one more only when that fails.
2. Many candidates of time targets at once (`targets.py`); their long sequences are placed on
   blocks of ranks (`place.py`).
3. The candidates whose long sequences take the least get their short sequences (`fill.py`).
4. Repairs of the best candidate (`repair.py`).
5. One degree for everything (`static.py`) where that is faster by more than 1 %. So the search
   cannot fail.

Free ranks run a step that is planned for lockstep: planning for them gained 0.7 % by five presets.

The problem and the idea of groups of different degrees in a step are FlexSP's (arXiv 2412.01523,
section 4). Rejected: its time-limited MILP (seconds for each micro-batch, mostly stopped by the
limit, not reproducible), cutting micro-batches by tokens only, and annealing from a cold start.
Also rejected, since an ablation on ten sets of batches did not see them: a tabu walk over single
moves, dynamic programming over the subsets of few sequences, and one strategy for all groups of
the same ranks.

Work is bounded by counts (`effort.py`), never by the clock.

`search/__init__.py` has a worked example. The slow twins are tests/planner/exact.py, with which
tests/planner/test_exact.py compares the plans, and tests/planner/brute.py for the stages.
"""

from dataclasses import replace

import numpy as np

from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.planner.problem import (
    CLOSE,
    NEVER,
    PERMILLE,
    Problem,
    cheapest,
    make_problem,
    micro_batches_of,
)
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.fill import Filled, fill_short, lockstep_objective
from hf_flexseq.planner.search.place import place_long
from hf_flexseq.planner.search.repair import idles, repair
from hf_flexseq.planner.search.targets import starting_candidates
from hf_flexseq.planner.static import static_micro_batches
from hf_flexseq.planner.task import PlanTask


def auto_micro_batches(task: PlanTask) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of the best plan found."""
    lengths, topology, cost = task.lengths, task.topology, task.cost
    best: tuple[MicroBatch, ...] = ()
    to_beat = NEVER  # nanoseconds
    # 1. The search.
    problem = make_problem(replace(task, cost=_own_experts(task)))
    filled = _search_over_batches(problem)
    if filled is not None:
        best = micro_batches_of(problem, filled.row2block.tolist(), filled.row2batch.tolist())
        to_beat = step_ns(cost, best, lengths, topology, sync=task.sync) * PERMILLE // CLOSE
    # 2. One degree for everything, where its bound leaves hope.
    for degree in topology.degrees() if task.strategy != "local" else (1,):
        bound = static_bound_ns(problem, cost, degree=degree, strategy=task.strategy)
        if bound < to_beat:
            micro_batches = static_micro_batches(replace(task, sp_degree=degree))
            nanoseconds = step_ns(cost, micro_batches, lengths, topology, sync=task.sync)
            if nanoseconds < to_beat:
                best, to_beat = micro_batches, nanoseconds
    assert best, "what fits anywhere fits by one degree"
    return best


def _own_experts(task: PlanTask) -> CostModel:
    """Return the cost model to search by: a token's experts count as its rank's own, unless they
    are all ranks' together."""
    experts = task.cost.experts
    if experts is None or experts.ranks == task.topology.world_size:
        return task.cost
    return replace(task.cost, linear_s=task.cost.token_s, experts=None)


def static_bound_ns(problem: Problem, cost: CostModel, *, degree: int, strategy: str) -> int:
    """Return a lower bound on the nanoseconds with one degree; NEVER if it is infeasible."""
    longest = int(problem.lengths[0])
    if -(-longest // degree) > problem.cap:
        return NEVER
    shape = (degree, problem.topology.spans_nodes(0, degree))
    nanoseconds, _ = cheapest(cost, problem.lengths, shape, strategy, shares=problem.shares)
    bound = int(nanoseconds.sum()) * degree // problem.world + problem.constant
    if cost.experts is not None:
        bound += cost.experts.least_ns(int(problem.lengths.sum()), problem.world)
    return bound


# ---- the search over targets


def _search_over_batches(problem: Problem) -> Filled | None:
    """Return the best candidate with the fewest micro-batches or, if memory is short, one more."""
    fewest = problem.fewest_micro_batches
    found = search(problem, fewest)
    return search(problem, fewest + 1) if found is None else found


def search(problem: Problem, batches: int) -> Filled | None:
    """Return the best complete candidate with `batches` micro-batches; None if memory is short."""
    candidates = starting_candidates(problem, batches)
    placed = place_long(problem, candidates)
    # 1. The candidates whose long sequences take the least are completed.
    busy = np.where(placed.fits, placed.load.max(axis=2).sum(axis=1), NEVER)  # [candidates]
    completed = []
    for index in np.argsort(busy, kind="stable")[: EFFORT.completed].tolist():
        filled = fill_short(problem, placed, index) if placed.fits[index] else None
        if filled is not None:
            completed.append(filled)
    if not completed:
        return None
    # 2. The fastest is repaired, and so is each of its micro-batches by itself.
    best = repair(problem, min(completed, key=lambda one: one.objective))
    return best if batches == 1 else _each_again(problem, best)


def _each_again(problem: Problem, filled: Filled) -> Filled:
    """Return a candidate after a search over the rows of each micro-batch whose ranks idle: alone,
    they are few enough to force shapes."""
    row2block, load, tokens = filled.row2block.copy(), filled.load.copy(), filled.tokens.copy()
    for batch, busy in enumerate(filled.load):
        if not idles(busy, EFFORT.idle_again):
            continue
        rows = np.flatnonzero(filled.row2batch == batch)
        found = search(problem.part(rows), 1)
        if found is not None and found.load.max() < busy.max():
            row2block[rows] = found.row2block
            load[batch], tokens[batch] = found.load[0], found.tokens[0]
    objective = lockstep_objective(problem, load)
    return replace(filled, objective=objective, row2block=row2block, load=load, tokens=tokens)
