"""Plans of groups and of pipelines: which are legal, their choices for activations, and records of
them: text, JSON, digests, and those of before."""

import json
import random
from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.pipeline.planning.plan import Action, Chunk, PipelinePlan, parse, text
from hf_flexseq.pipeline.planning.step_plan import StepPlan
from hf_flexseq.plan import Group, Plan, check, widest_first
from hf_flexseq.plan.facts import StepFacts
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.shard import Slice
from hf_flexseq.plan.units import Unit
from tests.budget import examples, for_seeds
from tests.plans import group, plan_of_groups, random_plan

FIGURES = {"objective_s": 1.5, "lower_bound_s": 1.25, "planner": "auto", "planning_s": 0.01}
OF_GROUPS = plan_of_groups((9, 2), [group(0, 2, 0, 1)], notes=("because",), **FIGURES)


def chunk_of(index: int, *slices: tuple[int, int, int]) -> Chunk:
    parts = [Slice(sequence=q, start=start, stop=stop) for q, start, stop in slices]
    return Chunk(unit=0, index=index, slices=tuple(parts))


def replica(length: int, objective_s: float) -> PipelinePlan:
    """One whole sequence through one stage."""
    return PipelinePlan(
        lengths=(length,),
        ranks=1,
        stages=1,
        chunks=(chunk_of(0, (0, 0, length)),),
        actions=(parse("0F0.0 0B0.0"),),
        checkpointed=(),
        schedule="seq1f1b",
        objective_s=objective_s,
        planning_s=0.25,
    )


# Two stages; sequence 0 in two chunks, its tail packed with sequence 1.
CUT = replace(
    replica(9, 1.5),
    lengths=(9, 2),
    ranks=2,
    stages=2,
    chunks=(chunk_of(0, (0, 0, 6)), chunk_of(1, (0, 6, 9), (1, 0, 2))),
    actions=tuple(parse(f"{s}F0.0 {s}F0.1 {s}B0.1 {s}I0.0 {s}W0.0") for s in (0, 1)),
    checkpointed=((0, 1), (0, 0)),
)
OF_PIPELINES = StepPlan(
    lengths=(9, 2),
    members=((0,), (1,)),
    plans=(replica(9, 1.5), replica(2, 0.5)),
    notes=("because",),
)

either_kind = pytest.mark.parametrize("plan", [OF_GROUPS, OF_PIPELINES])


# ---- plans of either kind


@either_kind
def test_json_round_trip_and_records_of_before(plan):
    kind, record = type(plan), plan.to_record()
    assert kind.from_json(plan.to_json()) == plan
    assert record.pop("version") == 1
    assert kind.from_record(record) == plan  # of before there were versions
    for version in (2, "1", True, None):
        with pytest.raises(ValueError, match=f"of version {version!r}: .* reads version 1"):
            kind.from_record(record | {"version": version})
    for notes in ("because", [1], 3, None):
        with pytest.raises(ValueError, match="notes.*must be a"):
            kind.from_record(record | {"notes": notes})
    del record["notes"]
    assert kind.from_record(record) == replace(plan, notes=())


@pytest.mark.parametrize("name", ["ranks", "sequences"])
@pytest.mark.parametrize("value", [1.0, True])
def test_numbers_that_equal_whole_ones_are_refused(name, value):
    record = OF_GROUPS.to_record()
    record["micro_batches"][0]["groups"][0][name][1] = value
    with pytest.raises(ValueError, match=rf"{name}\[1\].*{value}"):
        Plan.from_record(record)


@for_seeds(examples(40))
def test_json_round_trip_of_random_plans(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 12))]
    made = random_plan(lengths, rng.randint(1, 6), rng)
    assert Plan.from_json(made.to_json()) == made


TORN = replace(replica(2, 0.5), actions=(parse("0F0.0"),))
SLOWER = tuple(replace(one, planning_s=9.0) for one in OF_PIPELINES.plans)


