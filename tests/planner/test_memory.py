"""Choices for activations that plans make: legal, no worse than any choice of the whole run, and
none where a step needs none."""

import random
from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.analytic import analytic_cost_model
from hf_flexseq.cost.choices import choices_of, most_tokens, with_choice
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B
from hf_flexseq.cost.sharding import FsdpFigures
from hf_flexseq.plan import Plan, PlanInfeasible
from hf_flexseq.plan.facts import StepFacts
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.memory import promise_ns, rungs_of
from hf_flexseq.planner.process.jobs import GroupsJob
from tests.plans import planned

NODE = Topology(nodes=1, ranks_per_node=8)
NODES = Topology(nodes=4, ranks_per_node=8)


def llama(topology: Topology, **options: bool) -> CostModel:
    return analytic_cost_model(LLAMA_8B, DEVICES["H100"], topology, zero_stage=3, **options)


EIGHT = llama(NODE, checkpointing=False)
MANY = llama(NODES, checkpointing=False)


def long_tailed(count: int, seed: int, limit: int = 200_000) -> list[int]:
    rng = random.Random(seed)
    return [min(limit, int(rng.lognormvariate(6.9, 1.75)) + 1) for _ in range(count)]


def without_choices(cost: CostModel) -> CostModel:
    return replace(cost, activations=None)


def run_wide_seconds(
    lengths: list[int], topology: Topology, cost: CostModel, *, sync: str = "lockstep"
) -> list[float]:
    """Return the seconds of a step under every choice that can hold it in all micro-batches."""
    seconds = []
    for choice in choices_of(cost, topology.world_size):
        cap = most_tokens(cost, choice, topology.world_size)
        alone = without_choices(with_choice(cost, choice))
        if cap * topology.world_size < max(lengths):
            continue
        plan = planned(lengths, topology, alone, sync=sync, max_tokens_per_rank=cap)
        seconds.append(plan.objective_s)
    return seconds


def check_choices(plan: Plan, cost: CostModel, topology: Topology) -> None:
    """Every micro-batch's fullest rank has room for its tokens under the choice made for it."""
    for micro_batch in plan.micro_batches:
        choice = micro_batch.memory
        fullest = max(micro_batch.tokens_per_rank(plan.lengths, topology.world_size))
        if choice is None:
            assert fullest <= cost.max_tokens_per_rank(topology.world_size)
        else:
            assert fullest <= most_tokens(cost, choice, topology.world_size)
    ns = step_ns(cost, plan.micro_batches, plan.lengths, topology, sync="lockstep")
    assert plan.objective_s == ns / 1e9
    assert plan.lower_bound_s <= plan.objective_s


def test_a_step_that_needs_no_choice_is_planned_as_if_there_were_none():
    for lengths in ([3000] * 8, [20_000, 500, 500], long_tailed(12, 1, 9_000)):
        plan = make_plan(lengths, NODE, EIGHT)
        assert all(one.memory is None for one in plan.micro_batches)
        assert plan.digest() == make_plan(lengths, NODE, without_choices(EIGHT)).digest()


def test_a_sequence_that_fits_nowhere_else_gets_one_and_the_note_says_so():
    with pytest.raises(PlanInfeasible):
        make_plan([400_000], NODE, without_choices(EIGHT))
    plan = make_plan([400_000], NODE, EIGHT)
    check_choices(plan, EIGHT, NODE)
    assert plan.micro_batches[0].memory.recomputed_layers > 0
    assert "sequence 0 (400,000 tokens) fits nowhere otherwise" in plan.notes[-1]
    assert Plan.from_json(plan.to_json()) == plan


def test_the_longest_sequence_is_that_of_the_choice_with_most_room():
    most = rungs_of(EIGHT, PlanOptions(), 8)[-1].tokens
    check_choices(make_plan([8 * most], NODE, EIGHT), EIGHT, NODE)
    with pytest.raises(PlanInfeasible, match=f"above max_tokens_per_rank={most}"):
        make_plan([8 * most + 1], NODE, EIGHT)


def test_a_bound_that_the_user_sets_is_kept():
    plan = planned([400_000], NODE, EIGHT, max_tokens_per_rank=50_000)
    assert plan.micro_batches[0].memory is None
    with pytest.raises(PlanInfeasible):
        planned([400_000], NODE, EIGHT, max_tokens_per_rank=10_000)


@pytest.mark.parametrize("sync", ["lockstep", "free"])
def test_no_choice_for_the_whole_run_is_faster(sync):
    lengths = [300_000, *long_tailed(60, 0, 100_000)]
    plan = planned(lengths, NODES, MANY, sync=sync)
    if sync == "lockstep":
        check_choices(plan, MANY, NODES)
    assert plan.objective_s <= 1.03 * min(run_wide_seconds(lengths, NODES, MANY, sync=sync))


def test_long_sequences_take_a_choice_and_short_ones_beside_them_do_not():
    """Gathering is cheap here, so that more micro-batches cost less than running layers again."""
    cost = replace(llama(NODES, checkpointing=False), micro_batch_s=0.01)
    lengths = [400_000] + [4000] * 500
    plan = make_plan(lengths, NODES, cost)
    check_choices(plan, cost, NODES)
    chosen = {one.memory is None for one in plan.micro_batches}
    assert chosen == {True, False}
    assert plan.objective_s < 0.98 * min(run_wide_seconds(lengths, NODES, cost))


