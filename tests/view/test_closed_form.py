"""Timelines of plans end when the closed form says, and have no gaps."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Group, MicroBatch, Plan, widest_first
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.view import timeline_of
from hf_flexseq.view.closed_form import EXPOSED, group_parts, most_events
from hf_flexseq.view.timeline import KINDS, Timeline
from plans import random_plan
from tests.budget import examples

# With launches that short sequences do not hide, and with a part that nothing hides.
FLEXSP = dataclasses.replace(
    PRESETS["flexsp-gpt-7b-a100"], group_s=0.04, launch_s=0.01, post_s=0.05, host_overlap=0.75
)
NODE = Topology(nodes=1, ranks_per_node=4)


def tiny_model(**changes: object) -> CostModel:
    """1 s per squared token, 1 ns per token and 1 byte/s, so that times can be counted by hand."""
    constants = {
        "name": "tiny", "attention_s": 1.0, "linear_s": 1e-9, "micro_batch_s": 0.0, "group_s": 0.0,
        "all_to_all_bytes": 0.0, "ring_bytes": 0.0, "query_bytes": 0.0, "ring_overlap": 1.0,
        "bandwidths": [[64, 1.0]], "heads": None, "token_bytes": 1.0, "state_bytes": 100.0,
        "sharded_state_bytes": 0.0, "budget_bytes": 1e9,
    }  # fmt: skip
    return CostModel.from_record(constants | changes)


def plan_of(
    lengths: tuple[int, ...], *micro_batches: list[tuple[int, int, tuple[int, ...]]], strategy: str
) -> Plan:
    """Micro-batches as lists of (first rank, past the last rank, sequences)."""
    made = []
    for groups in micro_batches:
        members = []
        for start, stop, sequences in groups:
            of_group = "local" if stop - start == 1 else strategy
            members.append(
                Group(ranks=tuple(range(start, stop)), sequences=sequences, strategy=of_group)
            )
        made.append(MicroBatch(groups=widest_first(members)))
    return Plan(
        lengths=lengths,
        micro_batches=tuple(made),
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="hand",
        planning_s=0.0,
    )


def check_timeline(timeline: Timeline) -> None:
    """Every rank's events fill the step without a gap, and the shares of all kinds add up to
    one."""
    for rank in range(timeline.world_size):
        events = [event for event in timeline.events if event.rank == rank]
        assert [e.start for e in events] == [0, *(e.stop for e in events[:-1])]
        assert not timeline.stop or events[-1].stop == timeline.stop
        assert all(e.stop > e.start for e in events)
    assert not timeline.stop or sum(map(timeline.share, KINDS)) == pytest.approx(1)


@settings(deadline=None, max_examples=examples(100))
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    nodes=st.integers(1, 2),
    seed=st.integers(0, 10**6),
    sync=st.sampled_from(["lockstep", "free"]),
    preset=st.sampled_from(["gemma-3-27b-h100", "qwen3.5-35b-a3b-h100", "llama-3.1-8b-h200"]),
)
def test_the_timeline_of_any_plan_ends_with_its_closed_form(
    lengths: list[int], nodes: int, seed: int, sync: str, preset: str
) -> None:
    topology = Topology(nodes=nodes, ranks_per_node=4)
    plan = random_plan(lengths, topology.world_size, random.Random(seed), nodes=nodes)
    cost = PRESETS[preset]
    timeline = timeline_of(plan, topology, cost, sync=sync)
    expected = step_ns(cost, plan.micro_batches, plan.lengths, topology, sync=sync)
    assert timeline.stop == expected
    check_timeline(timeline)
    assert len(timeline.events) <= most_events(plan, topology.world_size)
    assert max(event.stop for event in timeline.events) == timeline.stop


def test_the_parts_of_a_group_by_hand() -> None:
    """8 tokens on 2 ranks: 32 s of attention each, 24 bytes moved by each of them at 1 byte/s."""
    plan = plan_of((8,), [(0, 2, (0,))], strategy="ulysses")
    (group,) = plan.micro_batches[0].groups
    cost = tiny_model(all_to_all_bytes=6.0)
    parts = group_parts(group, plan.lengths, NODE, cost)
    assert parts == {
        "linear layers": 4,
        "recurrent layers": 0,
        "attention": 32 * 10**9,
        EXPOSED: 24 * 10**9,
    }


def test_a_ring_s_transfers_are_exposed_as_far_as_they_last_longer_than_attention() -> None:
    """8 tokens on 2 ranks: 16 s of attention for each, 4 tokens' keys and values moved."""
    plan = plan_of((8,), [(0, 2, (0,))], strategy="zigzag")
    (group,) = plan.micro_batches[0].groups
    for ring_bytes, exposed in ((6.0, 0), (12.0, 12 * 4 - 32)):
        parts = group_parts(group, plan.lengths, NODE, tiny_model(ring_bytes=ring_bytes))
        assert parts["attention"] == 32 * 10**9
        assert parts[EXPOSED] == exposed * 10**9


