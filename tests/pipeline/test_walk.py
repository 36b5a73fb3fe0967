"""Times and bytes of a pipeline's plan against slow twins, the price of a chunk against its
formula, and what is refused."""

import random
from dataclasses import replace

import pytest

from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.pipeline.planning.plan import parse
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.pipeline.planning.step_plan import StepPlan
from hf_flexseq.pipeline.planning.walk import (
    check,
    check_memory,
    check_step,
    makespan_ns,
    timed,
)
from hf_flexseq.plan.shard import Slice
from tests.budget import examples, for_seeds
from tests.pipelines import (
    costs_of,
    even_cost,
    peak_bytes,
    pipelined,
    plan_of,
    relaxed,
    stage_cost,
)


def random_plan(rng):
    """A legal plan of a random step, with random checkpointing and unequal stages."""
    stages = []
    for _ in range(rng.randint(1, 4)):
        owed = rng.choice([None, 20.0])
        head = rng.choice([0, 300])
        stages.append(stage_cost(linear_ns=rng.uniform(500, 2000), head_ns=head, owed_bytes=owed))
    cost = PipelineCost(stages=tuple(stages), send_ns=rng.choice([0.0, 40.0]))
    lengths = [rng.randint(1, 4000) for _ in range(rng.randint(1, 6))]
    schedule = rng.choice(["auto", "seq1f1b", "infinipipe"])
    plan = pipelined(lengths, cost, schedule=schedule, chunks=3)
    layers = tuple(tuple(rng.randint(0, 5) for _ in plan.chunks) for _ in stages)
    return replace(plan, checkpointed=layers), cost


def held_before(plan, cost, stage, done):
    """Bytes of a stage after the actions `done`, counted from what each chunk and each sequence
    still needs."""
    costs = costs_of(plan, cost)
    sizes = {chunk.unit: chunk.index + 1 for chunk in plan.chunks}
    forwarded = {(a.unit, a.chunk) for a in done if a.kind == "F"}
    finished = {(a.unit, a.chunk) for a in done if a.kind in "BW"}
    # checkpointed layers may then hold more than before
    back = {(a.unit, a.chunk) for a in done if a.kind in "BI"}
    total = 0
    for place, chunk in enumerate(plan.chunks):
        name = (chunk.unit, chunk.index)
        total += costs.held[stage][place] * (name in forwarded and name not in back)
        total += costs.owed[stage][place] * (name in back and name not in finished)
        if chunk.index == 0 and name not in back:
            begun = (chunk.unit, sizes[chunk.unit] - 1) in back
            total += costs.carried[stage][place] * ((name in forwarded) + begun)
    return total


@for_seeds(examples(30))
def test_times_are_the_longest_path_and_bytes_what_chunks_and_carries_still_need(seed):
    plan, cost = random_plan(random.Random(seed))
    stops = relaxed(plan, cost)
    assert {done.action: done.stop for done in timed(plan, cost)} == stops
    assert makespan_ns(plan, cost) == max(stops.values())
    counts = [0] * plan.ranks
    peaks = [0] * plan.ranks
    for done in timed(plan, cost):
        counts[done.rank] += 1
        own = plan.actions[done.rank][: counts[done.rank]]
        assert done.left == held_before(plan, cost, done.rank, own)
        peaks[done.rank] = max(peaks[done.rank], done.held)
        assert done.held >= max(done.left, held_before(plan, cost, done.rank, own[:-1]))
    assert peak_bytes(plan, cost) == tuple(peaks)


# ---- the price of a chunk


def two_chunks(tokens, **fields):
    """A sequence in two chunks of these tokens, through one stage."""
    return plan_of((parse("0F0.0 0F0.1 0B0.1 0B0.0"),), sizes=[2], tokens=tokens, **fields)


