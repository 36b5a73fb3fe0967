"""The default planner: groups of every degree, micro-batches with unequal time targets.

1. As few micro-batches as memory allows; one more only when that fails or is nearly full.
2. Many candidates of targets at once (`targets.py`), their long sequences placed on blocks of
   ranks (`place.py`).
3. The candidates with the lowest water level get their short sequences (`fill.py`).
4. A few rounds with the best candidates' targets slightly changed, fewer where many sequences are
   long; then repairs of the best (`repair.py`), and for few sequences a walk over single moves
   (`tabu.py`).
5. For free synchronisation the same with one clock per rank that all micro-batches share, beside
   the lockstep plan.
6. Ten sequences and fewer take dynamic programming over their subsets (`subsets.py`), and all this
   only where that leaves doubt.
7. Where groups have a latency of their own, all of it twice: every sequence is charged for a
   group, or none is.
8. One degree for everything (`static.py`) is always among the candidates: it cannot lose to that,
   and cannot fail.

The problem and the idea of groups of different degrees per step are FlexSP's (arXiv 2412.01523,
section 4). Rejected: its time-limited MILP (seconds per micro-batch, mostly stopped by the limit,
not reproducible), cutting micro-batches by tokens only, and annealing from a cold start. Work is
bounded by counts, never by the clock.
"""

from collections.abc import Sequence

import numpy as np

from hf_flexseq.cost import CostModel, Int64Array, step_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.planner.order import best_order
from hf_flexseq.planner.problem import NEVER, Problem, make_problem, micro_batches_of
from hf_flexseq.planner.search.fill import Filled, fill_short, water_levels
from hf_flexseq.planner.search.place import Candidates, place_long
from hf_flexseq.planner.search.repair import repair
from hf_flexseq.planner.search.subsets import least_of_few
from hf_flexseq.planner.search.tabu import improved
from hf_flexseq.planner.search.targets import PERMILLE, affordable, recipes_of, starting_candidates
from hf_flexseq.planner.static import static_degrees, static_micro_batches
from hf_flexseq.topology import Topology

KEPT = 1  # candidates whose targets the next round changes, beside one of each recipe
FILLED = (6, 3)  # candidates that get their short sequences, in the first round and in later ones
# per mille, after each round but the last
CHANGES = ((60,), (80, 20), (100, 60, 20), (100, 80, 50, 20))
ROWS = 400  # long sequences that all rounds together place, in each of their candidates
NEARLY_FULL = 950  # per mille of the memory, above which one more micro-batch is tried
# per mille of the second best objective, above which a candidate's promise is not worth completing
# it
DOUBT = 1005
GLANCE = 4  # candidates of the first round with an objective in hand
HOPELESS = 1015  # per mille of the best objective, above which no more rounds are spent


def auto_micro_batches(
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    strategy: str,
    cap: int,
    sync: str,
) -> tuple[MicroBatch, ...]:
    """The micro-batches of the best plan found. Every sequence must fit on all ranks together."""
    plans = []
    latency = cost.latency_ns(topology.world_size) > 0
    # plans made for lockstep are good free ones, too
    for assumed in dict.fromkeys((sync, "lockstep")):
        for charged in (True, False) if latency else (False,):
            problem = make_problem(
                lengths, topology, cost, strategy=strategy, cap=cap, sync=assumed, charged=charged
            )
            found = _found(problem)
            if found:
                made = micro_batches_of(problem, found.block.tolist(), found.batch.tolist())
                exact = sync == "lockstep" and not latency
                as_found = found.objective, made
                plans.append(
                    as_found if exact else best_order(made, lengths, topology, cost, sync=sync)
                )
    to_beat = min((ns for ns, _ in plans), default=NEVER)
    for degree in static_degrees(topology) if strategy != "local" else (1,):
        if static_bound_ns(problem, degree) < to_beat:
            fixed = static_micro_batches(
                lengths, topology, cost, degree=degree, strategy=strategy, cap=cap
            )
            plans.append((step_ns(cost, fixed, lengths, topology, sync=sync), fixed))
    return min(plans, key=lambda pair: pair[0])[1]


