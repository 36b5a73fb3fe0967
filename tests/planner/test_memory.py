"""Choices for activations that plans make: legal, no worse than any rung for the whole run, and
none where a step needs none."""

import random
import re
from dataclasses import replace

import pytest

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.choices import choices_of, most_tokens, with_choice
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B
from hf_flexseq.cost.sharding import FsdpFigures
from hf_flexseq.plan import Plan, PlanInfeasible
from hf_flexseq.plan.facts import StepFacts
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make, make_plan
from hf_flexseq.planner.memory import rungs_of
from hf_flexseq.planner.process.jobs import GroupsJob
from tests.plans import planned

NODE = Topology(nodes=1, ranks_per_node=8)
NODES = Topology(nodes=4, ranks_per_node=8)


def llama(topology: Topology, **options: bool) -> CostModel:
    return analytic_cost_model(LLAMA_8B, DEVICES["H100"], topology, zero_stage=3, **options)


EIGHT = llama(NODE, checkpointing=False)
MANY = llama(NODES, checkpointing=False)
MANY = replace(MANY, micro_batch_s=1.5 * MANY.micro_batch_s)  # slow links


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
        if cap * topology.world_size >= max(lengths):
            plan = planned(lengths, topology, alone, sync=sync, max_tokens_per_rank=cap)
            seconds.append(plan.objective_s)
    return seconds


def check_choices(plan: Plan, cost: CostModel, topology: Topology) -> None:
    """Every micro-batch has the lowest rung with room for its fullest rank."""
    world = topology.world_size
    as_set, *_ = choices = choices_of(cost, world)
    for micro_batch in plan.micro_batches:
        fullest = max(micro_batch.tokens_per_rank(plan.lengths, world))
        lowest = next(one for one in choices if most_tokens(cost, one, world) >= fullest)
        assert (micro_batch.memory or as_set) == lowest
    ns = step_ns(cost, plan.micro_batches, plan.lengths, topology, sync="lockstep")
    assert plan.objective_s == ns / 1e9
    assert plan.lower_bound_s <= plan.objective_s


@pytest.mark.parametrize(
    "lengths", [[3000] * 8, [20_000, 500, 500], long_tailed(12, 1, 9_000), [17_254, 14_880, 4465]]
)
def test_a_step_that_gains_by_no_choice_is_planned_once_and_as_if_there_were_none(
    lengths, monkeypatch
):
    without = make_plan(lengths, NODE, without_choices(EIGHT))
    caps = []
    planner = make.object_of(PLANNERS["auto"].function)
    monkeypatch.setattr(
        make, "object_of", lambda name: lambda task: caps.append(task.cap) or planner(task)
    )
    plan = make_plan(lengths, NODE, EIGHT)
    assert plan.digest() == without.digest()
    assert plan.choices() == {}
    assert caps == [EIGHT.max_tokens_per_rank(8)]


def test_a_sequence_that_fits_nowhere_else_gets_one_and_the_note_says_so():
    with pytest.raises(PlanInfeasible):
        make_plan([400_000], NODE, without_choices(EIGHT))
    plan = make_plan([400_000], NODE, EIGHT)
    check_choices(plan, EIGHT, NODE)
    assert plan.micro_batches[0].memory == MemoryChoice(recomputed_layers=32)
    assert "sequence 0 (400,000 tokens) fits nowhere otherwise" in plan.notes[-1]
    assert Plan.from_json(plan.to_json()) == plan


def test_a_bound_that_the_user_sets_is_kept():
    plan = planned([400_000], NODE, EIGHT, max_tokens_per_rank=50_000)
    assert plan.micro_batches[0].memory is None
    # where nothing is known to fit, and whatever images take
    full = replace(EIGHT, budget_bytes=1.0)
    assert planned([40], NODE, full, max_tokens_per_rank=50).choices() == {}
    facts = StepFacts(held_tokens=9)
    with pytest.raises(PlanInfeasible, match="above max_tokens_per_rank=2. Raise"):
        make_plan([40], NODE, EIGHT, PlanOptions(max_tokens_per_rank=2), **facts.arguments)


