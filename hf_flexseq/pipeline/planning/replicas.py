"""Plan a step over several replicas of a pipeline.

1. Longest first, each sequence goes to the replica with the least work so far, which keeps the
   slowest within a third of the best (Graham 1969).
2. Each replica's step is planned separately.

Rejected: spreading chunks instead of sequences, which would send keys and values between
replicas.
"""

from collections import Counter
from collections.abc import Sequence

from hf_flexseq.pipeline.planning.make import DEFAULTS, make_pipeline_plan
from hf_flexseq.pipeline.planning.plan import PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost, causal_pairs
from hf_flexseq.pipeline.planning.step_plan import StepPlan
from hf_flexseq.pipeline.planning.units import PipelineOptions
from hf_flexseq.planner.task import longest_first


def make_step_plan(
    lengths: Sequence[int],
    cost: PipelineCost,
    options: PipelineOptions = DEFAULTS,
    *,
    replicas: int = 1,
) -> StepPlan:
    """Plan one optimizer step over `replicas` pipelines. cost, options: of one replica."""
    members = spread(lengths, replicas, cost)
    plans = []
    for ids in members:
        plans.append(make_pipeline_plan([lengths[i] for i in ids], cost, options))
    note = chunk_note(plans, options)
    return StepPlan(lengths=tuple(lengths), members=members, plans=tuple(plans), notes=(note,))


def chunk_note(plans: Sequence[PipelinePlan], options: PipelineOptions) -> str:
    """Return a line for people: into how many chunks sequences are cut, and why."""
    # 1. the parts of the longest sequence that is cut at all
    cut_sequences = 0
    longest = 0
    parts_of_longest = 0
    for plan in plans:
        parts = Counter(part.sequence for chunk in plan.chunks for part in chunk.slices)
        for sequence, count in parts.items():
            if count == 1:
                continue
            cut_sequences += 1
            if plan.lengths[sequence] > longest:
                longest = plan.lengths[sequence]
                parts_of_longest = count

    # 2. who chose so
    if plans and options.schedule != "auto":
        reason = f"by the rule of schedule={options.schedule!r}"
    else:
        limits = []
        if options.max_tokens is not None:
            limits.append(f"at most {options.max_tokens:,} tokens a chunk")
        if options.memory_limit is not None:
            least = min(options.memory_limit)
            limits.append(f"at most {least / 2**30:.3g} GiB in flight on a rank")
        reason = "the fastest by the cost model"
        if limits:
            reason = f"{reason}, with {' and '.join(limits)}"

    # 3. both in one line
    total = sum(len(plan.chunks) for plan in plans)
    if not cut_sequences:
        return f"{total} chunks of whole sequences, {reason}"
    sequences = sum(len(plan.lengths) for plan in plans)
    return (
        f"{total} chunks, {cut_sequences} of {sequences} sequences cut, the longest of these "
        f"({longest:,} tokens) into {parts_of_longest}: {reason}"
    )


def spread(
    lengths: Sequence[int], replicas: int, cost: PipelineCost
) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each replica's sequences, ascending."""
    linear_ns = sum(stage.linear_ns + stage.head_ns for stage in cost.stages)
    attention_ns = sum(stage.attention_ns for stage in cost.stages)
    members: list[list[int]] = [[] for _ in range(replicas)]
    work_ns = [0] * replicas
    for sequence in longest_first(lengths):
        least_loaded = work_ns.index(min(work_ns))
        members[least_loaded].append(sequence)
        length = lengths[sequence]
        forward_ns = linear_ns * length + attention_ns * causal_pairs(0, length)
        work_ns[least_loaded] += round(forward_ns)
    return tuple(tuple(sorted(ids)) for ids in members)
