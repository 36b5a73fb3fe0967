"""Planning a pipelined step: lengths in, a `PipelinePlan` out.

    make_pipeline_plan(lengths, cost)                           our own schedule
    make_pipeline_plan(lengths, cost, schedule="1f1b")          whole sequences
    make_pipeline_plan(lengths, cost, schedule="seq1f1b", ...)  Seq1F1B, also over several stages
    per rank
    make_pipeline_plan(lengths, cost, schedule="infinipipe")    InfiniPipe, re-created from the
                                                                paper's text

The same arguments give the same plan but for `planning_s`: decisions are bounded by counted work,
never by the clock.
"""

import operator
import time
from collections.abc import Sequence
from dataclasses import replace

from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.planner.pipeline.auto import auto_pipeline
from hf_flexseq.planner.pipeline.cuts import CutWork
from hf_flexseq.planner.pipeline.infinipipe import infinipipe_pipeline
from hf_flexseq.planner.pipeline.pack import chunked_units, whole_units
from hf_flexseq.planner.pipeline.problem import Answer, Task
from hf_flexseq.planner.pipeline.units import chunks_of
from hf_flexseq.schedule.pipeline.check import check_memory
from hf_flexseq.schedule.pipeline.orders import interleaved, one_forward_one_backward
from hf_flexseq.schedule.pipeline.walk import makespan_ns

__all__ = ["SCHEDULES", "make_pipeline_plan"]

SCHEDULES = ("auto", "1f1b", "seq1f1b", "infinipipe")
SEQ1F1B_CHUNKS = 4  # Seq1F1B's own setting at 64K tokens


def make_pipeline_plan(
    lengths: Sequence[int],
    cost: PipelineCost,
    *,
    schedule: str = "auto",
    chunks: int | None = None,
    max_tokens: int | None = None,
    room: Sequence[int] | None = None,
    cuts: str = "time",
    stages_per_rank: int = 1,
) -> PipelinePlan:
    """The plan of one optimizer step over the stages of `cost`.

    chunks: of the longest sequence; None to be planned. max_tokens: of a chunk. room: bytes of
    each rank for what is in flight; None for no limit. cuts: what the parts of a sequence have
    equal, for seq1f1b. stages_per_rank: more than one interleaves them, for seq1f1b. Raises
    ValueError for arguments without meaning and PlanInfeasible when memory holds no plan.
    """
    began = time.perf_counter()
    _check(
        schedule, cost=cost, chunks=chunks, max_tokens=max_tokens, stages_per_rank=stages_per_rank
    )
    task = Task(
        lengths=_checked_lengths(lengths),
        cost=cost,
        chunks=chunks,
        most_tokens=max_tokens,
        room=_checked_room(room, len(cost.stages) // stages_per_rank),
    )
    answer = _answer(task, schedule, cuts, stages_per_rank)
    plan = PipelinePlan(
        lengths=task.lengths,
        ranks=task.stages // stages_per_rank,
        stages=task.stages,
        chunks=chunks_of(answer.units),
        actions=answer.actions,
        checkpointed=answer.checkpointed,
        schedule=schedule,
        objective_s=0.0,
        planning_s=0.0,
    )
    if schedule in ("1f1b", "seq1f1b") and task.room is not None:
        _check_room(plan, task)
    took = makespan_ns(plan, cost) if answer.makespan_ns is None else answer.makespan_ns
    return replace(plan, objective_s=took / 1e9, planning_s=time.perf_counter() - began)


def _answer(task: Task, schedule: str, cuts: str, stages_per_rank: int) -> Answer:
    if not task.lengths:
        return Answer(units=[], actions=((),) * (task.stages // stages_per_rank), makespan_ns=0)
    if schedule == "auto":
        return auto_pipeline(task)
    if schedule == "infinipipe":
        return infinipipe_pipeline(task)
    if schedule == "1f1b":
        _check_whole(task)
        units = whole_units(task.lengths)
    else:
        work = CutWork.of(task.cost, cuts)
        units = chunked_units(task.lengths, task.chunks or SEQ1F1B_CHUNKS, work, task.most_tokens)
    sizes = [len(unit) for unit in units]
    if stages_per_rank == 1:
        return Answer(units=units, actions=one_forward_one_backward(sizes, task.stages))
    return Answer(
        units=units, actions=interleaved(sizes, task.stages // stages_per_rank, stages_per_rank)
    )


def _check_whole(task: Task) -> None:
    longest = max(task.lengths)
    if task.most_tokens is not None and longest > task.most_tokens:
        raise PlanInfeasible(
            f"sequence {task.lengths.index(longest)} has {longest} tokens, a chunk may have "
            f"{task.most_tokens}: "
            "schedule='1f1b' does not cut it. Raise the limit, or take schedule='auto'"
        )


def _check_room(plan: PipelinePlan, task: Task) -> None:
    """These schedules do not adapt to memory: they fit or they do not."""
    assert task.room is not None, "there is nothing to check without a limit"
    try:
        check_memory(plan, task.cost, task.room)
    except ValueError as error:
        raise PlanInfeasible(
            f"schedule {plan.schedule}: {error}. Raise chunks, or take schedule='auto'"
        ) from error


def _check(
    schedule: str,
    *,
    cost: PipelineCost,
    chunks: int | None,
    max_tokens: int | None,
    stages_per_rank: int,
) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is none of {', '.join(SCHEDULES)}")
    for name, value in (
        ("chunks", chunks),
        ("max_tokens", max_tokens),
        ("stages_per_rank", stages_per_rank),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: give at least 1")
    if schedule == "1f1b" and (chunks or 1) > 1:
        raise ValueError(
            f"schedule='1f1b' runs whole sequences, chunks={chunks} is for the others"
        )
    if stages_per_rank > 1 and schedule != "seq1f1b":
        raise ValueError(f"stages_per_rank={stages_per_rank} is for schedule='seq1f1b'")
    if len(cost.stages) % stages_per_rank:
        raise ValueError(
            f"{len(cost.stages)} stages cannot be spread evenly, {stages_per_rank} on each rank"
        )


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    tokens = tuple(operator.index(length) for length in lengths)
    if tokens and min(tokens) < 1:
        raise ValueError(f"sequence {tokens.index(min(tokens))} has no token")
    return tokens


def _checked_room(room: Sequence[int] | None, ranks: int) -> tuple[int, ...] | None:
    if room is None:
        return None
    if len(room) != ranks or min(room) < 1:
        raise ValueError(f"room={tuple(room)}: give the positive bytes of each of {ranks} ranks")
    return tuple(room)
