"""InfiniPipe's planner (arXiv 2509.21275), re-created from the paper's text; its code is not
public.

For every number K of slices of the longest sequence

1. `chunking.py` makes the chunks;
2. units are grouped by how many chunks they have, and every group is a 1F1B pipeline of its own,
   more chunks first, flushed before the next: a dynamic program over chunk counts (equation 14)
   weighs the cost of a flush, (P - 1) x the mean chunk's time, against recomputing;
3. where a group holds more than there is room for, a program chooses the layers to recompute on
   every diagonal of the pipeline (`planner/checkpointing_milp.py`).

The best K is the one whose step is shortest when simulated; the paper optimises it "in the solving
process". The window of a group is P - p + the chunks of its longest sequence (equation 7), which
is what 1F1B's order gives.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from hf_flexseq.config import require_solver
from hf_flexseq.cost.stages import ChunkCosts, chunk_costs
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.pipeline import Action, PipelinePlan
from hf_flexseq.planner.pipeline.chunking import infinipipe_units
from hf_flexseq.planner.pipeline.cuts import CutWork
from hf_flexseq.planner.pipeline.problem import Answer, Task
from hf_flexseq.planner.pipeline.units import Unit, chunks_of, shapes_of
from hf_flexseq.schedule.pipeline.orders import backward_names, one_forward_one_backward
from hf_flexseq.schedule.pipeline.walk import makespan_ns

COUNTS = range(1, 97)  # the K that are tried
# What seems to take so much longer than the best plan is not looked at, of plans that flush and
# that recompute.
HOPELESS = {False: 1.02, True: 1.005}


# excess bytes, (diagonal, bytes saved per layer) in flight
Moment = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Units [start, stop) as one pipeline. layers: recomputed on each diagonal, () for none.
    price: nanoseconds of recomputing and of the flush."""

    start: int
    stop: int
    layers: tuple[int, ...]
    price: float


def infinipipe_pipeline(task: Task) -> Answer:
    """The best plan over all K. Raises PlanInfeasible when there is none."""
    if task.room is not None:
        require_solver("pipeline_schedule='infinipipe' within a memory limit")
    work = CutWork.of(task.cost, "time")
    counts = COUNTS if task.chunks is None else (task.chunks,)
    trials = [infinipipe_units(task.lengths, k, work, task.most_tokens) for k in counts]
    free = [
        (_makespan(_answer(units, [_whole(units)], task), task), place)
        for place, units in enumerate(trials)
    ]
    best: tuple[int, Answer] | None = None
    # flushing alone first: it is quickly found, and bounds what is worth solving
    for recompute in (False, True):
        for unlimited, place in sorted(free):
            spare = math.inf if best is None else HOPELESS[recompute] * best[0] - unlimited
            groups = (
                _grouped(trials[place], task, spare, recompute=recompute) if spare > 0 else None
            )
            if groups is not None:
                answer = _answer(trials[place], groups, task)
                took = _makespan(answer, task)
                best = (took, answer) if best is None or took < best[0] else best
    if best is None:
        raise PlanInfeasible(
            f"sequence {task.lengths.index(max(task.lengths))} fits for no number of chunks: not "
            f"even all layers "
            "checkpointed save enough. Give more memory or use more stages"
        )
    return best[1]


def _whole(units: Sequence[Unit]) -> _Group:
    return _Group(start=0, stop=len(units), layers=(), price=0.0)


def _grouped(
    units: list[Unit], task: Task, spare: float, *, recompute: bool
) -> list[_Group] | None:
    """The cheapest groups, more chunks first; None when no grouping fits, or none that costs at
    most `spare` nanoseconds more than one pipeline without recomputing."""
    if task.room is None:
        return [_whole(units)]
    sizes = [len(unit) for unit in units]
    ends = [
        0,
        *(stop for stop in range(1, len(units)) if sizes[stop] != sizes[stop - 1]),
        len(units),
    ]
    shapes = shapes_of(units, task.lengths)
    everything = [[stage.layers] * len(shapes) for stage in task.cost.stages]
    full, bare = chunk_costs(task.cost, shapes), chunk_costs(task.cost, shapes, everything)
    cheapest: dict[int, tuple[float, list[_Group]]] = {0: (0.0, [])}
    spare += _passes(full, slice(None))[1] * (task.stages - 1)
    for stop in ends[1:]:
        for start in reversed([end for end in ends if end < stop and end in cheapest]):
            before, groups = cheapest[start]
            beat = cheapest[stop][0] - before if stop in cheapest else spare - before
            group = _group(start, stop, sizes, full, bare, task, beat=beat, recompute=recompute)
            if group is not None:
                cheapest[stop] = (before + group.price, [*groups, group])
    return cheapest[len(units)][1] if len(units) in cheapest else None


