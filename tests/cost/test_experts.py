"""Experts over ranks: their seconds by hand, and what plans make of them."""

from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.experts import ExpertLayers
from hf_flexseq.cost.presets import MODELS, PRESETS, load_cost_model
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.fit import fit_of, ranks_for
from hf_flexseq.planner.make import make_plan

NODE = Topology(nodes=1, ranks_per_node=4)
EXPERTS = ExpertLayers(ranks=2, token_s=1e-6, exchanged_bytes=1000.0, rate=1e9, imbalance=1.25)
QWEN = MODELS["qwen3-30b-a3b"]
LONG_TAILED = (90_000, 40_000, 9_000, 7_000, 5_000, 3_000, 2_000, 2_000, 1_000, 800, 500, 100)


def own(cost: CostModel) -> CostModel:
    """A cost model whose experts every rank computes itself."""
    return replace(cost, experts=None)


def test_experts_take_what_the_page_says():
    # a group of 300 and 100 tokens: the busiest rank computes 1.25 x 200; the fullest sends 300
    # a group of 40 and 40 tokens: its busiest rank gets 50
    by_hand = [1.25e-6 * 200 + 300 * 1e-6 * 0.5, 1e-6 * 50 + 50 * 1e-6 * 0.5]
    found = EXPERTS.groups_ns([300, 100, 40, 40])
    assert np.allclose(found / 1e9, by_hand, atol=1e-9)


def test_a_micro_batch_takes_as_long_as_its_slowest_expert_group():
    cost = replace(PRESETS["qwen3-30b-a3b-h100"], experts=EXPERTS)
    micro_batch = MicroBatch(
        groups=(
            Group(ranks=(0, 1), sequences=(0,), strategy="ulysses"),
            Group(ranks=(2,), sequences=(1,), strategy="local"),
            Group(ranks=(3,), sequences=(2,), strategy="local"),
        )
    )
    lengths = (8_000, 6_000, 100)
    alone = []  # nanoseconds of each expert group, as if the other one did nothing
    for groups, tokens in (
        (micro_batch.groups[:1], (4_000, 4_000, 0, 0)),
        (micro_batch.groups[1:], (0, 0, 6_000, 100)),
    ):
        (busy,) = lockstep_ns(own(cost), [MicroBatch(groups=groups)], lengths, NODE)
        alone.append(busy + int(EXPERTS.groups_ns(tokens).max()))
    assert lockstep_ns(cost, [micro_batch], lengths, NODE) == (max(alone),)


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_plan_beats_its_bound_and_no_degree_beats_the_plan(ranks):
    cost = analytic_cost_model(QWEN, DEVICES["H100"], NODE, zero_stage=3, expert_ranks=ranks)
    cost = replace(cost, state_bytes=0.0, sharded_state_bytes=0.0)
    plan = make_plan(LONG_TAILED, NODE, cost)
    assert plan.lower_bound_s <= plan.objective_s
    for degree in (1, 2, 4):
        fixed = make_plan(LONG_TAILED, NODE, cost, PlanOptions(planner="static", sp_degree=degree))
        assert fixed.lower_bound_s <= fixed.objective_s
        assert plan.objective_s <= fixed.objective_s


@pytest.mark.parametrize(
    "model, ranks, options, message",
    [
        ("qwen3-8b", 4, {}, "expert_ranks=4 for a model without experts"),
        ("qwen3-30b-a3b", 3, {}, "expert_ranks=3 for 128 experts: use a number of ranks that"),
        ("qwen3-30b-a3b", 8, {}, "experts over 8 ranks on 4 ranks"),
        ("qwen3-30b-a3b", 4, {"replicas": 2}, "experts over 4 ranks on 2 ranks"),
        ("qwen3-30b-a3b", 4, {"zero_stage": 1}, "zero_stage=1 with experts over 4 ranks"),
    ],
)
def test_experts_over_ranks_that_cannot_be_are_refused(model, ranks, options, message):
    options = {"zero_stage": 3, **options}
    with pytest.raises(ValueError, match=message):
        analytic_cost_model(MODELS[model], DEVICES["H100"], NODE, expert_ranks=ranks, **options)


def test_the_stages_of_a_pipeline_have_no_price_for_experts_over_ranks():
    with pytest.raises(ValueError, match="has experts over 8 ranks, and the stages of a pipeline"):
        PipelineCost.of_model(PRESETS["qwen3-30b-a3b-ep8-h100"], 2)


@pytest.mark.parametrize(
    "per_node, ranks, rate",
    [
        (8, 8, 3e11),  # all links are inside of the node
        (8, 16, 15 / (8 / 4e10 + 7 / 3e11)),  # 8 of the 15 others are on the other node
        (1, 4, 4e10),
    ],
)
def test_what_leaves_a_rank_goes_by_two_links(per_node, ranks, rate):
    cluster = Topology(nodes=64 // per_node * 2, ranks_per_node=per_node)
    options = {"zero_stage": 3, "expert_ranks": ranks}
    cost = analytic_cost_model(QWEN, DEVICES["H100"], cluster, **options)
    assert cost.experts.rate == pytest.approx(rate)


def test_presets_put_experts_over_any_ranks_that_divide_them():
    made = load_cost_model("qwen3.5-35b-a3b-ep16-h200")
    assert made.name == "qwen3.5-35b-a3b-ep16-h200"
    assert made.experts.ranks == 16
    assert load_cost_model("gpt-oss-120b-ep8-h100") is PRESETS["gpt-oss-120b-ep8-h100"]
    for name, message in (
        ("qwen3-8b-ep8-h100", "a model without experts"),
        ("qwen3-30b-a3b-ep5-h100", "for 128 experts"),
        ("qwen3-30b-a3b-ep0-h100", "is neither a file nor one of the presets"),
    ):
        with pytest.raises(ValueError, match=message):
            load_cost_model(name)


def test_a_sequence_alone_has_the_seconds_of_its_plan():
    cost = analytic_cost_model(
        QWEN, DEVICES["H100"], NODE, zero_stage=3, expert_ranks=2, checkpointing=False
    )
    cost = replace(cost, state_bytes=0.0, sharded_state_bytes=0.0)
    own_choice = cost.activations.as_set
    alone = fit_of(cost, NODE, own_choice, 4_001)
    options = PlanOptions(planner="static", sp_degree=4)
    assert alone.seconds == pytest.approx(make_plan((4_001,), NODE, cost, options).objective_s)
    beyond = 4 * ranks_for(replace(cost, experts=None), NODE, 1) * alone.longest
    for ranks in (2, 8):
        over = replace(cost, experts=replace(cost.experts, ranks=ranks))
        assert ranks_for(over, NODE, beyond + 1) % max(4, ranks) == 0
