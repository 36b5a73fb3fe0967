"""Our own pipeline planner: few, level chunks, played in one pass under a memory limit.

1. How many chunks? Each costs its constant b, 2.5 times over F, I and W, and fewer chunks are
   longer, and P - 1 of them stand in the bubble: 2.5 b n + (P - 1) work / n is least at
   n = sqrt((P - 1) work / 2.5 b). A few factors of this n are tried (`WAYS`).
2. Every sequence is cut into equal parts of that size and short ones are packed to it
   (`pack.level_units`).
3. Some packs, the emptiest first, warm the pipeline up; then come the cut sequences, longest
   first, and the other packs, which drain it.
4. The step is played (`greedy.play`), and the fastest trial wins, after single actions were put
   off where that helps. A count of played actions bounds the planner's work, never a clock.

A unit that does not fit checkpoints the fewest layers that make it fit, or that leave room for its
neighbours beside it. Without a limit a stage may hold the largest unit and a window of 1.5 P mean
chunks: more is hardly faster.

What is done otherwise than in InfiniPipe (arXiv 2509.21275): no mesh of the longest sequence,
hence no tails; a window in bytes, not in chunks of the longest sequence; no flush between groups;
input and weight gradients apart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hf_flexseq.cost.stages import WEIGHT_CHUNK, ChunkCosts, PipelineCost, StageShape, chunk_costs
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.pipeline.cuts import CutWork
from hf_flexseq.planner.pipeline.greedy import Played, Policy, actions_of, play
from hf_flexseq.planner.pipeline.pack import level_units
from hf_flexseq.planner.pipeline.units import (
    Layers,
    PipelineAnswer,
    PipelineTask,
    Unit,
    layers_to_fit,
    shapes_of,
    unit_bytes,
)

# Chosen with the benchmark of pipelines (scripts/benchmarks/pipeline.py): its part "tail" weighs
# seconds and peaks on long-tailed batches, its part "planning" prints the planner's CPU time.
WINDOW = 1.5  # mean chunks per stage that may be in flight besides the largest unit
MOST_CHUNKS = 1_000  # chunks of equal work that a step is cut into, at most
MOST_ACTIONS = 20_000  # actions played in all trials of a step together
OPTIONS = (1, 2)  # what is tried instead of an action: see `deviations` of `greedy.play`

TURNS = Policy()
W_FIRST = Policy(w_first=True)
I_FIRST = Policy(first="I")
W_DELAYED = Policy(w_delay=1)
F_FIRST = Policy(first="F", w_delay=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """Settings of one trial."""

    factor: float = 1.0
    """Multiplies the number of chunks of step 1."""

    front: float = 0.1
    """Share of the packs that go first."""

    spare: int = 0
    """Mean chunks per stage of headroom besides a unit; used only with a limit."""

    policy: Policy = TURNS
    """The rule of the play. `w_first` has an effect within a limit only."""


WAYS = (  # the most useful first, since the count of actions may end the trials early
    _Way(),
    _Way(factor=1.2, policy=I_FIRST),
    _Way(policy=W_FIRST),
    _Way(factor=1.4),
    _Way(spare=1),
    _Way(factor=0.75),
    _Way(factor=2.0),
    _Way(factor=1.4, policy=W_FIRST),
    _Way(policy=I_FIRST),
    _Way(policy=W_DELAYED),
    _Way(policy=F_FIRST),
    _Way(factor=2.0, policy=W_FIRST),
    _Way(front=0.4),
    _Way(factor=2.8),
    _Way(factor=2.8, policy=W_FIRST),
    _Way(factor=2.25),
    _Way(factor=2.25, policy=W_FIRST),
    _Way(factor=1.2),
    _Way(factor=1.2, policy=W_FIRST),
    _Way(factor=1.7),
    _Way(factor=1.7, policy=W_FIRST),
    _Way(factor=3.4),
    _Way(factor=3.4, policy=W_FIRST),
    _Way(factor=4.0),
    _Way(factor=4.0, policy=W_FIRST),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """A step that was planned in one of the ways."""

    way: _Way

    units: list[Unit]

    sizes: list[int]
    """Chunks of each unit."""

    costs: ChunkCosts

    checkpointed: Layers
    """[stage][chunk] layers, () for none."""

    memory_limit: Sequence[int]
    """Bytes of each stage."""

    played: Played

    @property
    def actions(self) -> int:
        """Actions that one play of the step counts: F, I and W of each chunk on each stage."""
        return 3 * len(self.memory_limit) * len(self.costs.send)


def auto_pipeline(task: PipelineTask) -> PipelineAnswer:
    """Return the fastest plan of all trials. Raises PlanInfeasible when none fits."""
    trials: list[_Trial] = []
    refused: PlanInfeasible | None = None
    actions_left = MOST_ACTIONS
    for way, units in _candidates(task):
        try:
            trial = _trial(way, units, task)
        except PlanInfeasible as error:
            refused = refused or error
            continue
        trials.append(trial)
        actions_left -= trial.actions
        if actions_left < trial.actions:
            break
    if not trials:
        assert refused is not None, "there is always a candidate"
        raise refused
    return _answer(_polished(_distinct(trials), actions_left))


# ---- candidates


def _candidates(task: PipelineTask) -> Iterator[tuple[_Way, list[Unit]]]:
    """Yield the ways of `WAYS` that differ for this task, each with its units."""
    work = CutWork.of(task.cost, "time")
    most_tokens = _most_tokens(task)
    units_by_target: dict[float, list[Unit]] = {}
    for way in WAYS:
        if task.options.chunks is not None and way.factor != 1.0:
            continue  # the number of chunks is given
        if task.options.memory_limit is None and (way.spare or way.policy.w_first):
            continue  # of no effect without a limit
        target = _target(task, work, way.factor)
        if target not in units_by_target:
            units_by_target[target] = level_units(task.lengths, target, work, most_tokens)
        yield way, _ordered(units_by_target[target], way.front)


def _target(task: PipelineTask, work: CutWork, factor: float) -> float:
    """Return the work of a chunk in nanoseconds, for `factor` times the best number of chunks."""
    longest = work.between(0, max(task.lengths))
    if task.options.chunks is not None:
        return longest / task.options.chunks
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


def _ordered(units: Sequence[Unit], front: float) -> list[Unit]:
    """Return units in starting order: some emptiest packs, cut sequences, the other packs."""
    cut = [unit for unit in units if len(unit) > 1]
    packs = [unit for unit in units if len(unit) == 1]  # fullest first
    rest = len(packs) - math.ceil(front * len(packs))
    emptiest_first = list(reversed(packs[rest:]))
    return emptiest_first + cut + packs[:rest]


# ---- trials


def _trial(way: _Way, units: list[Unit], task: PipelineTask) -> _Trial:
    """Return the played step, checkpointed if needed. Raises PlanInfeasible without room."""
    sizes = [len(unit) for unit in units]
    shapes = shapes_of(units, task.lengths)
    costs = chunk_costs(task.cost, shapes)
    memory_limit = task.options.memory_limit or _window(sizes, costs)
    # per-stage memory headroom in bytes
    beside = [way.spare * task.stages * sum(held) // len(held) for held in costs.held]
    checkpointed: Layers = ()
    if _exceeds(sizes, costs, memory_limit, beside):
        checkpointed = _checkpointed(units, shapes, costs, task.cost, memory_limit, beside)
        costs = chunk_costs(task.cost, shapes, checkpointed)
    played = play(sizes, costs, memory_limit, way.policy)
    assert played is not None, "units that fit alone can be played"
    return _Trial(
        way=way,
        units=units,
        sizes=sizes,
        costs=costs,
        checkpointed=checkpointed,
        memory_limit=memory_limit,
        played=played,
    )


def _window(sizes: Sequence[int], costs: ChunkCosts) -> tuple[int, ...]:
    """Return the bytes of each stage for the largest unit and `WINDOW` mean chunks per stage."""
    stages = len(costs.held)
    chunks = len(costs.send)
    memory_limit = []
    for held, carried in zip(costs.held, costs.carried, strict=True):
        largest = max(unit_bytes(sizes, held, carried))
        memory_limit.append(largest + round(WINDOW * stages / chunks * sum(held)))
    return tuple(memory_limit)


def _exceeds(
    sizes: Sequence[int], costs: ChunkCosts, memory_limit: Sequence[int], beside: Sequence[int]
) -> bool:
    """Return whether some unit does not fit on some stage with `beside` bytes left free."""
    for held, carried, limit, free in zip(
        costs.held, costs.carried, memory_limit, beside, strict=True
    ):
        if max(unit_bytes(sizes, held, carried)) + free > limit:
            return True
    return False


def _checkpointed(
    units: Sequence[Unit],
    shapes: Sequence[StageShape],
    costs: ChunkCosts,
    cost: PipelineCost,
    memory_limit: Sequence[int],
    beside: Sequence[int],
) -> Layers:
    """Return [stage][chunk] checkpointed layers. Raises PlanInfeasible if a unit cannot fit."""
    everything = [[stage.layers] * len(shapes) for stage in cost.stages]
    bare = chunk_costs(cost, shapes, everything)
    checkpointed = []
    for layers in layers_to_fit(units, costs, bare, cost, memory_limit, beside):
        of_chunks: list[int] = []
        for unit, count in zip(units, layers, strict=True):
            of_chunks += [count] * len(unit)
        checkpointed.append(tuple(of_chunks))
    return tuple(checkpointed)


# ---- the best trial


def _distinct(trials: Sequence[_Trial]) -> list[_Trial]:
    """Return the trials, fastest first, each makespan and orders only once."""
    distinct = []
    outcomes = []
    for trial in sorted(trials, key=_makespan):
        outcome = (trial.played.makespan, trial.played.orders)
        if outcome not in outcomes:
            outcomes.append(outcome)
            distinct.append(trial)
    return distinct


def _polished(trials: Sequence[_Trial], actions_left: int) -> _Trial:
    """Return the fastest trial after each has put off the one action whose delay helps most, and
    then the next one, for as many actions as are left to play."""
    best = trials[0]
    for first in trials:
        trial = first
        kept: dict[int, int] = {}  # deviations that helped
        while True:
            faster = trial.played
            deviations = kept
            for number in range(trial.actions):
                for option in OPTIONS:
                    actions_left -= trial.actions
                    if actions_left < 0:
                        return best
                    tried = {**kept, number: option}
                    played = play(
                        trial.sizes, trial.costs, trial.memory_limit, trial.way.policy, tried
                    )
                    if played is not None and played.makespan < faster.makespan:
                        faster = played
                        deviations = tried
            if faster is trial.played:
                break
            trial = replace(trial, played=faster)
            kept = deviations
            best = min(best, trial, key=_makespan)
    return best


def _makespan(trial: _Trial) -> int:
    return trial.played.makespan


def _answer(trial: _Trial) -> PipelineAnswer:
    """Return the trial as a planner's answer."""
    return PipelineAnswer(
        units=trial.units,
        actions=actions_of(trial.played, trial.sizes, trial.costs),
        checkpointed=trial.checkpointed,
        makespan_ns=trial.played.makespan,
    )