@pytest.mark.parametrize(
    "plan, change, is_seen",
    [
        (OF_GROUPS, {"objective_s": 1.0}, True),
        (OF_GROUPS, {"lower_bound_s": 1.0}, True),
        (OF_GROUPS, {"planner": "static"}, True),
        (OF_GROUPS, {"lengths": (9, 3)}, True),
        (OF_GROUPS, {"micro_batches": ()}, True),
        (OF_GROUPS, {"notes": ()}, False),
        (OF_GROUPS, {"planning_s": 9.0}, False),
        (OF_PIPELINES, {"lengths": (9, 3)}, True),
        (OF_PIPELINES, {"plans": (replica(9, 1.5), replica(2, 9.0))}, True),
        (OF_PIPELINES, {"plans": SLOWER}, False),
        (OF_PIPELINES, {"notes": ()}, False),
        (CUT, {"checkpointed": ()}, True),
        (CUT, {"actions": CUT.actions[::-1]}, True),
        (CUT, {"planning_s": 9.0}, False),
    ],
)
def test_digests_see_all_but_notes_and_the_time_of_planning(plan, change, is_seen):
    assert (replace(plan, **change).digest() != plan.digest()) == is_seen
    assert OF_GROUPS.digest() == "c113b538fa2fa31a"  # as in traces from before there were notes


@pytest.mark.parametrize(
    "record", ["{}", '{"micro_batches": 3}', '{"micro_batches": [{}]}', "[]", "no json"]
)
def test_other_records_are_refused(record):
    with pytest.raises(ValueError):
        Plan.from_json(record)


@pytest.mark.parametrize(
    "plan, message",
    [
        (replace(OF_GROUPS, lengths=(9, 2, 1)), r"missing \[2\]"),
        (replace(OF_PIPELINES, lengths=(9, 2, 1)), "replicas must hold each of 3 sequences once"),
        (replace(OF_PIPELINES, plans=(CUT,)), "expected one plan per replica, got 1 for 2"),
        (replace(OF_PIPELINES, plans=(replica(9, 1.5), TORN)), "stage 0 has no 0B0.0"),
    ],
)
def test_a_wrong_form_is_refused_without_a_topology(plan, message):
    with pytest.raises(ValueError, match=message):
        plan.check_form()


# ---- the plan of a pipeline


def test_the_text_form_names_stage_kind_unit_and_chunk():
    assert str(Action(2, "F", 0, 1)) == "2F0.1"
    assert parse("2F0.1 10W3.12") == (Action(2, "F", 0, 1), Action(10, "W", 3, 12))
    assert text(parse("2F0.1 10W3.12")) == "2F0.1 10W3.12"
    for word in ("2X0.1", "F0.1", "2F0", "2F0.1x", "-1F0.0", ""):
        with pytest.raises(ValueError, match="not an action"):
            Action.parse(word)


def test_json_of_a_cut_plan():
    assert PipelinePlan.from_json(CUT.to_json()) == CUT
    with pytest.raises(ValueError, match="not a plan of a pipeline"):
        PipelinePlan.from_json(json.dumps({"lengths": [1]}))


# ---- choices for activations


CHOICE = MemoryChoice(
    recomputed_layers=6, inputs_on_host=4, outputs_on_host=2, outputs_recomputed=3, mlp_tiles=8
)


def layers_where(says, layers=8):
    return [layer for layer in range(layers) if says(layer)]


def test_a_choice_says_what_each_layer_does():
    assert layers_where(CHOICE.recomputes) == [0, 1, 2, 3, 4, 5]
    assert layers_where(CHOICE.input_on_host) == [0, 1, 2, 3]
    assert layers_where(CHOICE.output_on_host) == [0, 1]
    assert layers_where(CHOICE.recomputes_output) == [2, 3, 4]
    assert "6 layers recomputed" in str(CHOICE)
    assert "8 tiles" in str(CHOICE)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"recomputed_layers": -1}, "recomputed_layers=-1: must not be negative|at least 0"),
        ({"mlp_tiles": 0}, "mlp_tiles=0: must be at least 1"),
        ({"mlp_tiles": 2.0}, "mlp_tiles=2.0: must be a whole number"),
        ({"recomputed_layers": 2, "inputs_on_host": 3}, "inputs_on_host=3: must be at most 2"),
        (
            {"recomputed_layers": 2, "outputs_on_host": 1, "outputs_recomputed": 2},
            "outputs_recomputed=2: must be at most 1",
        ),
    ],
)
def test_choices_that_no_layer_can_follow_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        MemoryChoice(**values)


