"""Planning a pipelined step: lengths in, a `PipelinePlan` out.

    make_pipeline_plan(lengths, cost)                                      our own schedule
    make_pipeline_plan(lengths, cost, PipelineOptions(schedule="1f1b"))    whole sequences
    ... PipelineOptions(schedule="seq1f1b")                                Seq1F1B; "seq1f1b-i" has
                                                                           several stages per rank
    ... PipelineOptions(schedule="infinipipe")                             a published system's

The same arguments give the same plan but for `planning_s`: decisions are bounded by counted work,
never by the clock.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from hf_flexseq.base.registry import PIPELINE_SCHEDULES, object_of
from hf_flexseq.pipeline.planning.plan import PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.pipeline.planning.units import (
    PipelineAnswer,
    PipelineOptions,
    PipelineTask,
    plan_of,
)
from hf_flexseq.pipeline.planning.walk import check_memory, makespan_ns
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.task import checked_lengths

DEFAULTS = PipelineOptions()


def make_pipeline_plan(
    lengths: Sequence[int], cost: PipelineCost, options: PipelineOptions = DEFAULTS
) -> PipelinePlan:
    """Plan one optimizer step over the stages of `cost`.

    lengths: tokens per sequence. Raises ValueError for options that do not fit the stages and
    PlanInfeasible when memory holds no plan.
    """
    began = time.perf_counter()
    # 1. the question
    task = PipelineTask(lengths=checked_lengths(lengths), cost=cost, options=options)

    # 2. the answer, as a plan
    if task.lengths:
        answer = object_of(PIPELINE_SCHEDULES[options.schedule].function)(task)
    else:
        answer = PipelineAnswer(units=[], actions=((),) * task.ranks, makespan_ns=0)
    plan = plan_of(task, answer)

    # 3. memory and time, if the planner has not seen to them
    makespan = answer.makespan_ns
    if makespan is None:
        if options.memory_limit is not None:
            _check_memory_limit(plan, cost, options.memory_limit)
        makespan = makespan_ns(plan, cost)
    return replace(plan, objective_s=makespan / 1e9, planning_s=time.perf_counter() - began)


def _check_memory_limit(
    plan: PipelinePlan, cost: PipelineCost, memory_limit: Sequence[int]
) -> None:
    """Raise PlanInfeasible unless the plan fits: these schedules do not adapt to memory."""
    try:
        check_memory(plan, cost, memory_limit)
    except ValueError as error:
        raise PlanInfeasible(
            f"schedule {plan.schedule}: {error}. Take pipeline_schedule='auto', which recomputes "
            "layers where room is missing, or use more stages"
        ) from error
