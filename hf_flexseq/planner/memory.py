"""Which choice for activations (`plan/memory.py`) each micro-batch of a step is planned with.

Choices form a ladder (`cost/choices.py`): a rung has more room for tokens than the one below it,
and takes longer for each. The lowest one is the user's setting. A step can be planned

    as set        all of it on the lowest rung
    long apart    sequences that do not fit there on the lowest rung that holds the longest, in
                  separate micro-batches, and all others as set
    on a rung     all of it on a higher one: long sequences then need fewer ranks, and the step
                  fewer micro-batches

The way is planned that has the least bound on its seconds (`lower_bound.py`); as set counts 3 %
less. Another one is planned where its bound promises so much over the best plan so far. Every
micro-batch then takes the lowest rung that holds its fullest rank. So most steps are planned once,
and those that cannot gain as if there were no choices.

Rejected: a choice for each rank. Ranks of a group must agree on the activations that they compute
again, and other ranks wait for the slowest anyway. Rejected: short sequences beside long ones that
do not fit as set, as many as time allows. On 120 steps that gained nothing over the ways above.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.choices import choices_of, most_tokens, token_bytes, with_choice
from hf_flexseq.cost.lengths import Lengths
from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.groups import with_ids
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.lower_bound import step_bound_ns
from hf_flexseq.planner.task import PlanTask

# Share of a step's seconds below which another way of planning it is tried.
WORTH = 0.97


class Rung(NamedTuple):
    """A choice, and the tokens that a rank can hold under it."""

    choice: MemoryChoice | None
    """None as set for the run."""
    tokens: int
    """Most tokens of a rank."""


def may_choose(cost: CostModel, options: PlanOptions) -> bool:
    """Return True if a planner may choose for micro-batches; a bound of the user's is kept."""
    takes = PLANNERS[options.planner].takes_choices
    return takes and cost.activations is not None and options.max_tokens_per_rank is None


def rungs_of(
    cost: CostModel, options: PlanOptions, world_size: int, held_tokens: int = 0
) -> tuple[Rung, ...]:
    """Return the rungs that a planner may use, by rising tokens, the lowest as set for the run.

    held_tokens: whose memory is taken, counted as set for the run. Raises ValueError where model
    states leave no room for a token on any rung.
    """
    if options.max_tokens_per_rank is not None:
        return (Rung(None, options.max_tokens_per_rank),)
    if not may_choose(cost, options):
        return (Rung(None, max(0, cost.max_tokens_per_rank(world_size) - held_tokens)),)
    rungs: list[Rung] = []
    for choice in choices_of(cost, world_size):
        held = math.ceil(held_tokens * cost.token_bytes / token_bytes(cost, choice))
        tokens = max(0, most_tokens(cost, choice, world_size) - held)
        if not rungs:
            rungs.append(Rung(None, tokens))
        elif tokens > rungs[-1].tokens:
            rungs.append(Rung(choice, tokens))
    if not rungs[-1].tokens:
        cost.max_tokens_per_rank(world_size)  # raises where there is no room beside states
    return tuple(rungs)


