"""Pipeline costs and plans for tests."""

from contextlib import ExitStack
from unittest.mock import patch

from hf_flexseq.pipeline.planning import (
    PipelineOptions,
    auto_schedule,
    fixed_orders,
    make_pipeline_plan,
)
from hf_flexseq.pipeline.planning.plan import Chunk, PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost, StageCost, chunk_costs, shape_of
from hf_flexseq.pipeline.planning.walk import timed
from hf_flexseq.plan.shard import Slice
from hf_flexseq.published.infinipipe import planner as infinipipe


def stage_cost(**changed):
    """A stage in which nothing is free and nothing is a round number."""
    times = {"linear_ns": 1000.0, "attention_ns": 0.7, "chunk_ns": 50_000.0, "layers": 5}
    sizes = {"token_bytes": 30.0, "kv_bytes": 4.0, "input_bytes": 2.0}
    return StageCost(**times | sizes | changed)


def chunk_of(*parts, unit=0, index=0):
    """A chunk of `parts`, each (sequence, start, stop)."""
    slices = tuple(Slice(sequence=i, start=start, stop=stop) for i, start, stop in parts)
    return Chunk(unit=unit, index=index, slices=slices)


def plan_of(actions, *, sizes=(), tokens=8, stages=None, **fields):
    """A plan of equal chunks, if `fields` have no others: unit u is sequence u, cut into sizes[u]
    chunks of `tokens` tokens."""
    chunks = tuple(
        chunk_of((unit, index * tokens, (index + 1) * tokens), unit=unit, index=index)
        for unit, size in enumerate(sizes)
        for index in range(size)
    )
    values = {
        "lengths": tuple(size * tokens for size in sizes),
        "ranks": len(actions),
        "stages": stages or len(actions),
        "chunks": chunks,
        "actions": tuple(actions),
        "checkpointed": (),
        "schedule": "test",
        "objective_s": 0.0,
        "planning_s": 0.0,
    }
    return PipelinePlan(**values | fields)


def pipelined(lengths, cost, *, chunks=None, **options):
    """The plan of `make_pipeline_plan` with these options. chunks: of the longest sequence; None
    lets the planner choose."""
    with ExitStack() as stack:
        if chunks is not None:

            def target(task, work, factor):
                return work.between(0, max(task.lengths)) / chunks

            stack.enter_context(patch.object(auto_schedule, "_target", target))
            stack.enter_context(patch.object(fixed_orders, "SEQ1F1B_CHUNKS", chunks))
            stack.enter_context(patch.object(infinipipe, "COUNTS", (chunks,)))
        return make_pipeline_plan(lengths, cost, PipelineOptions(**options))


def even_cost(stages, *, forward_ns=1000, tokens=8):
    """Every F takes `forward_ns`, every B twice that, and a token holds one byte."""
    stage = StageCost(
        linear_ns=forward_ns / tokens, attention_ns=0.0, chunk_ns=0.0, token_bytes=1.0
    )
    return PipelineCost.even(stages, stage)


def costs_of(plan, cost):
    """Nanoseconds and bytes of every chunk of a plan on every stage."""
    shapes = [shape_of(chunk.slices, plan.lengths) for chunk in plan.chunks]
    return chunk_costs(cost, shapes, plan.checkpointed)


def duration(action, place, costs):
    input_grad, weight_grad = (
        of_stage[action.stage][place] for of_stage in (costs.input_grad, costs.weight_grad)
    )
    if action.kind == "F":
        return costs.forward[action.stage][place]
    return {"I": input_grad, "W": weight_grad, "B": input_grad + weight_grad}[action.kind]


def relaxed(plan, cost):
    """When each action stops: every edge of the graph is pulled until nothing moves."""
    costs = costs_of(plan, cost)
    places = plan.places()
    stops = {action: 0 for actions in plan.actions for action in actions}
    gives = {
        (a.stage, "F" if a.kind == "F" else "B", a.unit, a.chunk): a
        for a in stops
        if a.kind != "W"
    }
    moved = True
    while moved:
        moved = False
        for actions in plan.actions:
            for before, action in zip((None, *actions), actions, strict=False):
                place = places[action.unit, action.chunk]
                way, step = ("F", -1) if action.kind == "F" else ("B", 1)
                giver = gives.get((action.stage + step, way, action.unit, action.chunk))
                giver = None if action.kind == "W" else giver
                start = max(stops.get(before, 0), stops[giver] + costs.send[place] if giver else 0)
                stop = start + duration(action, place, costs)
                moved, stops[action] = moved or stop != stops[action], stop
    return stops


def peak_bytes(plan, cost):
    """Of each rank, its peak bytes of chunks in flight."""
    peaks = [0] * plan.ranks
    for done in timed(plan, cost):
        peaks[done.rank] = max(peaks[done.rank], done.held)
    return tuple(peaks)
