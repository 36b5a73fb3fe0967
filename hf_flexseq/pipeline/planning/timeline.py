"""The timeline of a pipeline's plan: every stage's actions, its memory, and the bubble.

    timeline_of_step(step, ...)      a Timeline in nanoseconds, of a step of a file
    pipeline_timeline(plan, cost)    the same of a plan and its cost

Times are the longest path through the plan's actions (`pipeline/planning/walk.py`), so they are
exact for the given cost of each action. They leave out transfers that disturb each other and
stages that disturb their own computing.
"""

from collections.abc import Sequence

from hf_flexseq.base.reading import Limits
from hf_flexseq.cost import CostModel
from hf_flexseq.pipeline.planning.plan import KINDS, PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost, StageCost
from hf_flexseq.pipeline.planning.walk import Done, check, timed
from hf_flexseq.plan.files import RecordedStep
from hf_flexseq.view.timeline import ACTION_KINDS, Event, Memory, Timeline

EVENT_KINDS = dict(zip(KINDS, ACTION_KINDS, strict=True))  # kind of an action -> of its event


def timeline_of_step(step: RecordedStep, cost_model: CostModel | None, limits: Limits) -> Timeline:
    """Return the timeline of a step of a file: by a cost model, or by the stages' costs in the
    file, or with tokens as time. Raises ValueError for a plan that would hang or is too long, and
    for costs of other stages."""
    plan = step.plan
    assert isinstance(plan, PipelinePlan), "only a pipeline's plan has actions"
    # Finding the next action may look at every rank; a hundred looks take as long as an event.
    actions = sum(map(len, plan.actions))
    work = actions + actions * plan.ranks // 100
    limits.refuse_above("work", work, f"step {step.number} may be {work:,} events")
    check(plan)
    if cost_model is not None:
        cost = PipelineCost.of_model(cost_model, plan.stages)
    elif step.cost is None:
        cost = tokens_as_time(plan)
    else:
        cost = PipelineCost.from_record(step.cost)
    if len(cost.stages) != plan.stages:
        raise ValueError(
            f"step {step.number}: expected pipeline_cost of {plan.stages} stages, "
            f"got {len(cost.stages)}"
        )
    return pipeline_timeline(plan, cost)


def pipeline_timeline(plan: PipelinePlan, cost: PipelineCost) -> Timeline:
    """Return the timeline of one optimizer step."""
    by_rank: list[list[Done]] = [[] for _ in range(plan.ranks)]
    stop = 0
    for done in timed(plan, cost):
        by_rank[done.rank].append(done)
        stop = max(stop, done.stop)

    chunk_numbers = plan.places()
    events: list[Event] = []
    memory: list[Memory] = []
    for rank, actions in enumerate(by_rank):
        events += _events(rank, actions, chunk_numbers, stop)
        for done in actions:
            memory.append(Memory(rank=rank, at=done.start, bytes=done.held))
            memory.append(Memory(rank=rank, at=done.stop, bytes=done.left))
    return Timeline(
        world_size=plan.ranks,
        events=tuple(events),
        memory=tuple(memory),
        starts=(),
        stop=stop,
        unit="ns",
    )


def tokens_as_time(plan: PipelinePlan) -> PipelineCost:
    """Return a cost for a plan of unknown cost: a microsecond per token, forward."""
    # at least as many layers as are checkpointed
    layers = max((max(of_stage, default=1) for of_stage in plan.checkpointed), default=1)
    stage = StageCost(linear_ns=1e3, attention_ns=0.0, chunk_ns=0.0, layers=max(1, layers))
    return PipelineCost.even(plan.stages, stage)


def _events(
    rank: int, actions: Sequence[Done], chunk_numbers: dict[tuple[int, int], int], stop: int
) -> list[Event]:
    """Return a rank's actions and its waits around them, up to `stop` nanoseconds."""
    events = []
    free_at = 0
    for done in actions:
        action = done.action
        chunk = chunk_numbers[action.unit, action.chunk]
        if done.start > free_at:
            label = "wait for the neighbour"
            events.append(_event(rank, free_at, done.start, "wait", chunk, label))
        kind = EVENT_KINDS[action.kind]
        events.append(_event(rank, done.start, done.stop, kind, chunk, str(action)))
        free_at = done.stop
    if free_at < stop:
        events.append(_event(rank, free_at, stop, "wait", 0, "wait for the other ranks"))
    return events


def _event(rank: int, start: int, stop: int, kind: str, chunk: int, label: str) -> Event:
    """Return an event of a chunk, whose index takes the field of the micro-batch."""
    return Event(
        rank=rank,
        start=start,
        stop=stop,
        kind=kind,
        micro_batch=chunk,
        group=None,
        degree=0,
        label=label,
    )
