"""Plan a step over several replicas of a pipeline.

1. Sequences are dealt longest first, each to the replica with the least work so far, which keeps
   the slowest within a third of the best (Graham 1969).
2. Each replica's step is planned for itself.

Rejected: dealing chunks instead of sequences, for which keys and values would have to travel
between replicas.
"""

from collections.abc import Sequence

from hf_flexseq.cost.stages import PipelineCost, causal_pairs
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.planner.pipeline import make_pipeline_plan


def make_step_plan(
    lengths: Sequence[int],
    cost: PipelineCost,
    *,
    replicas: int = 1,
    schedule: str = "auto",
    chunks: int | None = None,
    max_tokens: int | None = None,
    room: Sequence[int] | None = None,
    stages_per_rank: int = 1,
) -> StepPlan:
    """Plan one optimizer step over `replicas` pipelines.

    The other arguments are those of `make_pipeline_plan`; cost and room are those of one replica.
    """
    members = deal(lengths, replicas, cost)
    plans = []
    for ids in members:
        plan = make_pipeline_plan(
            [lengths[sequence] for sequence in ids],
            cost,
            schedule=schedule,
            chunks=chunks,
            max_tokens=max_tokens,
            room=room,
            stages_per_rank=stages_per_rank,
        )
        plans.append(plan)
    return StepPlan(lengths=tuple(lengths), members=members, plans=tuple(plans))


def deal(lengths: Sequence[int], replicas: int, cost: PipelineCost) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each replica's sequences, ascending."""
    linear_ns = sum(stage.linear_ns + stage.head_ns for stage in cost.stages)
    attention_ns = sum(stage.attention_ns for stage in cost.stages)
    members: list[list[int]] = [[] for _ in range(replicas)]
    work_ns = [0] * replicas
    longest_first = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
    for sequence in longest_first:
        least_loaded = work_ns.index(min(work_ns))
        members[least_loaded].append(sequence)
        length = lengths[sequence]
        forward_ns = linear_ns * length + attention_ns * causal_pairs(0, length)
        work_ns[least_loaded] += round(forward_ns)
    return tuple(tuple(sorted(ids)) for ids in members)
