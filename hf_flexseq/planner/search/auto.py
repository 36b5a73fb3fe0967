"""The default planner: groups of every degree, micro-batches with unequal time targets.

1. As few micro-batches as memory allows; one more only when that fails or memory is nearly full.
2. Many candidates of time targets at once (`targets.py`); their long sequences are placed on
   blocks of ranks (`place.py`).
3. The candidates that promise the shortest step, by their water level, get their short sequences
   (`fill.py`).
4. A second round with the targets of the best candidates slightly changed. Then repairs of the
   best candidate (`repair.py`).
5. What a group waits for is charged to each of its sequences. For few sequences a second search
   charges it to none: groups of several sequences pay it once.
6. Where experts lie on several ranks, micro-batches are balanced by what ranks do for themselves.
   If there are several expert groups, a second search counts a token's experts as its rank's own:
   then groups with fewer tokens take less.
7. For free synchronisation the same with one clock for each rank that all micro-batches share,
   besides the lockstep plan.
8. One degree for everything (`static.py`) is always among the candidates: the search cannot lose
   to that, and cannot fail.

The problem and the idea of groups of different degrees in a step are FlexSP's (arXiv 2412.01523,
section 4). Rejected: its time-limited MILP (seconds for each micro-batch, mostly stopped by the
limit, not reproducible), cutting micro-batches by tokens only, and annealing from a cold start.
Also rejected, since an ablation on ten sets of batches did not see them: a tabu walk over single
moves, dynamic programming over the subsets of few sequences, and one strategy for all groups of
the same ranks.

Work is bounded by counts (`effort.py`), never by the clock.

A worked example stands in `search/__init__.py`. The slow twins are tests/planner/exact.py, with
which tests/planner/test_exact.py compares the plans, and tests/planner/brute.py for the stages.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from hf_flexseq.cost import CostModel, Int64Array, step_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.planner.order import best_order
from hf_flexseq.planner.problem import (
    NEVER,
    Problem,
    cheapest,
    make_problem,
    micro_batches_of,
)
from hf_flexseq.planner.search.effort import EFFORT, PERMILLE
from hf_flexseq.planner.search.fill import Filled, fill_short, water_levels
from hf_flexseq.planner.search.place import Candidates, joined, place_long
from hf_flexseq.planner.search.repair import repair
from hf_flexseq.planner.search.targets import affordable, recipes_of, starting_candidates
from hf_flexseq.planner.static import static_micro_batches
from hf_flexseq.planner.task import PlanTask


def auto_micro_batches(task: PlanTask) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of the best plan found."""
    lengths, topology, cost = task.lengths, task.topology, task.cost
    strategy, sync = task.strategy, task.sync
    plans: list[tuple[int, tuple[MicroBatch, ...]]] = []  # (nanoseconds, micro-batches)
    # 1. Searches. Plans made for lockstep are good plans for free ranks, too.
    few = cost.has_waits and len(lengths) <= EFFORT.charged_both_ways
    charges = (True, False) if few else (True,)
    syncs = dict.fromkeys((sync, "lockstep"))
    for assumed, assumed_sync, charged in product(_assumed_costs(task), syncs, charges):
        problem = make_problem(replace(task, cost=assumed, sync=assumed_sync), charged=charged)
        filled = _search_over_batches(problem)
        if filled is None:
            continue
        micro_batches = micro_batches_of(
            problem, filled.row2block.tolist(), filled.row2batch.tolist()
        )
        if sync == "lockstep" and not cost.has_waits and cost.experts is None:
            plans.append((filled.objective, micro_batches))  # the arrays' objective is exact
        else:
            plans.append(best_order(micro_batches, lengths, topology, cost, sync=sync))
    # 2. One degree for everything, where its bound leaves hope.
    to_beat = min((nanoseconds for nanoseconds, _ in plans), default=NEVER)
    for degree in topology.degrees() if strategy != "local" else (1,):
        if static_bound_ns(problem, cost, degree=degree, strategy=strategy) >= to_beat:
            continue
        micro_batches = static_micro_batches(replace(task, sp_degree=degree))
        nanoseconds = step_ns(cost, micro_batches, lengths, topology, sync=sync)
        plans.append((nanoseconds, micro_batches))
    _, best = min(plans, key=lambda plan: plan[0])
    return best


