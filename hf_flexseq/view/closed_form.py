"""The predicted timeline of a plan.

    timeline_of(plan, topology, cost)    by the closed form of the cost model
    sketch(plan, world_size)             without a cost model, by tokens or by measured seconds

The closed form prices a group as a whole (`cost/evaluate.py`). Here its time is divided into its
terms: linear layers, attention and copies; the rest of it is exposed: transfers, latency and
launches that no computing hides. Where several ranks hold experts, the ranks of an expert group
meet after their groups, and work on their experts together (`cost/experts.py`). The timeline of a
step ends when `step_ns` says, to the nanosecond.

Rejected: to simulate every layer and every step of a ring. Over 45 plans that was 0.04 % from the
closed form on average.
"""

from collections.abc import Sequence

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, experts_ns, group_ns
from hf_flexseq.cost.choices import with_choice
from hf_flexseq.cost.evaluate import check_free
from hf_flexseq.cost.lengths import lengths_of
from hf_flexseq.cost.model import TERMS
from hf_flexseq.cost.terms import group_terms
from hf_flexseq.plan import Group, Plan
from hf_flexseq.view.timeline import Recorder, Timeline

COMPUTED = {"linear layers": "token", "attention": "attention", "copies": "copies"}
"""By label, the terms of a group that its ranks compute."""

EXPOSED = "exposed transfers and launches"


def timeline_of(
    plan: Plan, topology: Topology, cost: CostModel, *, sync: str = "lockstep"
) -> Timeline:
    """Return the timeline of one optimizer step, in nanoseconds.

    sync: "lockstep", all ranks begin every micro-batch together, or "free", they meet only inside
    groups.

    Raises ValueError for a cost model that cannot price the plan's strategies, or whose experts do
    not go with the ranks or with `sync`.
    """
    if sync not in ("lockstep", "free"):
        raise ValueError(f"sync must be lockstep or free, got {sync!r}")
    if sync == "free":
        check_free(cost)
    cost.check_countable(plan.lengths, topology.world_size)
    recorder = Recorder(topology.world_size)
    everyone = range(topology.world_size)
    state_bytes = cost.state_bytes + cost.sharded_state_bytes / topology.world_size
    lengths = lengths_of(plan)
    for micro_batch in plan.micro_batches:
        # 1. the constant, on every rank that takes part
        tokens = micro_batch.tokens_per_rank(plan.lengths, topology.world_size)
        ranks: Sequence[int] = [rank for rank in everyone if tokens[rank]]
        if sync == "lockstep":
            ranks = everyone
            recorder.meet(ranks)
        recorder.begin_micro_batch(ranks)
        priced = with_choice(cost, micro_batch.memory)
        label = "per micro-batch"
        if micro_batch.memory is not None:
            label = f"{label}: {micro_batch.memory}"
        for rank in ranks:
            recorder.work(rank, cost.micro_batch_ns, "constant", label)
            recorder.hold(rank, int(state_bytes + priced.token_bytes * tokens[rank]))
        # 2. the groups, widest first
        for index, group in enumerate(micro_batch.groups):
            recorder.meet(group.ranks, group=index, degree=group.degree)
            for label, duration in group_parts(group, lengths, topology, priced).items():
                kind = "transfer" if label == EXPOSED else "compute"
                for rank in group.ranks:
                    recorder.work(rank, duration, kind, label, group=index, degree=group.degree)
        # 3. the experts, which an expert group's ranks begin together
        if cost.experts is not None:
            width = cost.experts.ranks
            nanoseconds = experts_ns(cost, micro_batch, lengths, topology).tolist()
            for index, duration in enumerate(nanoseconds):
                together = range(index * width, (index + 1) * width)
                recorder.meet(together)
                for rank in together:
                    recorder.work(rank, duration, "experts", f"experts of {width} ranks")
        for rank in ranks:
            recorder.hold(rank, int(state_bytes))
    return recorder.timeline("ns")


def most_events(plan: Plan, world_size: int) -> int:
    """Return an upper bound on the events of a step's timeline."""
    count = 0
    for micro_batch in plan.micro_batches:
        count += 4 * world_size  # the constant, experts, and waits
        count += sum(5 * group.degree for group in micro_batch.groups)
    return count


def group_parts(
    group: Group, lengths: Sequence[int], topology: Topology, cost: CostModel
) -> dict[str, int]:
    """Return the nanoseconds of a group by part, which add up to its closed form."""
    terms = dict(zip(TERMS, group_terms(cost, group, lengths, topology).tolist(), strict=True))
    left = group_ns(cost, group, lengths, topology)
    parts = {}
    for label, name in COMPUTED.items():
        parts[label] = min(left, round(1e9 * terms[name]))
        left -= parts[label]
    if group.degree == 1:
        parts["attention"] += left  # rounding: a rank alone moves nothing
        left = 0
    parts[EXPOSED] = left
    return parts


def sketch(plan: Plan, world_size: int, measured_s: Sequence[float] | None = None) -> Timeline:
    """Return a plan's timeline without a cost model: a rank is busy in proportion to its tokens.

    The unit is tokens. With `measured_s`, the seconds of each micro-batch, it is time, the fullest
    rank of a micro-batch being busy all of it.
    """
    recorder = Recorder(world_size)
    everyone = range(world_size)
    for index, micro_batch in enumerate(plan.micro_batches):
        fullest = max(micro_batch.tokens_per_rank(plan.lengths, world_size))
        duration = fullest
        if measured_s is not None:
            duration = round(measured_s[index] * 1e9)
        recorder.begin_micro_batch(everyone)
        begin = recorder.clock[0]
        # A rank works in its groups one after the other, widest first.
        tokens = [0] * world_size  # of each rank in the groups so far
        for group_index, group in enumerate(micro_batch.groups):
            for rank in group.ranks:
                tokens[rank] += group.tokens_per_rank(plan.lengths)
                until = begin + tokens[rank] * duration // fullest
                recorder.work(
                    rank,
                    until - recorder.clock[rank],
                    "compute",
                    group.strategy,
                    group=group_index,
                    degree=group.degree,
                )
        recorder.meet(everyone)
    return recorder.timeline("tokens" if measured_s is None else "ns")