def test_recurrent_layers_and_windows_have_parts_of_their_own() -> None:
    topology = Topology(nodes=2, ranks_per_node=4)
    plan = plan_of((60_000, 1_000), [(0, 8, (0, 1))], strategy="ulysses")
    (group,) = plan.micro_batches[0].groups
    recurrent = group_parts(group, plan.lengths, topology, PRESETS["qwen3.5-35b-a3b-h100"])
    assert min(recurrent.values()) > 0
    windows = PRESETS["gemma-3-27b-h100"]
    near = group_parts(group, plan.lengths, topology, windows)
    full = group_parts(group, plan.lengths, topology, dataclasses.replace(windows, kinds=()))
    assert near["recurrent layers"] == 0
    assert near["attention"] > full["attention"]


def test_ranks_of_a_group_wait_for_the_last_of_them() -> None:
    """Free: rank 0's own sequence of the first micro-batch holds up rank 1 in the second."""
    plan = plan_of((8, 4), [(0, 1, (0,))], [(0, 2, (1,))], strategy="ulysses")
    timeline = timeline_of(plan, Topology(nodes=1, ranks_per_node=2), tiny_model(), sync="free")
    (wait,) = [e for e in timeline.events if e.kind == "wait" and e.group == 0]
    assert (wait.rank, wait.start, wait.stop) == (1, 0, 64 * 10**9 + 8)
    assert timeline.starts == (0, 0)


def test_memory_is_that_of_the_micro_batch_at_hand() -> None:
    plan = plan_of((8, 6), [(0, 2, (0,)), (2, 3, (1,))], strategy="ulysses")
    timeline = timeline_of(plan, NODE, tiny_model())
    held = [[m.bytes for m in timeline.memory if m.rank == rank] for rank in range(4)]
    assert held == [[104, 100], [104, 100], [106, 100], [100, 100]]
    assert timeline.peak_bytes == 106


def test_peak_memory_is_the_closed_forms() -> None:
    topology, lengths = Topology(nodes=2, ranks_per_node=4), [30_000, 7000, 5000, 3000, 100, 90]
    plan = make_plan(lengths, topology, FLEXSP, PlanOptions(max_tokens_per_rank=6000))
    fullest = max(max(mb.tokens_per_rank(plan.lengths, 8)) for mb in plan.micro_batches)
    expected = FLEXSP.token_bytes * fullest + FLEXSP.state_bytes + FLEXSP.sharded_state_bytes / 8
    assert timeline_of(plan, topology, FLEXSP).peak_bytes == pytest.approx(expected, rel=1e-9)


def test_shares_of_a_hand_made_step() -> None:
    """Rank 0 computes 100 s and rank 1 a quarter of that, in lockstep."""
    plan = plan_of((10, 5), [(0, 1, (0,)), (1, 2, (1,))], strategy="ulysses")
    timeline = timeline_of(plan, Topology(nodes=1, ranks_per_node=2), tiny_model())
    assert timeline.share("compute") == pytest.approx(125 / 200, rel=1e-6)
    assert timeline.share("wait") == pytest.approx(75 / 200, rel=1e-6)
    assert timeline.starts == (0,)


def test_an_empty_plan_takes_no_time() -> None:
    timeline = timeline_of(plan_of((), strategy="ulysses"), NODE, FLEXSP)
    assert timeline.stop == 0
    assert timeline.share("wait") == 0.0


def test_refuses_what_it_cannot_price() -> None:
    plan = plan_of((16,), [(0, 4, (0,))], strategy="zigzag")
    with pytest.raises(ValueError, match="no ring_bytes"):
        timeline_of(plan, NODE, FLEXSP)
    with pytest.raises(ValueError, match="must be lockstep or free, got 'sometimes'"):
        timeline_of(plan, NODE, FLEXSP, sync="sometimes")
