"""The timeline of a pipeline's plan: every stage's actions, its memory, and the bubble.

    timeline_of_step(step, ...)      a Timeline in nanoseconds, of a step of a file
    pipeline_timeline(plan, cost)    the same of a plan and its cost

Times are the longest path through the plan's actions (`pipeline/planning/walk.py`), so they are
exact for the given cost of each action. They leave out transfers that disturb each other and
stages that disturb their own computing.
"""

from hf_flexseq.base.reading import Limits
from hf_flexseq.cost import CostModel
from hf_flexseq.pipeline.planning.plan import KINDS, PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost, StageCost
from hf_flexseq.pipeline.planning.walk import check, timed
from hf_flexseq.plan.files import RecordedStep
from hf_flexseq.view.timeline import ACTION_KINDS, Recorder, Timeline

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
    recorder = Recorder(plan.ranks)
    chunk_numbers = plan.places()
    for done in timed(plan, cost):
        rank, action = done.rank, done.action
        chunk = chunk_numbers[action.unit, action.chunk]
        waited = done.start - recorder.clock[rank]
        recorder.work(rank, waited, "wait", "wait for the neighbour", micro_batch=chunk)
        recorder.hold(rank, done.held)
        kind = EVENT_KINDS[action.kind]
        recorder.work(rank, done.stop - done.start, kind, str(action), micro_batch=chunk)
        recorder.hold(rank, done.left)
    return recorder.timeline("ns")


def tokens_as_time(plan: PipelinePlan) -> PipelineCost:
    """Return a cost for a plan of unknown cost: a microsecond per token, forward."""
    # at least as many layers as are checkpointed
    layers = max((max(of_stage, default=1) for of_stage in plan.checkpointed), default=1)
    stage = StageCost(linear_ns=1e3, attention_ns=0.0, chunk_ns=0.0, layers=max(1, layers))
    return PipelineCost.even(plan.stages, stage)