def test_a_chunk_costs_what_the_formula_says():
    stage = stage_cost(linear_ns=10.0, attention_ns=1.0, chunk_ns=1000.0, head_ns=3.0)
    costs = costs_of(two_chunks(100, checkpointed=((0, 2),)), PipelineCost.even(1, stage))
    second = 200 * 201 // 2 - 100 * 101 // 2  # keys that the second hundred of queries sees
    assert costs.forward[0][1] == 1000 + second + 1000 + 900
    assert costs.input_grad[0][1] == round(1000 + 2.5 * second + 1000 + 2 / 5 * (1000 + second))
    assert costs.weight_grad[0] == [1500, 1500]
    assert costs.held[0] == [3000, 3000 - 2 * 3000 // 5 + 2 * 200 // 5]


@pytest.mark.parametrize("name", ["gemma-3-27b-h100", "flexsp-gpt-7b-a100"])
def test_the_stages_of_a_model_cost_what_it_costs_whole(name):
    model = PRESETS[name]
    made = plan_of((parse("0F0.0 0B0.0"),), sizes=[1], tokens=8192)
    costs = costs_of(made, PipelineCost.of_model(model, 4))
    stages = (costs.forward, costs.input_grad, costs.weight_grad)
    total = sum(row[0] for rows in stages for row in rows)
    model = replace(model, kernel=None)  # chunks are priced by their pairs
    whole = model.sequence_ns(8192, 1, "local", False) + model.micro_batch_ns
    assert total == pytest.approx(whole, rel=2e-4)  # the diagonal counts whole


def test_negative_costs_are_refused_and_named():
    record = PipelineCost.even(2, stage_cost()).to_record()
    record["stages"][1]["owed_bytes"] = -1.0
    with pytest.raises(ValueError, match=r"stages, owed_bytes=-1.0: must not be negative"):
        PipelineCost.from_record(record)


# ---- what is refused: each wrong plan is a right one with one thing changed


FIRST = "0F0.0 0F0.1 0F1.0 0I0.1 0I0.0 0W0.1 0W0.0 0B1.0"
LAST = "1F0.0 1F0.1 1B0.1 1B0.0 1F1.0 1I1.0 1W1.0"


def plan(first=FIRST, last=LAST, **changed):
    """Two stages; sequence 0 in two chunks, sequence 1 in one."""
    return plan_of((parse(first), parse(last)), sizes=[2, 1], **changed)


def changed(**texts):
    """The plan with a part of a rank's text, (old, new), replaced."""
    lists = {"first": FIRST, "last": LAST}
    for rank, (old, new) in texts.items():
        assert old in lists[rank]
        lists[rank] = lists[rank].replace(old, new)
    return plan(**lists)


def with_slices(place, *slices):
    """The plan whose chunk at `place` holds (sequence, start, stop)."""
    chunks = list(plan().chunks)
    parts = tuple(Slice(sequence=q, start=a, stop=b) for q, a, b in slices)
    chunks[place] = replace(chunks[place], slices=parts)
    return plan(chunks=tuple(chunks))


def torn():
    """The plan whose sequence 0 continues in another unit."""
    first, second, third = plan().chunks
    chunks = (first, replace(second, unit=1, index=0), replace(third, unit=2))
    return plan(chunks=chunks)


@pytest.mark.parametrize(
    "wrong, problem",
    [
        # actions
        (changed(last=("1B0.1 1B0.0", "1B0.0 1B0.1")), "1B0.0: .* descend, 1 comes next"),
        (
            changed(last=("1F0.1 1B0.1 1B0.0", "1B0.0 1F0.1 1B0.1")),
            "1B0.0: backwards of a unit begin after",
        ),
        (changed(first=("0F0.0 0F0.1", "0F0.1 0F0.0")), "0F0.1: .* ascend, 0 comes next"),
        (
            changed(first=("0I0.1 0I0.0 0W0.1", "0W0.1 0I0.0")),
            "0W0.1: weight gradients",
        ),
        (changed(first=("0W0.1 0W0.0", "0W0.0 0W0.1")), "0W0.0: weight .* in their order"),
        (
            changed(first=("0I0.0 0W0.1 0W0.0", "0B0.0 0W0.1")),
            "0B0.0: the weight gradients of .1. come",
        ),
        (changed(first=(" 0W0.0", "")), "no 0W0.0"),
        (changed(first=(" 0B1.0", "")), "no 0B1.0 and no 0I1.0"),
        (changed(last=("1F1.0 1I1.0 1W1.0", "")), "no 1F1.0"),
        (plan(first=FIRST + " 0B1.0"), "0B1.0: backwards of a unit"),
        (plan(first=FIRST + " 0F1.0"), "0F1.0: forwards of a unit"),
        (plan(first=FIRST + " 0F2.0"), "0F2.0: unknown kind"),
        (plan(first=FIRST + " 1F0.0"), "1F0.0: stage 1 is not on rank 0"),
        (
            plan(first="0F1.0 0F0.0 0F0.1 0I0.1 0I0.0 0W0.1 0W0.0 0B1.0"),
            "deadlock: 0I0.1, 1F0.0 wait",
        ),
        (plan(last="1F0.0 1F0.1 1B0.1 1F1.0 1B1.0 1B0.0"), "deadlock: 0I0.0 wait"),
        # fields
        (plan(stages=3), "3 stages cannot be spread evenly over 2 ranks"),
        (plan(checkpointed=((0, 0, 0),)), "must be given for 2 stages x 3 chunks"),
        (plan(checkpointed=((0, 0, 0), (0, -1, 0))), "must not be negative"),
        # chunks
        (with_slices(1, (0, 8, 15)), "sequence 0 has 16 tokens, the chunks hold 15"),
        (with_slices(1, (0, 9, 16)), "chunk 0.1: .* must begin at token 8"),
        (with_slices(1, (0, 8, 16), (1, 0, 8)), "chunk 1.0: .* must begin at token 8"),
        (with_slices(1, (1, 0, 8), (0, 8, 16)), "chunk 0.1: only the first slice may be a part"),
        (with_slices(1), "chunk 0.1 holds no token"),
        (with_slices(1, (7, 0, 8)), "chunk 0.1: .* is not a slice of a sequence"),
        (with_slices(0, (0, 0, 16)), "chunk 0.1: .* is not a slice|must begin at token 16"),
        (torn(), "chunk 1.0: a cut sequence must begin in chunk 0 of its unit"),
        (plan(chunks=plan().chunks[::-1]), "numbered unit by unit"),
    ],
)
def test_what_is_wrong_is_named(wrong, problem):
    check(plan())
    with pytest.raises(ValueError, match=problem):
        check(wrong)


def test_memory_is_checked_at_its_peak():
    made, cost = plan(), even_cost(2)
    # three chunks of 8 tokens on the first stage, two on the last
    check_memory(made, cost, (24, 16))
    with pytest.raises(ValueError, match="0F1.0: rank 0 holds 24 bytes, the limit is 23"):
        check_memory(made, cost, (23, 16))
    with pytest.raises(ValueError, match="1F0.1: rank 1 holds 16 bytes, the limit is 15"):
        check_memory(made, cost, (24, 15))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"members": ((0, 2), (1, 2))}, "replicas must hold each of 4 sequences once"),
        ({"members": ((0, 2), (1,))}, "replicas must hold each of 4 sequences once"),
        ({"members": ((0, 1), (2, 3))}, "the plan of replica 0 is for sequences of other lengths"),
        ({"plans": (plan(), changed(first=(" 0B1.0", "")))}, "no 0B1.0"),
    ],
)
def test_a_step_is_legal_where_its_replicas_are(change, problem):
    """Two replicas with the same plan, for the even and for the odd sequences."""
    lengths = tuple(length for length in plan().lengths for _ in range(2))
    step = StepPlan(lengths=lengths, members=((0, 2), (1, 3)), plans=(plan(), plan()))
    check_step(step)
    with pytest.raises(ValueError, match=problem):
        check_step(replace(step, **change))
