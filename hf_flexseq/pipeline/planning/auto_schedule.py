"""Our own pipeline planner: few, level chunks, played in one pass under a memory limit.

1. How many chunks? Each costs its constant b, 2.5 times over F, I and W. Fewer chunks are longer,
   and the bubble takes as long as P - 1 of them: 2.5 b n + (P - 1) work / n is least at
   n = sqrt((P - 1) work / 2.5 b). A few factors of this n are tried (`FACTORS`).
2. Every sequence is cut into equal parts of that size and short ones are packed to it
   (`pack.level_units`).
3. Cut sequences start, longest first, then packs, the emptiest last, which drain the pipeline.
4. The step is played (`greedy.play`), and the fastest trial wins. A count of played actions bounds
   the planner's work, never a clock.

A unit that does not fit checkpoints the fewest layers that make it fit. Without a limit a stage
may hold the largest unit and a window of 1.5 P mean chunks: more is hardly faster.

Rejected: some packs before the cut sequences, and room for the neighbours of a unit that does not
fit. Both were slower, or gained nothing, on 216 steps.

Differences from InfiniPipe (arXiv 2509.21275): no mesh of the longest sequence, hence no tails; a
window in bytes, not in chunks of the longest sequence; no flush between groups; input and weight
gradients apart.
"""

import math
from collections.abc import Sequence

from hf_flexseq.pipeline.planning.cuts import CutWork
from hf_flexseq.pipeline.planning.greedy import Played, actions_of, play
from hf_flexseq.pipeline.planning.pack import level_units
from hf_flexseq.pipeline.planning.stage_cost import WEIGHT_CHUNK, ChunkCosts, chunk_costs
from hf_flexseq.pipeline.planning.units import (
    Layers,
    PipelineAnswer,
    PipelineTask,
    Unit,
    layers_to_fit,
    shapes_of,
    unit_bytes,
)
from hf_flexseq.plan import PlanInfeasible

# Chosen by simulated seconds and peaks on long-tailed batches, and by the planner's CPU time
# (tests/pipeline/test_timeline.py holds both).
WINDOW = 1.5  # mean chunks per stage that may be in flight besides the largest unit
MOST_CHUNKS = 1_000  # chunks of equal work that a step is cut into, at most
MOST_ACTIONS = 18_000  # actions played in all trials of a step together
# Of the number of chunks of step 1; the most useful first, since the count of actions may end them
# early.
FACTORS = (1.0, 1.4, 0.75, 2.0, 2.8, 1.2, 1.7, 4.0, 0.6)


def auto_pipeline(task: PipelineTask) -> PipelineAnswer:
    """Return the fastest plan of all trials. Raises PlanInfeasible when none fits."""
    best: tuple[Played, list[Unit], ChunkCosts, Layers] | None = None
    refused: PlanInfeasible | None = None
    actions_left = MOST_ACTIONS
    work = CutWork.of(task.cost)
    most_tokens = _most_tokens(task)
    for target in dict.fromkeys(_target(task, work, factor) for factor in FACTORS):
        units = level_units(task.lengths, target, work, most_tokens)
        sizes = [len(unit) for unit in units]
        try:
            costs, memory_limit, checkpointed = _in_memory(units, task)
        except PlanInfeasible as error:
            refused = refused or error
            continue
        played = play(sizes, costs, memory_limit)
        assert played is not None, "units that fit alone can be played"
        if best is None or played.makespan < best[0].makespan:
            best = played, units, costs, checkpointed
        actions = 3 * task.stages * sum(sizes)  # F, I and W of each chunk on each stage
        actions_left -= actions
        if actions_left < actions:
            break
    if best is None:
        assert refused is not None, "there is always a candidate"
        raise refused
    played, units, costs, checkpointed = best
    return PipelineAnswer(
        units=units,
        actions=actions_of(played, [len(unit) for unit in units], costs),
        checkpointed=checkpointed,
        makespan_ns=played.makespan,
    )


def _target(task: PipelineTask, work: CutWork, factor: float) -> float:
    """Return the work of a chunk in nanoseconds, for `factor` times the best number of chunks."""
    longest = work.between(0, max(task.lengths))
    total = sum(work.between(0, length) for length in task.lengths)
    least = total / min(MOST_CHUNKS, sum(task.lengths))
    # the constants of a chunk's F, I and W, on a mean stage
    chunk_ns = sum(stage.chunk_ns for stage in task.cost.stages)
    constant = (2 + WEIGHT_CHUNK) * chunk_ns / task.stages
    best = math.sqrt(total * constant / max(1, task.stages - 1))
    return max(least, min(longest, best / factor))


def _most_tokens(task: PipelineTask) -> int | None:
    """Return the maximum tokens of a chunk: each stage has room for one chunk per stage."""
    if task.options.memory_limit is None:
        return task.options.max_tokens
    limits = []
    for memory_limit, stage in zip(task.options.memory_limit, task.cost.stages, strict=True):
        token_bytes = stage.token_bytes + stage.kv_bytes
        limits.append(int(memory_limit / token_bytes / task.stages))
    if task.options.max_tokens is not None:
        limits.append(task.options.max_tokens)
    return max(1, min(limits))


def _in_memory(units: list[Unit], task: PipelineTask) -> tuple[ChunkCosts, Sequence[int], Layers]:
    """Return the costs of the units' chunks, the bytes of each stage, and [stage][chunk] the
    checkpointed layers. Raises PlanInfeasible if a unit cannot fit."""
    shapes = shapes_of(units, task.lengths)
    costs = chunk_costs(task.cost, shapes)
    sizes = [len(unit) for unit in units]
    memory_limit = task.options.memory_limit
    if memory_limit is None:
        return costs, _window(sizes, costs), ()
    everything = [[stage.layers] * len(shapes) for stage in task.cost.stages]
    bare = chunk_costs(task.cost, shapes, everything)
    checkpointed = []
    for layers in layers_to_fit(units, costs, bare, task.cost, memory_limit):
        of_chunks: list[int] = []
        for size, count in zip(sizes, layers, strict=True):
            of_chunks += [count] * size
        checkpointed.append(tuple(of_chunks))
    if not any(map(any, checkpointed)):
        return costs, memory_limit, ()
    return chunk_costs(task.cost, shapes, checkpointed), memory_limit, tuple(checkpointed)


def _window(sizes: Sequence[int], costs: ChunkCosts) -> tuple[int, ...]:
    """Return the bytes of each stage for the largest unit and `WINDOW` mean chunks per stage."""
    window = WINDOW * len(costs.held) / len(costs.send)
    memory_limit = []
    for held, carried in zip(costs.held, costs.carried, strict=True):
        memory_limit.append(max(unit_bytes(sizes, held, carried)) + round(window * sum(held)))
    return tuple(memory_limit)