def test_plans_carry_choices_and_those_without_any_have_the_bytes_of_before():
    plan = plan_of_groups((9, 2), [group(0, 2, 0)], [group(0, 1, 1)])
    assert "memory" not in plan.to_json()
    first, second = plan.micro_batches
    chosen = replace(plan, micro_batches=(replace(first, memory=CHOICE), second))
    sent = Plan.from_json(chosen.to_json())
    assert sent == chosen
    assert sent.micro_batches[0].memory == CHOICE
    assert sent.micro_batches[1].memory is None
    assert chosen.digest() != plan.digest()
    record = chosen.to_record()
    record["micro_batches"][0]["memory"]["mlp_tiles"] = 0
    with pytest.raises(ValueError, match="mlp_tiles=0"):
        Plan.from_record(record)
    record["micro_batches"][0]["memory"] = {"tiles": 2}
    with pytest.raises(ValueError, match="not a memory choice"):
        Plan.from_record(record)


# ---- legal plans


NODE = Topology(nodes=1, ranks_per_node=4)


def test_tokens_and_degrees_are_counted():
    plan = plan_of_groups((10, 3, 7), [group(0, 4, 0), group(0, 2, 1), group(3, 4, 2)])
    check(plan, NODE, max_tokens_per_rank=10)
    (micro_batch,) = plan.micro_batches
    assert micro_batch.tokens_per_rank(plan.lengths, 4) == (5, 5, 3, 10)
    assert plan.degrees() == {1: 1, 2: 1, 4: 1}
    assert [g.degree for g in micro_batch.groups_of(0)] == [4, 2]
    assert widest_first([group(0, 1, 0), group(0, 2, 1)])[0].degree == 2


def test_a_plan_for_other_ranks_is_the_plan():
    groups = [group(0, 4, 0), group(0, 2, 1), group(3, 4, 2)]
    plan = replace(plan_of_groups((10, 3, 7), groups), notes=("a reason",), objective_s=0.25)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "ranks, sequences, strategy, message",
    [
        ((), (0,), "local", "contiguous"),
        ((0, 2), (0,), "ulysses", "contiguous"),
        ((1, 0), (0,), "ulysses", "contiguous"),
        ((0, 1), (), "ulysses", "no sequence"),
        ((0, 1), (0,), "ring", "must be one of"),
        ((0, 1), (0,), "local", "does not fit degree 2"),
        ((0,), (0,), "zigzag", "does not fit degree 1"),
    ],
)
def test_illegal_groups_are_refused(ranks, sequences, strategy, message):
    with pytest.raises(ValueError, match=message):
        Group(ranks=ranks, sequences=sequences, strategy=strategy)


def plan(lengths: tuple[int, ...], *groups: tuple[int, ...]) -> Plan:
    """One micro-batch of (first rank, past the last rank, sequences)."""
    return plan_of_groups(lengths, [group(*one) for one in groups])


@pytest.mark.parametrize(
    "illegal, message",
    [
        (plan((1, 1), (0, 1, 0)), r"missing \[1\]"),
        (plan_of_groups((1,), [group(0, 1, 0)], [group(0, 1, 0)]), r"more than once \[0\]"),
        (plan((1,), (0, 1, 0, 1)), r"unknown \[1\]"),
        (plan((0,), (0, 1, 0)), "no token"),
        (plan((1,), (3, 5, 0)), "neither inside one node nor whole nodes"),
        (plan((1, 1), (0, 1, 0), (0, 2, 1)), "widest first"),
        (plan((1, 1), (0, 3, 0), (2, 4, 1)), "partly overlap"),
        (plan((9, 4), (0, 2, 0), (1, 2, 1)), "rank 1 holds 9 tokens, the limit is 8"),
    ],
)
def test_illegal_plans_are_refused(illegal, message):
    with pytest.raises(ValueError, match=message):
        check(illegal, NODE, max_tokens_per_rank=8)


def test_groups_across_half_nodes_are_refused():
    two_nodes = Topology(nodes=2, ranks_per_node=2)
    check(plan((8,), (0, 4, 0)), two_nodes)
    with pytest.raises(ValueError, match="2 x 2"):
        check(plan((8,), (1, 3, 0)), two_nodes)


def test_facts_reach_another_process_as_they_are():
    units = [Unit.of([(-1, 5), (0, 2), (0, 3)], [(1, 1), (2, 2)])]
    for facts in (StepFacts(units=units, later_pairs={3: 7}, held_tokens=9), StepFacts()):
        record = json.loads(json.dumps(facts.to_record()))
        assert StepFacts.from_record(record).arguments == {
            name: list(value) if name == "units" else value
            for name, value in facts.arguments.items()
        }