@pytest.mark.parametrize("sync", ["lockstep", "free"])
def test_no_choice_for_the_whole_run_is_faster(sync):
    """Few micro-batches gain here, since gathering parameters across nodes is slow."""
    lengths = [300_000, *long_tailed(60, 0, 100_000)]
    plan = planned(lengths, NODES, MANY, sync=sync)
    if sync == "lockstep":
        check_choices(plan, MANY, NODES)
    as_set, *seconds = run_wide_seconds(lengths, NODES, MANY, sync=sync)
    assert plan.objective_s <= min(seconds) < 0.97 * as_set
    (said,) = re.findall(r"at least (\d+) % faster than as set", plan.notes[-1])
    assert 3 <= int(said) <= round(100 * (1 - plan.objective_s / as_set))


def test_long_sequences_take_a_choice_and_short_ones_beside_them_do_not():
    """Gathering is cheap here, so that more micro-batches cost less than running layers again."""
    cost = replace(llama(NODES, checkpointing=False), micro_batch_s=0.01)
    lengths = [400_000] + [4000] * 500
    plan = make_plan(lengths, NODES, cost)
    check_choices(plan, cost, NODES)
    chosen = [one.memory for one in plan.micro_batches]
    assert sum(choice is not None for choice in chosen) == 1
    assert plan.objective_s < 0.98 * min(run_wide_seconds(lengths, NODES, cost))


def test_policies_of_fsdp2_and_choices_are_weighed_together():
    """Holding parameters pays where they leave room for the step; else a choice is made."""
    figures = FsdpFigures(
        free_bytes=EIGHT.free_bytes(8),
        parameter_bytes=16e9,
        gradient_bytes=32e9,
        trip_s=EIGHT.micro_batch_s / 3,
    )
    lengths = [200_000, *long_tailed(60, 3, 30_000)]
    job = GroupsJob(topology=NODE, cost=EIGHT, options=PlanOptions(), fsdp=figures)
    plan = job.plan(lengths)
    held = figures.held_bytes(figures.beside(plan, 8, EIGHT))
    for micro_batch in plan.micro_batches:
        fullest = max(micro_batch.tokens_per_rank(plan.lengths, 8))
        token_bytes = with_choice(EIGHT, micro_batch.memory).token_bytes
        assert fullest * token_bytes + held <= figures.free_bytes
    assert plan.objective_s <= 1.05 * make_plan(lengths, NODE, EIGHT).objective_s


def test_images_take_their_memory_under_every_choice():
    held = 2000
    plan = make_plan([400_000], NODE, EIGHT, **StepFacts(held_tokens=held).arguments)
    (micro_batch,) = plan.micro_batches
    token_bytes = with_choice(EIGHT, micro_batch.memory).token_bytes
    assert held * EIGHT.token_bytes + 50_000 * token_bytes <= EIGHT.free_bytes(8)
    # a refusal does not advise the planner that refuses
    most = rungs_of(EIGHT, PlanOptions(), 8)[-1].tokens
    facts = StepFacts(held_tokens=EIGHT.max_tokens_per_rank(8))
    with pytest.raises(PlanInfeasible, match="what the step's images leave") as refused:
        make_plan([8 * most], NODE, EIGHT, **facts.arguments)
    assert "planner='auto'" not in str(refused.value)


@pytest.mark.parametrize(
    "options, tokens, degree",
    [({"planner": "static", "sp_degree": 2}, 60_000, 2), ({"strategy": "local"}, 20_000, 1)],
)
def test_a_choice_is_made_for_the_ranks_that_may_share_a_sequence(options, tokens, degree):
    """Wider groups would hold this sequence as the run is set, but none may be made."""
    assert degree * EIGHT.max_tokens_per_rank(8) < tokens < 8 * EIGHT.max_tokens_per_rank(8)
    plan = planned([tokens, 3000, 3000], NODE, EIGHT, **options)
    check_choices(plan, EIGHT, NODE)
    assert {group.degree for group in plan.groups} == {degree}
    assert f"sequence 0 ({tokens:,} tokens) fits nowhere otherwise" in plan.notes[-1]


def test_ranks_without_room_for_a_token_as_the_run_is_set_have_room_by_a_choice():
    states = EIGHT.budget_bytes - EIGHT.free_bytes(8)
    tight = replace(EIGHT, budget_bytes=states + EIGHT.token_bytes / 2)
    plan = make_plan([8], NODE, tight)
    assert plan.micro_batches[0].memory is not None
    with pytest.raises(ValueError, match="leaves no room for a token"):
        make_plan([8], NODE, without_choices(tight))
