"""Planning a pipelined step: lengths in, a `PipelinePlan` out.

    make_pipeline_plan(lengths, cost)                           our own schedule
    make_pipeline_plan(lengths, cost, schedule="1f1b")          whole sequences
    make_pipeline_plan(lengths, cost, schedule="seq1f1b", ...)  Seq1F1B, also over several stages
                                                                per rank
    make_pipeline_plan(lengths, cost, schedule="infinipipe")    a published system's

The same arguments give the same plan but for `planning_s`: decisions are bounded by counted work,
never by the clock.
"""

import operator
import time
from collections.abc import Sequence
from dataclasses import replace

from hf_flexseq.base.registry import PIPELINE_SCHEDULES, entry_of, object_of
from hf_flexseq.cost.pipeline_check import check_memory
from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.cost.walk import makespan_ns
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.planner.pipeline.units import PipelineAnswer, PipelineTask, chunks_of


def make_pipeline_plan(
    lengths: Sequence[int],
    cost: PipelineCost,
    *,
    schedule: str = "auto",
    chunks: int | None = None,
    max_tokens: int | None = None,
    memory_limit: Sequence[int] | None = None,
    cuts: str = "time",
) -> PipelinePlan:
    """Plan one optimizer step over the stages of `cost`.

    lengths: tokens of each sequence
    schedule: one of PIPELINE_SCHEDULES
    chunks: how many the longest sequence has; None to be planned
    max_tokens: tokens that a chunk may have; None for no limit
    memory_limit: bytes of each rank for what is in flight; None for no limit
    cuts: what the parts of a sequence have equal, one of `cuts.CUTS`; for seq1f1b

    Raises ValueError for arguments without meaning and PlanInfeasible when memory holds no plan.
    """
    began = time.perf_counter()
    # 1. the question
    _check(schedule, cost=cost, chunks=chunks, max_tokens=max_tokens)
    entry = PIPELINE_SCHEDULES[schedule]
    ranks = len(cost.stages) // entry.stages_per_rank
    task = PipelineTask(
        lengths=_checked_lengths(lengths),
        cost=cost,
        chunks=chunks,
        most_tokens=max_tokens,
        memory_limit=_checked_memory_limit(memory_limit, ranks),
        cuts=cuts,
        stages_per_rank=entry.stages_per_rank,
    )

    # 2. the answer, as a plan
    if task.lengths:
        answer = object_of(entry.function)(task)
    else:
        answer = PipelineAnswer(units=[], actions=((),) * ranks, makespan_ns=0)
    plan = PipelinePlan(
        lengths=task.lengths,
        ranks=ranks,
        stages=task.stages,
        chunks=chunks_of(answer.units),
        actions=answer.actions,
        checkpointed=answer.checkpointed,
        schedule=schedule,
        objective_s=0.0,
        planning_s=0.0,
    )

    # 3. memory and time, if the planner has not seen to them
    makespan = answer.makespan_ns
    if makespan is None:
        if task.memory_limit is not None:
            _check_memory_limit(plan, task, task.memory_limit)
        makespan = makespan_ns(plan, cost)
    return replace(plan, objective_s=makespan / 1e9, planning_s=time.perf_counter() - began)


def _check_memory_limit(
    plan: PipelinePlan, task: PipelineTask, memory_limit: Sequence[int]
) -> None:
    """Raise PlanInfeasible unless the plan fits in `memory_limit`: these schedules do not adapt to
    memory."""
    try:
        check_memory(plan, task.cost, memory_limit)
    except ValueError as error:
        raise PlanInfeasible(
            f"schedule {plan.schedule}: {error}. Raise chunks, or take schedule='auto'"
        ) from error


# ---- arguments


def _check(
    schedule: str,
    *,
    cost: PipelineCost,
    chunks: int | None,
    max_tokens: int | None,
) -> None:
    """Raise ValueError for arguments without meaning, alone or together."""
    stages_per_rank = entry_of("schedule", schedule, PIPELINE_SCHEDULES).stages_per_rank
    for name, value in (("chunks", chunks), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: give at least 1")
    if schedule == "1f1b" and (chunks or 1) > 1:
        raise ValueError(
            f"schedule='1f1b' runs whole sequences, chunks={chunks} is for the others"
        )
    if len(cost.stages) % stages_per_rank:
        raise ValueError(
            f"{len(cost.stages)} stages cannot be spread evenly, {stages_per_rank} on each rank"
        )


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths as plain ints. Raises ValueError for one below 1."""
    tokens = tuple(map(operator.index, lengths))
    shortest = min(tokens, default=1)
    if shortest < 1:
        raise ValueError(f"sequence {tokens.index(shortest)} has no token")
    return tokens


def _checked_memory_limit(
    memory_limit: Sequence[int] | None, ranks: int
) -> tuple[int, ...] | None:
    """Return the bytes of each rank as a tuple. Raises ValueError unless there is a positive
    number for each."""
    if memory_limit is None:
        return None
    if len(memory_limit) != ranks or min(memory_limit) < 1:
        raise ValueError(
            f"memory_limit={tuple(memory_limit)}: give the positive bytes of each of {ranks} ranks"
        )
    return tuple(memory_limit)