def static_bound_ns(problem: Problem, degree: int) -> int:
    """Nanoseconds that one degree for everything cannot undercut; NEVER when a sequence does not
    fit it."""
    degrees = [d for d, _ in problem.blocks.shapes]
    if degree not in degrees:
        fits = -(-int(problem.lengths[0]) // degree) <= problem.cap
        return int(problem.least_area.sum()) // problem.world + problem.constant if fits else NEVER
    column = degrees.index(degree)
    if problem.times[0, column] == NEVER:
        return NEVER
    return int(problem.times[:, column].sum()) * degree // problem.world + problem.constant


def _found(problem: Problem) -> Filled | None:
    """The best candidate of subset search and search; of the former alone where nothing can be
    better."""
    few, surely = least_of_few(problem)
    if surely:
        return few
    candidates = [improved(problem, few) if few else None, _searched(problem)]
    return min((f for f in candidates if f), key=lambda f: f.objective, default=None)


def _searched(problem: Problem) -> Filled | None:
    """The best candidate for the fewest micro-batches, or for one more where that may pay.

    To free ranks one more costs nothing unless they use it.
    """
    fewest = problem.fewest_micro_batches
    if problem.free:
        return search(problem, fewest + 1, NEVER)
    found = search(problem, fewest, NEVER)
    full = (
        int(problem.lengths.sum()) * PERMILLE > NEARLY_FULL * fewest * problem.cap * problem.world
    )
    if full or not found:
        more = search(problem, fewest + 1, found.objective if found else NEVER)
        return min((f for f in (found, more) if f), key=lambda f: f.objective, default=None)
    return found


def search(problem: Problem, batches: int, beat: int) -> Filled | None:
    """The best complete candidate with `batches` micro-batches; `beat` is an objective in hand."""
    candidates = starting_candidates(problem, batches)
    if beat < NEVER:
        candidates = candidates.take(np.arange(min(GLANCE, len(candidates.fit))))
    best: list[tuple[Filled, Candidates]] = []
    keep = KEPT + len(recipes_of(problem, batches))
    for change in (*_changes(candidates), 0):
        count = FILLED[bool(best)]
        enough = (
            best[-1][0].objective * DOUBT // PERMILLE
            if len(best) == keep and not problem.free
            else NEVER
        )
        best = sorted(
            best + _tried(problem, candidates, count, enough), key=lambda pair: pair[0].objective
        )[:keep]
        if not best or not change or best[0][0].objective * PERMILLE > beat * HOPELESS:
            break
        candidates = _changed(problem, [kept for _, kept in best], change)
    if not best:
        return None
    found = best[0][0]
    if found.objective * PERMILLE > beat * HOPELESS:
        return found
    found = repair(problem, found)
    return found if problem.free else improved(problem, found)


def _changes(candidates: Candidates) -> tuple[int, ...]:
    """How much each round changes targets for the next one: fewer rounds where each of them is
    much work."""
    affordable_rounds = ROWS // max(1, int(candidates.long[0]))
    return CHANGES[min(max(affordable_rounds - 2, 0), len(CHANGES) - 1)]


def _tried(
    problem: Problem, candidates: Candidates, count: int, enough: int
) -> list[tuple[Filled, Candidates]]:
    """The `count` candidates with the lowest water levels, completed; only those that promise less
    than `enough`."""
    placed = place_long(problem, candidates)
    rises = water_levels(problem, candidates, placed)
    batches = candidates.targets.shape[1]
    promise = np.where(
        rises < NEVER, placed.targets.sum(axis=1) + (rises + problem.constant) * batches, NEVER
    )
    tried = []
    for which in np.argsort(promise, kind="stable")[:count].tolist():
        if promise[which] >= enough:
            break
        filled = fill_short(
            problem, placed, which, long=int(candidates.long[which]), rise=int(rises[which])
        )
        if filled is not None:
            tried.append((filled, candidates.take(np.array([which]))))
    return tried


def _changed(problem: Problem, kept: list[Candidates], change: int) -> Candidates:
    """A few copies of each kept candidate with every target changed by up to `change` per
    mille."""
    batches = kept[0].targets.shape[1]
    kept = sorted(kept, key=lambda c: -int(c.long[0]))
    copies = min(
        recipes_of(problem, batches)[0].copies,
        max(1, affordable(problem, batches, int(kept[0].long[0])) // len(kept)),
    )
    targets = np.concatenate([np.repeat(c.targets, copies, axis=0) for c in kept])
    return Candidates(
        targets=targets + targets * _noise(targets.shape, change) // PERMILLE,
        fit=np.concatenate([np.repeat(c.fit, copies) for c in kept]),
        long=np.concatenate([np.repeat(c.long, copies) for c in kept]),
        shapes=np.concatenate([np.repeat(c.shapes, copies, axis=0) for c in kept]),
    )


def _noise(shape: tuple[int, ...], change: int) -> Int64Array:
    """Fixed pseudo-random integers in [-change, change]: a linear congruential generator's high
    bits."""
    state, values = 12345 + change, []
    for _ in range(int(np.prod(shape))):
        state = (1103515245 * state + 12345) % 2**31
        values.append((state >> 8) % (2 * change + 1) - change)
    return np.array(values, dtype=np.int64).reshape(shape)