def _group(
    start: int,
    stop: int,
    sizes: Sequence[int],
    full: ChunkCosts,
    bare: ChunkCosts,
    task: Task,
    *,
    beat: float,
    recompute: bool,
) -> _Group | None:
    """Units [start, stop) as a pipeline, with the layers that have to be recomputed; None when it
    cannot fit, costs no less than `beat`, or may not `recompute` and has to."""
    offsets = list(accumulate(sizes, initial=0))
    places = slice(offsets[start], offsets[stop])
    count, stages = offsets[stop] - offsets[start], task.stages
    forward, both = _passes(full, places)
    flush = (stages - 1) * both
    most = min(stage.layers for stage in task.cost.stages)
    if flush >= beat:
        return None
    moments = list(
        islice(
            _moments(sizes[start:stop], offsets[start], full, bare, task), None if recompute else 1
        )
    )
    if not moments:
        return _Group(start=start, stop=stop, layers=(), price=flush)
    if not recompute or flush + _least_layers(moments) * forward / most >= beat:
        return None
    # its solver is an optional dependency
    from hf_flexseq.planner.pipeline.checkpointing_milp import (
        CheckpointingTask,
        solve,
    )

    variables = count + stages - 1
    limit = int(min(variables * most, (beat - flush) * most / forward))
    layers = solve(
        CheckpointingTask(variables=variables, most=most, limit=limit, moments=tuple(moments))
    )
    if layers is None:
        return None
    return _Group(
        start=start, stop=stop, layers=layers, price=flush + sum(layers) * forward / most
    )


def _passes(costs: ChunkCosts, places: slice) -> tuple[float, float]:
    """Mean nanoseconds of a chunk's forward on a stage, and of its forward and backward."""
    forward, input_grad, weight_grad = (
        sum(sum(row[places]) for row in rows) / sum(len(row[places]) for row in rows)
        for rows in (costs.forward, costs.input_grad, costs.weight_grad)
    )
    return forward, forward + input_grad + weight_grad


def _least_layers(moments: Sequence[Moment]) -> int:
    """A lower bound on all diagonals' layers: what moments without a common diagonal need."""
    used: set[int] = set()
    least = 0
    for excess, terms in moments:
        diagonals = {diagonal for diagonal, _ in terms}
        if not used & diagonals:
            used |= diagonals
            least += -(-excess // max(1, max(saved for _, saved in terms)))
    return least


def _moments(
    sizes: Sequence[int], offset: int, full: ChunkCosts, bare: ChunkCosts, task: Task
) -> Iterator[Moment]:
    """(excess, (diagonal, bytes saved per layer) of every chunk in flight) when a stage would hold
    too much. offset: place of the first chunk."""
    assert task.room is not None, "without a limit nothing is too much"
    firsts = list(accumulate(sizes, initial=offset))
    turns = {firsts[unit] + index: k for k, (unit, index) in enumerate(backward_names(sizes))}
    for stage, actions in enumerate(one_forward_one_backward(sizes, task.stages)):
        held, carried = full.held[stage], full.carried[stage]
        saved = [
            (high - low) // task.cost.stages[stage].layers
            for high, low in zip(held, bare.held[stage], strict=True)
        ]
        flying: dict[int, int] = {}
        total, reached = 0, task.stages - 1 - stage
        for action in actions:
            place = firsts[action.unit] + action.chunk
            if action.kind == "F":
                flying[place] = turns[place] + reached
                total += held[place] + (carried[place] if action.chunk == 0 else 0)
            gradients = (
                carried[place]
                if action.kind == "B" and action.chunk == sizes[action.unit] - 1
                else 0
            )
            total += gradients
            if total > task.room[stage] and (action.kind == "F" or gradients):
                yield (
                    total - task.room[stage],
                    tuple((diagonal, saved[p]) for p, diagonal in flying.items()),
                )
            if action.kind == "B":
                del flying[place]
                total -= held[place] + (2 * carried[place] if action.chunk == 0 else 0)


def _answer(units: list[Unit], groups: Sequence[_Group], task: Task) -> Answer:
    """One pipeline after the other."""
    lists: list[list[Action]] = [[] for _ in range(task.stages)]
    layers: list[list[int]] = [[] for _ in range(task.stages)]
    for group in groups:
        sizes = [len(unit) for unit in units[group.start : group.stop]]
        for stage, actions in enumerate(
            one_forward_one_backward(sizes, task.stages, first=group.start)
        ):
            lists[stage] += actions
            layers[stage] += _layers(sizes, group.layers, task.stages - 1 - stage)
    checkpointed = tuple(map(tuple, layers)) if any(map(any, layers)) else ()
    return Answer(units=units, actions=tuple(map(tuple, lists)), checkpointed=checkpointed)


def _layers(sizes: Sequence[int], diagonals: Sequence[int], reached: int) -> list[int]:
    """Checkpointed layers by place, from those of the diagonals. reached: stages from this one to
    the last."""
    if not diagonals:
        return [0] * sum(sizes)
    firsts = list(accumulate(sizes, initial=0))
    layers = [0] * sum(sizes)
    for k, (unit, index) in enumerate(backward_names(sizes)):
        layers[firsts[unit] + index] = diagonals[k + reached]
    return layers


def _makespan(answer: Answer, task: Task) -> int:
    plan = PipelinePlan(
        lengths=task.lengths,
        ranks=task.stages,
        stages=task.stages,
        chunks=chunks_of(answer.units),
        actions=answer.actions,
        checkpointed=answer.checkpointed,
        schedule="infinipipe",
        objective_s=0.0,
        planning_s=0.0,
    )
    return makespan_ns(plan, task.cost)