def planned_by_rung(
    task: PlanTask,
    rungs: Sequence[Rung],
    planned: Callable[[PlanTask], tuple[MicroBatch, ...]],
) -> tuple[tuple[MicroBatch, ...], float]:
    """Return a step's micro-batches, each with its choice, and nanoseconds that the step takes at
    least as set for the run; infinite where a sequence fits nowhere so.

    task: at least one sequence, under the lowest rung. rungs: from `rungs_of`; the highest one
    holds the longest sequence. planned: plans a task on one rung.
    """
    as_set_ns = math.inf
    if max(task.lengths) <= _room(rungs[0], task):
        as_set_ns = step_bound_ns(task)
        least_ns = step_bound_ns(replace(task, cap=rungs[-1].tokens))
        if len(rungs) == 1 or least_ns > WORTH * as_set_ns:
            return planned(task), as_set_ns
    ways = [*_ways(task, rungs)]
    as_set = ways[0] if math.isfinite(as_set_ns) else None
    bounds = []
    for index, way in enumerate(ways):
        bounds.append((WORTH * as_set_ns if way is as_set else _bound_ns(way), index))
    best: tuple[MicroBatch, ...] = ()
    best_ns = math.inf
    for bound_ns, index in sorted(bounds):
        if bound_ns > WORTH * best_ns:
            break
        made: list[MicroBatch] = []
        for part, ids in ways[index]:
            made += [with_ids(micro_batch, ids, {}) for micro_batch in planned(part)]
        relaxed = tuple(_relaxed(micro_batch, task, rungs) for micro_batch in made)
        nanoseconds = step_ns(task.cost, relaxed, task.lengths, task.topology, sync=task.sync)
        if ways[index] is as_set:
            as_set_ns = nanoseconds
        if nanoseconds < best_ns:
            best, best_ns = relaxed, nanoseconds
    return best, as_set_ns


def promise_ns(
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    options: PlanOptions,
    *,
    held_tokens: int = 0,
) -> float:
    """Return nanoseconds that no plan of a step undercuts, on any rung; infinite where a sequence
    fits nowhere. Arguments: as of `make_plan`, with memory as the only bound on the tokens of a
    rank."""
    try:
        rungs = rungs_of(cost, options, topology.world_size, held_tokens)
    except ValueError:  # model states leave no room
        return math.inf
    task = PlanTask.of(lengths, topology, cost, options, cap=rungs[0].tokens)
    return min((_bound_ns(way) for way in _ways(task, rungs)), default=math.inf)


# ---- ways to plan a step

# Tasks, each with the ids of its sequences.
_Way = Sequence[tuple[PlanTask, Sequence[int]]]


def _ways(task: PlanTask, rungs: Sequence[Rung]) -> Iterator[_Way]:
    """Yield the ways to plan a step that hold all of its sequences; as set comes first."""
    every = range(len(task.lengths))
    longest = max(task.lengths, default=0)
    holding = [rung for rung in rungs if longest <= _room(rung, task)]
    long = [i for i in every if task.lengths[i] > _room(rungs[0], task)]
    if holding and 0 < len(long) < len(every):
        short = [i for i in every if task.lengths[i] <= _room(rungs[0], task)]
        yield _part(task, holding[0], long), _part(task, rungs[0], short)
    for rung in holding:
        yield (_part(task, rung, every),)


def _room(rung: Rung, task: PlanTask) -> int:
    """Return the tokens of the longest sequence that a group holds on a rung."""
    if task.strategy == "local":
        return rung.tokens
    return rung.tokens * (task.sp_degree or task.topology.world_size)


def _part(task: PlanTask, rung: Rung, ids: Sequence[int]) -> tuple[PlanTask, Sequence[int]]:
    """Return the task of some sequences on one rung, and their ids."""
    tokens = tuple(task.lengths[i] for i in ids)
    if isinstance(task.lengths, Lengths):
        tokens = Lengths(tokens, [task.lengths.shares[i] for i in ids])
    cost = with_choice(task.cost, rung.choice)
    return replace(task, lengths=tokens, cost=cost, cap=rung.tokens), ids


def _bound_ns(way: _Way) -> int:
    """Return nanoseconds that no plan of a way undercuts."""
    return sum(step_bound_ns(part) for part, _ in way)


def _relaxed(micro_batch: MicroBatch, task: PlanTask, rungs: Sequence[Rung]) -> MicroBatch:
    """Return a micro-batch on the lowest rung that holds its fullest rank."""
    fullest = max(micro_batch.tokens_per_rank(task.lengths, task.topology.world_size))
    lowest = next(rung for rung in rungs if fullest <= rung.tokens)
    return replace(micro_batch, memory=lowest.choice)