def _assumed_costs(task: PlanTask) -> tuple[CostModel, ...]:
    """Return the cost models to search by: that of the task, without experts on other ranks; and
    one that counts them as each rank's own, where they are not all ranks' together."""
    experts = task.cost.experts
    if experts is None or experts.ranks == task.topology.world_size:
        return (task.cost,)
    own = replace(task.cost, linear_s=task.cost.token_s, experts=None)
    return (task.cost, own)


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
    """Return the best candidate with the fewest micro-batches or, where it may pay, one more."""
    fewest = problem.fewest_micro_batches
    if problem.free:
        # To free ranks one more costs nothing unless they use it.
        return search(problem, fewest + 1, NEVER)
    with_fewest = search(problem, fewest, NEVER)
    if with_fewest is None:
        return search(problem, fewest + 1, NEVER)
    tokens = int(problem.lengths.sum())
    memory = fewest * problem.cap * problem.world  # tokens
    if tokens * PERMILLE <= EFFORT.nearly_full * memory:
        return with_fewest
    with_one_more = search(problem, fewest + 1, with_fewest.objective)
    if with_one_more is None or with_fewest.objective <= with_one_more.objective:
        return with_fewest
    return with_one_more


class _Tried(NamedTuple):
    """A complete candidate with the targets that it came from."""

    filled: Filled
    """Blocks and micro-batches of all sequences."""
    origin: Candidates
    """The single candidate, which the next round changes."""


def search(problem: Problem, batches: int, rival: int) -> Filled | None:
    """Return the best complete candidate with `batches` micro-batches; None if memory is short.

    rival: nanoseconds of a known plan, or NEVER. A search that stays far slower ends early.
    """
    candidates = starting_candidates(problem, batches)
    if rival < NEVER:
        count = min(EFFORT.starts_with_rival, len(candidates.fit))
        candidates = candidates.take(np.arange(count))
    keep = EFFORT.kept + len(recipes_of(problem, batches))
    best: list[_Tried] = []  # fastest first, at most `keep`
    for change in (EFFORT.change, 0):
        # 1. Complete the candidates that promise most.
        count = EFFORT.completed_later if best else EFFORT.completed_first
        limit = NEVER
        if len(best) == keep and not problem.free:
            limit = best[-1].filled.objective * EFFORT.promise_margin // PERMILLE
        best += _complete_best(problem, candidates, count, limit)
        # 2. Keep the fastest.
        best.sort(key=lambda tried: tried.filled.objective)
        best = best[:keep]
        if not best or not change or _is_hopeless(best[0].filled, rival):
            break
        # 3. Change their targets for the next round.
        candidates = _changed(problem, [tried.origin for tried in best], change)
    if not best:
        return None
    fastest = best[0].filled
    if _is_hopeless(fastest, rival):
        return fastest
    return repair(problem, fastest)


def _is_hopeless(filled: Filled, rival: int) -> bool:
    """Return True if a candidate is so much slower than a known plan that the search ends."""
    return filled.objective * PERMILLE > rival * EFFORT.hopeless


def _complete_best(
    problem: Problem, candidates: Candidates, count: int, limit: int
) -> list[_Tried]:
    """Complete at most `count` candidates with the best promises, all of them below `limit`.

    A promise is the nanoseconds of the step if short sequences were divisible.
    """
    placed = place_long(problem, candidates)
    rises = water_levels(problem, candidates, placed)  # [candidates] nanoseconds
    batches = candidates.targets.shape[1]
    risen = placed.targets.sum(axis=1) + (rises + problem.constant) * batches  # [candidates]
    promise = np.where(rises < NEVER, risen, NEVER)
    completed = []
    for index in np.argsort(promise, kind="stable")[:count].tolist():
        if promise[index] >= limit:
            break
        filled = fill_short(
            problem,
            placed,
            index,
            long_rows=int(candidates.long_rows[index]),
            rise=int(rises[index]),
        )
        if filled is not None:
            completed.append(_Tried(filled, candidates.take(np.array([index]))))
    return completed


def _changed(problem: Problem, kept: list[Candidates], change: int) -> Candidates:
    """Return copies of the kept candidates, every target changed by up to `change` per mille."""
    batches = kept[0].targets.shape[1]
    kept = sorted(kept, key=lambda candidate: -int(candidate.long_rows[0]))
    # 1. How many copies of each.
    most_long = int(kept[0].long_rows[0])
    copies = max(1, affordable(problem, batches, most_long) // len(kept))
    copies = min(recipes_of(problem, batches)[0].copies, copies)
    # 2. All copies, one kept candidate after the other: [1, ...] each -> [kept * copies, ...].
    copied = joined(kept).take(np.repeat(np.arange(len(kept)), copies))
    # 3. Other targets.
    noise = _noise(copied.targets.shape, change)  # [candidates, micro_batches] per mille
    return replace(copied, targets=copied.targets + copied.targets * noise // PERMILLE)


def _noise(shape: tuple[int, ...], change: int) -> Int64Array:
    """Return fixed pseudo-random integers in [-change, change] of a shape.

    They are a linear congruential generator's high bits, alike on every machine and numpy version.
    """
    state = 12345 + change
    values = []
    for _ in range(int(np.prod(shape))):
        state = (1103515245 * state + 12345) % 2**31
        high_bits = state >> 8
        values.append(high_bits % (2 * change + 1) - change)
    return np.array(values, dtype=np.int64).reshape(shape)
