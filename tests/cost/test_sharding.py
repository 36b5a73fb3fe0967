"""FSDP2's policies: what each moves and holds, and which of them a step gets."""

from dataclasses import replace
from typing import Any

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B
from hf_flexseq.cost.sharding import (
    PLAIN,
    FsdpFigures,
    FsdpPolicy,
    shards_span_nodes,
    trip_seconds,
)
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.facts import StepFacts
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.process.jobs import GroupsJob
from tests.costs import simple_cost
from tests.plans import group, plan_of_groups

KEEPS = FsdpPolicy(regathers=False)
ONCE = FsdpPolicy(reduces_each=False)
BOTH = FsdpPolicy(reduces_each=False, regathers=False)

FIGURES = FsdpFigures(free_bytes=1000.0, parameter_bytes=300.0, gradient_bytes=400.0, trip_s=1.0)
# Micro-batches of 3.5 s, of which 3 s are trips, and next to nothing for what is in them.
COST = simple_cost(micro_batch_s=3.5, budget_bytes=1000.0)


@pytest.mark.parametrize(
    ("tokens", "parameter_bytes", "policy"),
    [
        ((300, 300), 300.0, BOTH),
        ((301, 300), 300.0, KEEPS),
        ((700, 1), 300.0, KEEPS),
        ((701, 1), 300.0, PLAIN),
        ((5000, 1), 300.0, PLAIN),
        ((300,), 300.0, KEEPS),  # one micro-batch has nothing to hold gradients for
        ((300, 300), 900.0, ONCE),  # parameters are too large
    ],
)
def test_the_fewest_trips_that_fit_beside_the_fullest_micro_batch(tokens, parameter_bytes, policy):
    lengths = [2 * count for count in tokens]  # over two ranks
    plan = plan_of_groups(lengths, *([group(0, 2, sequence)] for sequence in range(len(tokens))))
    assert replace(FIGURES, parameter_bytes=parameter_bytes).beside(plan, 2, COST) == policy


# ---- planning with them


def planned_with(
    figures: FsdpFigures | None,
    lengths: list[int],
    *,
    held_tokens: int = 0,
    bound: int | None = None,
    **changes: Any,
) -> Any:
    """held_tokens: of images. bound: of the user. changes: of the cost model."""
    one_rank = Topology(nodes=1, ranks_per_node=1)
    cost = replace(COST, **changes)
    job = GroupsJob(
        topology=one_rank, cost=cost, options=PlanOptions(max_tokens_per_rank=bound), fsdp=figures
    )
    return job.plan(lengths, StepFacts(held_tokens=held_tokens))


def test_a_step_is_planned_and_priced_for_the_policy_that_it_gets():
    plan = planned_with(FIGURES, [100] * 40)
    assert len(plan.micro_batches) == 14
    assert plan.objective_s == pytest.approx(14 * 0.5, rel=1e-5)
    assert FIGURES.beside(plan, 1, COST) == BOTH
    assert plan.notes[-1] == (
        "FSDP2: planned for gradients reduced once, parameters gathered once"
    )
    plain = planned_with(None, [100] * 40)
    assert len(plain.micro_batches) == 4
    assert plain.objective_s == pytest.approx(4 * 3.5, rel=1e-5)
    # with 1.5 s more beside trips fewer micro-batches are worth more than the gradients' trips
    slow = planned_with(FIGURES, [100] * 40, micro_batch_s=5.0)
    assert (len(slow.micro_batches), FIGURES.beside(slow, 1, COST)) == (6, KEEPS)
    # all fits one micro-batch, whatever is held: then least is held
    assert FIGURES.beside(planned_with(FIGURES, [100]), 1, COST) == KEEPS


@pytest.mark.parametrize("held_tokens", [0, 250, 500, 900])
def test_with_a_bound_of_the_user_a_step_gets_the_policy_that_its_note_names(held_tokens):
    plan = planned_with(FIGURES, [50] * 40, held_tokens=held_tokens, bound=100)
    policy = FIGURES.beside(plan, 1, COST, held_tokens=held_tokens)
    notes = [note for note in plan.notes if "FSDP2" in note]
    assert notes == ([] if policy == PLAIN else [f"FSDP2: planned for {policy}"])


@pytest.mark.parametrize("held_tokens", [0, 100, 300, 650, 950])
def test_images_take_memory_from_what_is_held(held_tokens):
    plan = planned_with(FIGURES, [50] * 40, held_tokens=held_tokens)
    policy = FIGURES.beside(plan, 1, COST, held_tokens=held_tokens)
    assert (policy == PLAIN) == (held_tokens >= 650)
    most = max(max(one.tokens_per_rank(plan.lengths, 1)) for one in plan.micro_batches)
    assert most + held_tokens + FIGURES.held_bytes(policy) <= FIGURES.free_bytes


def test_a_sequence_too_long_beside_what_is_held_is_planned_all_the_same():
    plan = planned_with(FIGURES, [650, *[100] * 33])
    assert FIGURES.beside(plan, 1, COST) == KEEPS
    assert any("FSDP2: planned for" in note for note in plan.notes)
    plan = planned_with(FIGURES, [1000, *[100] * 30])
    assert FIGURES.beside(plan, 1, COST) == PLAIN
    assert not any("FSDP2" in note for note in plan.notes)
    with pytest.raises(PlanInfeasible, match="max_tokens_per_rank=1000"):
        planned_with(FIGURES, [1001])


# ---- HSDP


@pytest.mark.parametrize(("per_node", "replicas"), [(6, 3), (6, 1), (8, 4), (4, 2)])
def test_an_estimate_counts_the_trips_that_policies_save(per_node, replicas):
    """Also of four ranks over two nodes of six."""
    nodes = Topology(nodes=2, ranks_per_node=per_node)
    cost, whole = (
        analytic_cost_model(LLAMA_8B, DEVICES["H100"], nodes, zero_stage=3, replicas=count)
        for count in (replicas, nodes.world_size)
    )
    moved = {"moved_bytes": 2.0 * LLAMA_8B.params, "topology": nodes}
    trip_s = trip_seconds(cost, replicas=replicas, **moved)
    assert cost.micro_batch_s - whole.micro_batch_s == pytest.approx(3 * trip_s)


@pytest.mark.parametrize(
    ("nodes", "ranks", "replicas", "spans"),
    [(2, 8, 1, True), (2, 8, 2, False), (2, 8, 4, False), (2, 6, 3, True), (1, 8, 1, False)],
)
def test_ranks_that_share_a_replica_stand_side_by_side(nodes, ranks, replicas, spans):
    assert shards_span_nodes(Topology(nodes=nodes, ranks_per_node=ranks), replicas) == spans
