"""Plan a step over several replicas of a pipeline: deal the sequences, then plan each replica for
itself.

Sequences are dealt longest first, each to the replica with the least work so far, which keeps the
slowest within a third of the best (Graham 1969). Rejected: dealing chunks instead of sequences,
for which keys and values would have to travel between replicas.
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
    """See `make_pipeline_plan` for the arguments; memory and cost are those of one replica."""
    members = deal(lengths, replicas, cost)
    plans = tuple(
        make_pipeline_plan(
            [lengths[i] for i in ids],
            cost,
            schedule=schedule,
            chunks=chunks,
            max_tokens=max_tokens,
            room=room,
            stages_per_rank=stages_per_rank,
        )
        for ids in members
    )
    return StepPlan(lengths=tuple(lengths), members=members, plans=plans)


def deal(lengths: Sequence[int], replicas: int, cost: PipelineCost) -> tuple[tuple[int, ...], ...]:
    """The ids of each replica's sequences, ascending."""
    linear = sum(stage.linear_ns + stage.head_ns for stage in cost.stages)
    attention = sum(stage.attention_ns for stage in cost.stages)
    held: list[list[int]] = [[] for _ in range(replicas)]
    work = [0] * replicas
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        replica = min(range(replicas), key=lambda r: (work[r], r))
        held[replica].append(sequence)
        length = lengths[sequence]
        work[replica] += round(linear * length + attention * causal_pairs(0, length))
    return tuple(tuple(sorted(ids)) for ids in held)
