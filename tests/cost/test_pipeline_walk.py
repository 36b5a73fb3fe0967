"""Times and bytes of a pipeline's plan against slow twins, and the price of a chunk against its
formula."""

import random
from dataclasses import replace

import pytest

from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.cost.walk import makespan_ns, peak_bytes, timed
from hf_flexseq.plan.pipeline import parse
from tests.budget import examples, for_seeds
from tests.pipelines import costs_of, even_cost, pipelined, plan_of, relaxed, stage_cost


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


def test_gradients_of_keys_and_values_come_with_the_first_backward():
    made = plan_of((parse("0F0.0 0F0.1 0B0.1 0B0.0"),), sizes=[2])
    cost = PipelineCost.even(1, stage_cost(token_bytes=10.0, kv_bytes=1.0))
    # 80 a chunk, 16 the sequence's K and V
    assert [done.held for done in timed(made, cost)] == [96, 176, 192, 112]
    assert [done.left for done in timed(made, cost)] == [96, 176, 112, 0]


def test_between_its_parts_a_backward_holds_what_it_owes():
    made = plan_of((parse("0F0.0 0F0.1 0I0.1 0I0.0 0W0.1 0W0.0"),), sizes=[2])
    lean, fat = (
        PipelineCost.even(1, stage_cost(token_bytes=10.0, kv_bytes=0.0, owed_bytes=o))
        for o in (6.0, 15.0)
    )
    assert [done.left for done in timed(made, lean)] == [80, 160, 128, 96, 48, 0]
    assert [done.left for done in timed(made, fat)] == [80, 160, 200, 240, 120, 0]
    assert peak_bytes(made, fat) == (240,)


def test_sending_delays_the_neighbour_only():
    made = plan_of((parse("0F0.0 0B0.0"), parse("1F0.0 1B0.0")), sizes=[1])
    cost = replace(even_cost(2), send_ns=5.0)
    assert makespan_ns(made, cost) == 2 * 3000 + 2 * 40


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


@pytest.mark.parametrize(
    "field",
    [
        *("linear_ns", "attention_ns", "chunk_ns", "head_ns"),
        *("token_bytes", "kv_bytes", "input_bytes", "owed_bytes"),
    ],
)
def test_negative_costs_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=-1.0: must"):
        PipelineCost.even(1, stage_cost(**{field: -1.0}))


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
