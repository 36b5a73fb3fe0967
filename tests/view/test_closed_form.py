"""Timelines of plans end when the closed form says, and have no gaps."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.experts import ExpertLayers
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.view import timeline_of
from hf_flexseq.view.closed_form import EXPOSED, group_parts, most_events
from hf_flexseq.view.timeline import KINDS, Timeline
from tests.budget import examples
from tests.costs import SMALL, simple_cost
from tests.plans import group, plan_of_groups, random_plan

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
OVER_RANKS = PRESETS["qwen3-30b-a3b-ep8-h100"]
PAIR = Topology(nodes=1, ranks_per_node=2)
NODE = Topology(nodes=1, ranks_per_node=4)


# 1 s for each squared token, so that times can be counted by hand.
STATES = {"state_bytes": 60.0, "sharded_state_bytes": 160.0}  # 100 on each of four ranks
TINY = simple_cost(attention_s=1.0, overlap=1.0, bandwidths=((64, 1.0),), **STATES)


def parts_of(strategy: str, cost: CostModel) -> dict[str, int]:
    """The parts of 8 tokens on 2 ranks."""
    return group_parts(group(0, 2, 0, strategy=strategy), (8,), NODE, cost)


def check_timeline(timeline: Timeline) -> None:
    """Every rank's events fill the step without a gap, and the shares of all kinds add up to
    one."""
    for rank in range(timeline.world_size):
        events = [event for event in timeline.events if event.rank == rank]
        assert [e.start for e in events] == [0, *(e.stop for e in events[:-1])]
        assert not timeline.stop or events[-1].stop == timeline.stop
        assert all(e.stop > e.start for e in events)
    assert not timeline.stop or sum(map(timeline.share, KINDS)) == pytest.approx(1)


@settings(deadline=None, max_examples=examples(60))
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    nodes=st.integers(1, 2),
    seed=st.integers(0, 10**6),
    sync=st.sampled_from(["lockstep", "free"]),
    preset=st.sampled_from(["gemma-3-27b-h100", "qwen3.5-35b-a3b-h100", "llama-3.1-8b-h200"]),
)
def test_the_timeline_of_any_plan_ends_with_its_closed_form(lengths, nodes, seed, sync, preset):
    topology = Topology(nodes=nodes, ranks_per_node=4)
    plan = random_plan(lengths, topology.world_size, random.Random(seed), nodes=nodes)
    cost = PRESETS[preset]
    timeline = timeline_of(plan, topology, cost, sync=sync)
    expected = step_ns(cost, plan.micro_batches, plan.lengths, topology, sync=sync)
    assert timeline.stop == expected
    check_timeline(timeline)
    assert len(timeline.events) <= most_events(plan, topology.world_size)
    assert max(event.stop for event in timeline.events) == timeline.stop


@settings(deadline=None, max_examples=examples(30))
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    seed=st.integers(0, 10**6),
    ranks=st.sampled_from([2, 4, 8]),
)
def test_with_experts_over_ranks_it_does_so_too(lengths, seed, ranks):
    topology = Topology(nodes=2, ranks_per_node=4)
    plan = random_plan(lengths, topology.world_size, random.Random(seed), nodes=2)
    cost = replace(OVER_RANKS, experts=replace(OVER_RANKS.experts, ranks=ranks))
    timeline = timeline_of(plan, topology, cost)
    assert timeline.stop == step_ns(
        cost, plan.micro_batches, plan.lengths, topology, sync="lockstep"
    )
    check_timeline(timeline)
    assert len(timeline.events) <= most_events(plan, topology.world_size)


def test_an_expert_group_meets_after_its_ranks_groups():
    """Ranks 0 and 1 compute 4 and 64 s. Their 10 tokens take 5 s on two ranks, and the fullest
    rank sends 8 of them, half of which leave it, in 4 s."""
    experts = ExpertLayers(ranks=2, token_s=1.0, exchanged_bytes=1.0, rate=1.0, imbalance=1.0)
    cost = replace(TINY, experts=experts, linear_s=1e-12)
    plan = plan_of_groups((2, 8), [group(0, 1, 0), group(1, 2, 1)])
    timeline = timeline_of(plan, NODE, cost)
    second = 10**9
    events = {(e.rank, e.kind): (e.start, e.stop) for e in timeline.events if e.rank < 2}
    assert events[0, "wait"] == (4 * second, 64 * second)
    assert events[0, "experts"] == events[1, "experts"] == (64 * second, 73 * second)
    assert timeline.share("experts") == pytest.approx(2 * 9 / (4 * 73))
    with pytest.raises(ValueError, match="sync='free' with experts over 2 ranks"):
        timeline_of(plan, NODE, cost, sync="free")
    with pytest.raises(ValueError, match="experts over 2 ranks on 3 ranks"):
        timeline_of(plan, Topology(nodes=1, ranks_per_node=3), cost)


def test_a_ring_s_transfers_are_exposed_as_far_as_they_last_longer_than_attention():
    """32 s of attention on each rank, 4 tokens' keys and values moved."""
    for ring_bytes, exposed in ((6.0, 0), (12.0, 12 * 4 - 32)):
        parts = parts_of("zigzag", replace(TINY, ring_bytes=ring_bytes))
        assert parts["attention"] == 32 * 10**9
        assert parts[EXPOSED] == exposed * 10**9


def test_ranks_of_a_group_wait_for_the_last_of_them():
    """Free: rank 0's own sequence of the first micro-batch holds up rank 1 in the second."""
    plan = plan_of_groups((8, 4), [group(0, 1, 0)], [group(0, 2, 1)])
    timeline = timeline_of(plan, PAIR, TINY, sync="free")
    (wait,) = [e for e in timeline.events if e.kind == "wait" and e.group == 0]
    assert (wait.rank, wait.start, wait.stop) == (1, 0, 64 * 10**9 + 8)
    assert timeline.starts == (0, 0)


def test_memory_is_that_of_the_micro_batch_at_hand():
    plan = plan_of_groups((8, 6), [group(0, 2, 0), group(2, 3, 1)])
    timeline = timeline_of(plan, NODE, TINY)
    held = [[m.bytes for m in timeline.memory if m.rank == rank] for rank in range(4)]
    assert held == [[104, 100], [104, 100], [106, 100], [100, 100]]
    assert timeline.peak_bytes == 106


def test_what_cannot_be_priced_is_refused():
    plan = plan_of_groups((16,), [group(0, 4, 0, strategy="zigzag")])
    with pytest.raises(ValueError, match="no ring_bytes"):
        timeline_of(plan, NODE, FLEXSP)
    with pytest.raises(ValueError, match="must be lockstep or free, got 'sometimes'"):
        timeline_of(plan, NODE, FLEXSP, sync="sometimes")


@pytest.mark.parametrize("sync", ["lockstep", "free"])
def test_a_timeline_shows_what_micro_batches_choose_for_activations(sync):
    cost = analytic_cost_model(SMALL, DEVICES["H100"], NODE, checkpointing=False)
    plan = plan_of_groups((9000, 2000), [group(0, 2, 0)], [group(0, 1, 1)])
    first, second = plan.micro_batches
    again = MemoryChoice(recomputed_layers=4, outputs_recomputed=4)
    plan = replace(plan, micro_batches=(replace(first, memory=again), second))
    timeline = timeline_of(plan, NODE, cost, sync=sync)
    assert timeline.stop == step_ns(cost, plan.micro_batches, plan.lengths, NODE, sync=sync)
    labels = {event.label for event in timeline.events if event.kind == "constant"}
    assert labels == {"per micro-batch", f"per micro-batch: {again}"}
