"""Our own pipeline planner: few, level chunks, played in one pass under a memory limit.

1. How many chunks? Each costs its constant, 2.5 b over F, I and W, and fewer make longer chunks,
   of which P - 1 stand in the bubble: 2.5 b n + (P - 1) work / n is least at n = sqrt((P - 1) work
   / 2.5 b). A few factors of it are tried.
2. Every sequence is cut into equal parts of that size and short ones are packed to it
   (`pack.level_units`).
3. Some packs, the emptiest first, warm the pipeline up; then come the cut sequences, longest
   first, and the other packs, which drain it.
4. The step is played (`greedy.py`), and the fastest of the tried wins. Work is bounded by a count
   of played actions.

A unit that does not fit checkpoints the fewest layers that make it fit, or that leave room for its
neighbours beside it. Without a limit a stage may hold the largest unit and a window of 1.5 P mean
chunks: more is hardly faster.

What is done otherwise than in InfiniPipe (arXiv 2509.21275): no mesh of the longest sequence,
hence no tails; a window in bytes, not in chunks of the longest sequence; no flush between groups;
input and weight gradients apart.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hf_flexseq.cost.stages import WEIGHT_CHUNK, ChunkCosts, PipelineCost, StageShape, chunk_costs
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.pipeline.cuts import CutWork
from hf_flexseq.planner.pipeline.greedy import Manner, Played, actions_of, play
from hf_flexseq.planner.pipeline.pack import level_units
from hf_flexseq.planner.pipeline.problem import Answer, Task, layers_to_fit, unit_bytes
from hf_flexseq.planner.pipeline.units import Unit, shapes_of

TURNS, PROMPT, GRADIENTS = Manner(), Manner(prompt=True), Manner(first="I")
PATIENT, FORWARDS = Manner(patience=1), Manner(first="F", patience=2)
WINDOW = 1.5
MOST_CHUNKS = 1_000
ACTIONS = 20_000  # played in all
OPTIONS = (1, 2)  # other things to do


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """How a trial goes about it. factor: of the number of chunks. front: share of the packs that
    go first. spare: mean chunks per stage kept free beside a unit, which matters within a limit
    only, as `manner.prompt` does."""

    factor: float = 1.0
    front: float = 0.1
    spare: int = 0
    manner: Manner = TURNS


WAYS = (  # the most useful first
    _Way(),
    _Way(factor=1.2, manner=GRADIENTS),
    _Way(manner=PROMPT),
    _Way(factor=1.4),
    _Way(spare=1),
    _Way(factor=0.75),
    _Way(factor=2.0),
    _Way(factor=1.4, manner=PROMPT),
    _Way(manner=GRADIENTS),
    _Way(manner=PATIENT),
    _Way(manner=FORWARDS),
    _Way(factor=2.0, manner=PROMPT),
    _Way(front=0.4),
    *(
        _Way(factor=factor, manner=manner)
        for factor in (2.8, 2.25, 1.2, 1.7, 3.4, 4.0)
        for manner in (TURNS, PROMPT)
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """One way to do it. sizes: chunks of each unit. checkpointed: [stage][place] layers, () for
    none. room: bytes of each stage."""

    way: _Way
    units: list[Unit]
    sizes: list[int]
    costs: ChunkCosts
    checkpointed: tuple[tuple[int, ...], ...]
    room: tuple[int, ...]
    played: Played

    @property
    def actions(self) -> int:
        return 3 * len(self.room) * len(self.costs.send)


def auto_pipeline(task: Task) -> Answer:
    """The fastest of the tried plans. Raises PlanInfeasible when none fits."""
    trials: list[_Trial] = []
    refused: PlanInfeasible | None = None
    left = ACTIONS
    for way, units in _candidates(task):
        try:
            trials.append(_trial(way, units, task))
        except PlanInfeasible as error:
            refused = refused or error
            continue
        left -= trials[-1].actions
        if left < trials[-1].actions:
            break
    if not trials:
        assert refused is not None, "there is always a candidate"
        raise refused
    return _answer(_polished(_distinct(trials), left))


def _distinct(trials: Sequence[_Trial]) -> list[_Trial]:
    """The fastest first, those that came to the same orders only once."""
    found: dict[tuple[int, ...], _Trial] = {}
    for trial in sorted(trials, key=lambda trial: trial.played.makespan):
        found.setdefault((trial.played.makespan, *itertools.chain(*trial.played.orders)), trial)
    return list(found.values())


def _polished(trials: Sequence[_Trial], left: int) -> _Trial:
    """The fastest trial after each has put off the one action whose delay helps most, and then the
    next one, for as many actions as are left to play."""
    best = trials[0]
    for trial in trials:
        kept: dict[int, int] = {}
        while True:
            found, better = trial.played, kept
            for number, option in itertools.product(range(trial.actions), OPTIONS):
                left -= trial.actions
                if left < 0:
                    return best
                deviations = {**kept, number: option}
                played = play(trial.sizes, trial.costs, trial.room, trial.way.manner, deviations)
                if played is not None and played.makespan < found.makespan:
                    found, better = played, deviations
            if found is trial.played:
                break
            trial, kept = replace(trial, played=found), better
            best = min(best, trial, key=lambda trial: trial.played.makespan)
    return best


def _candidates(task: Task) -> Iterator[tuple[_Way, list[Unit]]]:
    """Ways to try with their units, of `WAYS` those that differ here."""
    work, most_tokens = CutWork.of(task.cost, "time"), _most_tokens(task)
    units: dict[float, list[Unit]] = {}
    for way in WAYS:
        matters = way.factor == 1.0 or task.chunks is None
        if matters and (task.room is not None or not (way.spare or way.manner.prompt)):
            target = _target(task, work, way.factor)
            if target not in units:
                units[target] = level_units(task.lengths, target, work, most_tokens)
            yield way, _ordered(units[target], way.front)


def _target(task: Task, work: CutWork, factor: float) -> float:
    """Work of a chunk."""
    longest = work.between(0, max(task.lengths))
    if task.chunks is not None:
        return longest / task.chunks
    total = sum(work.between(0, length) for length in task.lengths)
    constant = (2 + WEIGHT_CHUNK) * sum(stage.chunk_ns for stage in task.cost.stages) / task.stages
    least = total / min(MOST_CHUNKS, sum(task.lengths))
    best = math.sqrt(total * constant / max(1, task.stages - 1))
    return max(least, min(longest, best / factor))


def _most_tokens(task: Task) -> int | None:
    """Tokens of a chunk: what is asked for, and so few that every stage has room for as many as
    there are stages."""
    if task.room is None:
        return task.most_tokens
    fits = min(
        int(room / (stage.token_bytes + stage.kv_bytes) / task.stages)
        for room, stage in zip(task.room, task.cost.stages, strict=True)
    )
    return max(1, min(fits, task.most_tokens or fits))


def _ordered(units: Sequence[Unit], front: float) -> list[Unit]:
    """A share of the packs first, the emptiest of them; then the cut sequences and the other
    packs."""
    cut = [unit for unit in units if len(unit) > 1]
    packs = [unit for unit in units if len(unit) == 1]
    first = len(packs) - math.ceil(front * len(packs))
    return packs[first:][::-1] + cut + packs[:first]


def _trial(way: _Way, units: list[Unit], task: Task) -> _Trial:
    """Play the step of these units, with checkpointing where a unit needs it."""
    sizes, shapes = [len(unit) for unit in units], shapes_of(units, task.lengths)
    costs = chunk_costs(task.cost, shapes)
    checkpointed: tuple[tuple[int, ...], ...] = ()
    room = _window(sizes, costs) if task.room is None else task.room
    beside = [way.spare * task.stages * sum(held) // len(held) for held in costs.held]
    if _exceeds(sizes, costs, room, beside):
        checkpointed = _checkpointed(units, shapes, costs, task.cost, room, beside)
        costs = chunk_costs(task.cost, shapes, checkpointed)
    played = play(sizes, costs, room, way.manner)
    assert played is not None, "units that fit alone can be played"
    return _Trial(
        way=way,
        units=units,
        sizes=sizes,
        costs=costs,
        checkpointed=checkpointed,
        room=room,
        played=played,
    )


def _window(sizes: Sequence[int], costs: ChunkCosts) -> tuple[int, ...]:
    """Bytes of each stage for the largest unit and a few chunks of its neighbours."""
    beside = WINDOW * len(costs.held) / len(costs.send)
    return tuple(
        max(unit_bytes(sizes, held, carried)) + round(beside * sum(held))
        for held, carried in zip(costs.held, costs.carried, strict=True)
    )


def _exceeds(
    sizes: Sequence[int], costs: ChunkCosts, room: Sequence[int], beside: Sequence[int]
) -> bool:
    stages = zip(costs.held, costs.carried, room, beside, strict=True)
    return any(
        max(unit_bytes(sizes, held, carried)) + free > limit
        for held, carried, limit, free in stages
    )


def _checkpointed(
    units: Sequence[Unit],
    shapes: Sequence[StageShape],
    costs: ChunkCosts,
    cost: PipelineCost,
    room: Sequence[int],
    beside: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """[stage][place] layers, the same for all chunks of a unit."""
    everything = [[stage.layers] * len(shapes) for stage in cost.stages]
    layers = layers_to_fit(units, costs, chunk_costs(cost, shapes, everything), cost, room, beside)
    return tuple(
        tuple(count for unit, count in zip(units, counts, strict=True) for _ in unit)
        for counts in layers
    )


def _answer(trial: _Trial) -> Answer:
    return Answer(
        units=trial.units,
        actions=actions_of(trial.played, trial.sizes, trial.costs),
        checkpointed=trial.checkpointed,
        makespan_ns=trial.played.makespan,
    )
