"""Our own pipeline planner: few, level chunks, played in one pass under a memory limit.

1. How many chunks? Each costs its constant, 2.5 b over F, I and W, and fewer make longer chunks, of which P - 1 stand
   in the bubble: 2.5 b n + (P - 1) work / n is least at n = sqrt((P - 1) work / 2.5 b). A few factors of it are tried.
2. Every sequence is cut into equal parts of that size and short ones are packed to it (`pack.level_units`).
3. Some packs, the emptiest first, warm the pipeline up; then come the cut sequences, longest first, and the other
   packs, which drain it.
4. The step is played (`greedy.py`), and the fastest of the tried wins. Work is bounded by a count of played actions.

A unit that does not fit checkpoints the fewest layers that make it fit, or that leave room for its neighbours beside
it. Without a limit a stage may hold the largest unit and a window of 1.5 P mean chunks: more is hardly faster.

What is done otherwise than in InfiniPipe (arXiv 2509.21275): no mesh of the longest sequence, hence no tails; a window
in bytes, not in chunks of the longest sequence; no flush between groups; input and weight gradients apart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.pipeline.cuts import Work
from hf_flexseq.planner.pipeline.greedy import Played, actions_of, play
from hf_flexseq.planner.pipeline.pack import level_units
from hf_flexseq.planner.pipeline.problem import Answer, Task, layers_to_fit, unit_bytes
from hf_flexseq.planner.pipeline.units import Unit, shapes_of
from hf_flexseq.schedule.pipeline.cost import WEIGHT_CHUNK, ChunkCosts, PipelineCost, Shape, chunk_costs

FACTORS = (1.0, 1.4, 0.75, 2.0, 2.8, 1.2, 1.7, 2.4, 3.4, 4.0)
# Share of the packs that go first; mean chunks per stage kept free beside a unit; weight gradients at once?
TRIED = ((0.1, 0, False), (0.1, 0, True), (0.4, 0, False), (0.1, 1, False))
WINDOW = 1.5
MOST_CHUNKS = 1_000
ACTIONS = 24_000  # played in all


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """One way to do it. sizes: chunks of each unit. checkpointed: [stage][place] layers, () for none."""

    units: list[Unit]
    sizes: list[int]
    costs: ChunkCosts
    checkpointed: tuple[tuple[int, ...], ...]
    played: Played


def auto_pipeline(task: Task) -> Answer:
    """The fastest of the tried plans. Raises PlanInfeasible when none fits."""
    best: _Trial | None = None
    refused: PlanInfeasible | None = None
    left = ACTIONS
    for units, spare, prompt in _candidates(task):
        try:
            trial = _trial(units, task, spare=spare, prompt=prompt)
        except PlanInfeasible as error:
            refused = refused or error
            continue
        if best is None or trial.played.makespan < best.played.makespan:
            best = trial
        left -= 3 * task.stages * sum(trial.sizes)
        if left < 3 * task.stages * sum(trial.sizes):
            break
    if best is None:
        assert refused is not None, "there is always a candidate"
        raise refused
    return _answer(best)


def _candidates(task: Task) -> Iterator[tuple[list[Unit], int, bool]]:
    """Units to try, and the rest of `TRIED`; of that only what matters where there is no limit."""
    work, most_tokens = Work.of(task.cost, "time"), _most_tokens(task)
    for target in _targets(task, work):
        units = level_units(task.lengths, target, work, most_tokens)
        for front, spare, prompt in TRIED:
            if task.room is not None or not (spare or prompt):
                yield _ordered(units, front), spare, prompt


def _targets(task: Task, work: Work) -> list[float]:
    """Work of a chunk."""
    longest = work.between(0, max(task.lengths))
    if task.chunks is not None:
        return [longest / task.chunks]
    total = sum(work.between(0, length) for length in task.lengths)
    constant = (2 + WEIGHT_CHUNK) * sum(stage.chunk_ns for stage in task.cost.stages) / task.stages
    least = total / min(MOST_CHUNKS, sum(task.lengths))
    best = math.sqrt(total * constant / max(1, task.stages - 1))
    return [max(least, min(longest, best / factor)) for factor in FACTORS]


def _most_tokens(task: Task) -> int | None:
    """Tokens of a chunk: what is asked for, and so few that every stage has room for as many as there are stages."""
    if task.room is None:
        return task.most_tokens
    fits = min(
        int(room / (stage.token_bytes + stage.kv_bytes) / task.stages)
        for room, stage in zip(task.room, task.cost.stages, strict=True)
    )
    return max(1, min(fits, task.most_tokens or fits))


def _ordered(units: Sequence[Unit], front: float) -> list[Unit]:
    """A share of the packs first, the emptiest of them; then the cut sequences and the other packs."""
    cut = [unit for unit in units if len(unit) > 1]
    packs = [unit for unit in units if len(unit) == 1]
    first = len(packs) - math.ceil(front * len(packs))
    return packs[first:][::-1] + cut + packs[:first]


def _trial(units: list[Unit], task: Task, *, spare: int, prompt: bool) -> _Trial:
    """Play the step of these units, with checkpointing where a unit needs it."""
    sizes, shapes = [len(unit) for unit in units], shapes_of(units, task.lengths)
    costs = chunk_costs(task.cost, shapes)
    checkpointed: tuple[tuple[int, ...], ...] = ()
    room = _window(sizes, costs) if task.room is None else task.room
    beside = [spare * task.stages * sum(held) // len(held) for held in costs.held]
    if _exceeds(sizes, costs, room, beside):
        checkpointed = _checkpointed(units, shapes, costs, task.cost, room, beside)
        costs = chunk_costs(task.cost, shapes, checkpointed)
    played = play(sizes, costs, room, prompt=prompt)
    assert played is not None, "units that fit alone can be played"
    return _Trial(units=units, sizes=sizes, costs=costs, checkpointed=checkpointed, played=played)


def _window(sizes: Sequence[int], costs: ChunkCosts) -> tuple[int, ...]:
    """Bytes of each stage for the largest unit and a few chunks of its neighbours."""
    beside = WINDOW * len(costs.held) / len(costs.send)
    return tuple(
        max(unit_bytes(sizes, held, carried)) + round(beside * sum(held))
        for held, carried in zip(costs.held, costs.carried, strict=True)
    )


def _exceeds(sizes: Sequence[int], costs: ChunkCosts, room: Sequence[int], beside: Sequence[int]) -> bool:
    stages = zip(costs.held, costs.carried, room, beside, strict=True)
    return any(max(unit_bytes(sizes, held, carried)) + free > limit for held, carried, limit, free in stages)


def _checkpointed(
    units: Sequence[Unit],
    shapes: Sequence[Shape],
    costs: ChunkCosts,
    cost: PipelineCost,
    room: Sequence[int],
    beside: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """[stage][place] layers, the same for all chunks of a unit."""
    everything = [[stage.layers] * len(shapes) for stage in cost.stages]
    layers = layers_to_fit(units, costs, chunk_costs(cost, shapes, everything), cost, room, beside)
    return tuple(tuple(count for unit, count in zip(units, counts, strict=True) for _ in unit) for counts in layers)


def _answer(trial: _Trial) -> Answer:
    return Answer(
        units=trial.units,
        actions=actions_of(trial.played, trial.sizes, trial.costs),
        checkpointed=trial.checkpointed,
        makespan_ns=trial.played.makespan,
    )
