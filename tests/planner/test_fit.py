"""What fits: rungs of choices against plans, and the words about them."""

from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.choices import choices_of, most_tokens, with_choice
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B, PRESETS
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.fit import (
    fastest,
    ladder,
    ranks_for,
    where_it_fits,
)

NODE = Topology(nodes=1, ranks_per_node=8)


def llama(*, checkpointing=False, host_gib=100, topology=NODE):
    cost = analytic_cost_model(
        LLAMA_8B, DEVICES["H100"], topology, zero_stage=3, checkpointing=checkpointing
    )
    activations = replace(cost.activations, host_bytes=host_gib * 2.0**30)
    return replace(cost, activations=activations)


def planned(cost, choice, length, topology=NODE):
    cap = most_tokens(cost, choice, topology.world_size)
    options = PlanOptions(max_tokens_per_rank=cap)
    return make_plan([length], topology, with_choice(cost, choice), options)


@pytest.mark.parametrize("topology", [NODE, Topology(nodes=2, ranks_per_node=4)])
@pytest.mark.parametrize("host_gib", [0, 30, 1000])
def test_the_longest_sequence_can_be_planned_in_these_seconds_and_one_token_more_cannot(
    topology, host_gib
):
    cost = llama(topology=topology, host_gib=host_gib)
    rungs = ladder(cost, topology)
    assert [rung.choice for rung in rungs] == list(choices_of(cost, 8))
    for rung in rungs:
        plan = planned(cost, rung.choice, rung.longest, topology)
        assert plan.degrees() == {8: 1}
        assert plan.objective_s == pytest.approx(rung.seconds)
        with pytest.raises(PlanInfeasible):
            planned(cost, rung.choice, rung.longest + 1, topology)
        assert rung.device_bytes <= cost.budget_bytes
        assert rung.host_bytes <= host_gib * 2**30
        assert host_gib or not rung.choice.uses_host


def test_a_planner_that_chooses_holds_the_last_rung_and_refuses_more_with_what_fits():
    cost = llama()
    last = ladder(cost, NODE)[-1]
    make_plan([last.longest], NODE, cost)
    with pytest.raises(PlanInfeasible) as refusal:
        make_plan([last.longest + 1], NODE, cost)
    said = str(refusal.value)
    assert f"At most {last.longest:,} tokens fit, with {last.choice}. Use 16 ranks" in said
    # planners that make no choices name the one that does
    with pytest.raises(PlanInfeasible, match="Set planner='auto', which holds it with"):
        make_plan([1_048_576], NODE, cost, PlanOptions(planner="zeppelin"))
    # a bound that the user sets is raised by the user
    with pytest.raises(PlanInfeasible, match="Raise max_tokens_per_rank to 125, use more ranks"):
        make_plan([1000], NODE, cost, PlanOptions(max_tokens_per_rank=100))


def test_a_sequence_that_does_not_fit_as_set_is_told_where_it_does():
    cost = llama(checkpointing=True, host_gib=200)
    rungs = ladder(cost, NODE)
    held = where_it_fits(cost, NODE, 1_048_576)
    assert "Set planner='auto', which holds it with 32 layers recomputed, inputs of" in held
    assert "at +0.0 % seconds" in held
    longest = rungs[-1].longest
    refusal = where_it_fits(cost, NODE, 3 * longest)
    assert f"At most {longest:,} tokens fit" in refusal
    ranks = ranks_for(cost, NODE, 3 * longest)
    assert f"Use {ranks} ranks" in refusal
    assert 8 < ranks <= 24
    for nodes, fits in ((ranks // 8, True), (ranks // 8 - 1, False)):
        topology = Topology(nodes=nodes, ranks_per_node=8)
        assert (fastest(cost, topology, 3 * longest) is not None) == fits


def test_a_cost_model_without_activations_has_no_ladder():
    cost = PRESETS["flexsp-gpt-7b-a100"]
    assert ladder(cost, NODE) == ()
    assert where_it_fits(cost, NODE, 1_048_576) == ""
    # nor one whose states leave no room
    full = replace(llama(), budget_bytes=1.0)
    assert ladder(full, NODE) == ()
    assert where_it_fits(full, NODE, 1_048_576) == ""