def test_the_same_step_gets_the_same_plan():
    lengths = [300_000, *long_tailed(100, 7)]
    assert make_plan(lengths, NODES, MANY).digest() == make_plan(lengths, NODES, MANY).digest()


def test_policies_of_fsdp2_and_choices_are_weighed_together():
    """Holding parameters pays where they leave room for the step; else a choice is made."""
    figures = FsdpFigures(
        free_bytes=EIGHT.free_bytes(8),
        token_bytes=EIGHT.token_bytes,
        parameter_bytes=16e9,
        gradient_bytes=32e9,
        trip_s=EIGHT.micro_batch_s / 3,
    )
    job = GroupsJob(topology=NODE, cost=EIGHT, options=PlanOptions(), fsdp=figures)
    lengths = [200_000, *long_tailed(60, 3, 30_000)]
    plan = job.plan(lengths)
    check = plan.micro_batches
    policy = figures.beside(plan, 8, EIGHT)
    held = figures.held_bytes(policy)
    for micro_batch in check:
        fullest = max(micro_batch.tokens_per_rank(plan.lengths, 8))
        choice = micro_batch.memory or EIGHT.activations.as_set
        assert fullest * with_choice(EIGHT, choice).token_bytes + held <= figures.free_bytes
    assert plan.objective_s <= 1.05 * make_plan(lengths, NODE, EIGHT).objective_s


def test_images_take_their_memory_under_every_choice():
    held = 2000
    plain = make_plan([400_000], NODE, EIGHT)
    beside = make_plan([400_000], NODE, EIGHT, **StepFacts(held_tokens=held).arguments)
    check_choices(plain, EIGHT, NODE)
    (micro_batch,) = beside.micro_batches
    choice = micro_batch.memory
    taken = held * EIGHT.token_bytes + 50_000 * with_choice(EIGHT, choice).token_bytes
    assert taken <= EIGHT.free_bytes(8)


def test_the_promise_is_a_bound_where_everything_divides():
    """Sequences of one rank each, as many as ranks: the step is what was promised."""
    lengths = [6000] * 8
    promised_ns = promise_ns(lengths, NODE, EIGHT, PlanOptions())
    assert make_plan(lengths, NODE, EIGHT).objective_s == pytest.approx(promised_ns / 1e9)


def test_one_degree_for_all_sequences_takes_a_choice_that_its_groups_need():
    """Wider groups would hold this sequence as the run is set, but none is made."""
    options = {"planner": "static", "sp_degree": 2}
    lengths = [60_000, 3000, 3000]
    assert 8 * EIGHT.max_tokens_per_rank(8) > 60_000
    plan = planned(lengths, NODE, EIGHT, **options)
    check_choices(plan, EIGHT, NODE)
    assert {group.degree for group in plan.groups} == {2}
    assert plan.micro_batches[0].memory is not None


def test_ranks_without_room_for_a_token_as_the_run_is_set_have_room_by_a_choice():
    states = EIGHT.budget_bytes - EIGHT.free_bytes(8)
    tight = replace(EIGHT, budget_bytes=states + EIGHT.token_bytes / 2)
    plan = make_plan([8], NODE, tight)
    assert plan.micro_batches[0].memory is not None
    with pytest.raises(ValueError, match="leaves no room for a token"):
        make_plan([8], NODE, without_choices(tight))


def test_a_refusal_beside_images_does_not_advise_the_planner_that_refuses():
    most = rungs_of(EIGHT, PlanOptions(), 8)[-1].tokens
    facts = StepFacts(held_tokens=EIGHT.max_tokens_per_rank(8))
    with pytest.raises(PlanInfeasible, match="what the step's images leave") as refused:
        make_plan([8 * most], NODE, EIGHT, **facts.arguments)
    assert "planner='auto'" not in str(refused.value)


def test_images_take_nothing_off_a_cap_of_the_user_s():
    facts = StepFacts(held_tokens=9)
    with pytest.raises(PlanInfeasible, match="above max_tokens_per_rank=2. Raise"):
        make_plan([40], NODE, EIGHT, PlanOptions(max_tokens_per_rank=2), **facts.arguments)


@pytest.mark.parametrize(
    "lengths",
    [[15_158, 4292, 5025, 8279, 16_135], [17_254, 14_880, 11_023, 4465]],
)
def test_a_step_that_a_choice_would_make_slower_has_the_plan_without(lengths):
    """Its promise without a choice counts a micro-batch more than it then needs."""
    six = Topology(nodes=2, ranks_per_node=3)
    cost = llama(six, checkpointing=False)
    states = cost.budget_bytes - cost.free_bytes(6)
    cost = replace(cost, budget_bytes=states + EIGHT.free_bytes(8))
    plan = make_plan(lengths, six, cost)
    assert plan.digest() == make_plan(lengths, six, without_choices(cost)).digest()
