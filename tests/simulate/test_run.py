"""The simulator against the closed form where they must agree, and against arithmetic where they
must not."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flexseq.cost import CostModel, rank_ns, step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Group, MicroBatch, Plan, widest_first
from hf_flexseq.plan_options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.simulate import CLOSED_FORM, Detail, simulate
from hf_flexseq.simulate.ring import RingTraffic, ring_steps, ring_times
from hf_flexseq.simulate.work import spread
from hf_flexseq.timeline import MAIN_KINDS, Timeline
from hf_flexseq.topology import Topology
from plans import random_plan
from tests.budget import examples

# With launches that short sequences do not hide, and with a part that nothing hides.
FLEXSP = dataclasses.replace(
    PRESETS["flexsp-gpt-7b-a100"], group_s=0.04, launch_s=0.01, post_s=0.05, host_overlap=0.75
)
NODE = Topology(nodes=1, ranks_per_node=4)


def ring_model(**changes: object) -> CostModel:
    """A tiny model: 1 s per squared token, 1 ns per token and 1 byte/s, so that times can be
    counted by hand."""
    constants = {
        "name": "ring", "attention_s": 1.0, "linear_s": 1e-9, "micro_batch_s": 0.0, "group_s": 0.0,
        "all_to_all_bytes": 0.0, "ring_bytes": 0.0, "query_bytes": 0.0, "ring_overlap": 1.0,
        "bandwidths": [[64, 1.0]], "heads": None, "token_bytes": 1.0, "state_bytes": 100.0,
        "sharded_state_bytes": 0.0, "budget_bytes": 1e9,
    }  # fmt: skip
    return CostModel.from_record(constants | changes)


def plan_of(
    lengths: tuple[int, ...], *micro_batches: list[tuple[int, int, tuple[int, ...]]], strategy: str
) -> Plan:
    """Micro-batches as lists of (first rank, past the last rank, sequences)."""
    made = tuple(
        MicroBatch(
            groups=widest_first(
                [
                    Group(
                        ranks=tuple(range(start, stop)),
                        sequences=ids,
                        strategy="local" if stop - start == 1 else strategy,
                    )
                    for start, stop, ids in groups
                ]
            )
        )
        for groups in micro_batches
    )
    return Plan(
        lengths=lengths,
        micro_batches=made,
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="hand",
        planning_s=0.0,
    )


def check_timeline(timeline: Timeline) -> None:
    """Every rank's main lane fills the step without a gap, and the shares of its kinds add up to
    one."""
    for rank in range(timeline.world_size):
        main = [e for e in timeline.events if e.rank == rank and e.kind != "overlapped"]
        assert [e.start for e in main] == [0, *(e.stop for e in main[:-1])]
        assert not timeline.stop or main[-1].stop == timeline.stop
        assert all(e.stop > e.start for e in main)
    assert not timeline.stop or sum(map(timeline.share, MAIN_KINDS)) == pytest.approx(1)


@settings(deadline=None, max_examples=examples(60))
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    world=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    sync=st.sampled_from(["lockstep", "free"]),
)
def test_whole_groups_without_overlap_are_the_closed_form(
    lengths: list[int], world: int, seed: int, sync: str
) -> None:
    plan, topology = (
        random_plan(lengths, world, random.Random(seed)),
        Topology(nodes=1, ranks_per_node=world),
    )
    groups = [g for mb in plan.micro_batches for g in mb.groups]
    if all(g.strategy in ("local", "ulysses") for g in groups):
        timeline = simulate(plan, topology, FLEXSP, sync=sync, detail=CLOSED_FORM)
        expected = step_ns(FLEXSP, plan.micro_batches, plan.lengths, topology, sync=sync)
        assert timeline.stop == expected
        check_timeline(timeline)


@settings(deadline=None, max_examples=examples(60))
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    degree=st.sampled_from([1, 2, 4, 8]),
    layers=st.integers(0, 5),
    sync=st.sampled_from(["lockstep", "free"]),
)
def test_disjoint_groups_are_the_closed_form_however_many_layers(
    lengths: list[int], degree: int, layers: int, sync: str
) -> None:
    topology = Topology(nodes=2, ranks_per_node=4)
    plan = make_plan(
        lengths,
        topology,
        FLEXSP,
        PlanOptions(planner="static", sp_degree=degree, max_tokens_per_rank=20_000),
    )
    timeline = simulate(plan, topology, FLEXSP, sync=sync, detail=Detail(layers=layers))
    assert timeline.stop == step_ns(FLEXSP, plan.micro_batches, plan.lengths, topology, sync=sync)
    check_timeline(timeline)


@settings(deadline=None, max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=10),
    world=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    layers=st.integers(0, 3),
)
def test_any_plan_has_a_gapless_timeline_no_shorter_than_its_work(
    lengths: list[int], world: int, seed: int, layers: int
) -> None:
    plan, topology = (
        random_plan(lengths, world, random.Random(seed)),
        Topology(nodes=1, ranks_per_node=world),
    )
    cost = ring_model(
        attention_s=1e-9,
        ring_bytes=7.0,
        query_bytes=1.2,
        all_to_all_bytes=3.0,
        bandwidths=[[64, 1e9]],
    )
    for sync in ("lockstep", "free"):
        timeline = simulate(plan, topology, cost, sync=sync, detail=Detail(layers=layers))
        check_timeline(timeline)
        without_moving = ring_model(attention_s=1e-9, all_to_all_bytes=3.0, bandwidths=[[64, 1e9]])
        work = [
            rank_ns(without_moving, mb.groups, plan.lengths, topology) for mb in plan.micro_batches
        ]
        busiest = max(map(sum, zip(*work, strict=True)))
        # its early ranks do less
        if all(g.strategy != "balanced" for mb in plan.micro_batches for g in mb.groups):
            # the closed form rounds every sequence
            assert timeline.stop >= busiest - 20 * len(lengths)


def test_ranks_in_several_groups_wait_in_every_layer() -> None:
    """Rank 0's own sequence holds up rank 1 in each of their shared group's layers, not only at
    the end."""
    plan = plan_of((8, 4), [(0, 2, (0,)), (0, 1, (1,))], strategy="ulysses")
    timeline = simulate(
        plan,
        Topology(nodes=1, ranks_per_node=2),
        ring_model(),
        sync="free",
        detail=Detail(layers=2),
    )
    waits = [e for e in timeline.events if e.rank == 1 and e.kind == "wait" and e.group == 0]
    assert len(waits) >= 3


def test_a_ring_hides_its_transfers_behind_its_attention() -> None:
    """16 tokens on 4 ranks: 64 s of attention each, 16 s a step, and 2 tokens' keys and values per
    chunk."""
    plan = plan_of((16,), [(0, 4, (0,))], strategy="zigzag")

    def seconds(detail: Detail, ring_bytes: float) -> float:
        return simulate(plan, NODE, ring_model(ring_bytes=ring_bytes), detail=detail).stop / 1e9

    once = Detail(layers=0)
    assert seconds(once, 0.0) == pytest.approx(64, abs=1e-6)
    assert seconds(once, 4.0) == pytest.approx(64, abs=1e-6)  # 8 or 16 s a step
    assert 64 < seconds(once, 6.0) <= 16 + 3 * 24 + 1e-6  # 12 or 24 s a step
    serial = Detail(layers=0, overlap=False)
    assert seconds(serial, 4.0) == pytest.approx(64 + 16 + 16 + 16, abs=1e-6)


def test_a_ring_waits_for_its_launches_as_in_the_closed_form() -> None:
    """Four ranks launch 35 s. 8 tokens' attention of 16 s hides a part of them, 64 s all."""
    node = Topology(nodes=1, ranks_per_node=4)
    for length, launched in ((8, 35 - 16), (16, 0)):
        plan = plan_of((length,), [(0, 4, (0,))], strategy="zigzag")
        for layers in (0, 3):
            stop = [
                simulate(plan, node, ring_model(launch_s=launch_s), detail=Detail(layers=layers))
                for launch_s in (0.0, 1.0)
            ]
            assert (stop[1].stop - stop[0].stop) / 1e9 == pytest.approx(launched, abs=1e-6)


def test_returning_gradients_share_the_link_with_what_is_fetched() -> None:
    plan = plan_of((16,), [(0, 4, (0,))], strategy="zigzag")
    costly = ring_model(ring_bytes=24.0)
    alone, shared = (
        simulate(plan, NODE, costly, detail=Detail(contention=c)).stop for c in (False, True)
    )
    assert shared > alone


def test_a_ring_across_nodes_pays_the_slow_link_only_where_it_crosses() -> None:
    plan = plan_of((16,), [(0, 4, (0,))], strategy="zigzag")
    cost = ring_model(ring_bytes=12.0, bandwidths=[[2, 10.0], [4, 10.0], [16, 1.0]])
    one = simulate(plan, NODE, cost, detail=Detail(layers=0))
    two = simulate(plan, Topology(nodes=2, ranks_per_node=2), cost, detail=Detail(layers=0))
    assert two.stop > one.stop
    assert {e.label for e in two.events if e.kind == "overlapped"} == {"ring, between nodes"}


def test_ring_steps_by_hand() -> None:
    """Two ranks, 10 ns of attention; the second is 3 ns late. Keys and values travel 8 ns from
    when both are there."""
    moving = RingTraffic(fetch=np.array([[0, 0], [8, 8]]), back=np.zeros((2, 2), dtype=np.int64))
    times = ring_times(
        np.array([0, 3]), 10, ring_steps("zigzag", 2), moving, overlap=1.0, contention=True
    )
    assert times.depart[1].tolist() == [3, 3]
    assert times.arrive[1].tolist() == [11, 11]
    assert times.begin.tolist() == [[0, 3], [11, 11]]
    assert times.stop.tolist() == [16, 16]


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_all_ranks_of_a_zigzag_compute_the_same_and_half_the_square(degree: int) -> None:
    work = ring_steps("zigzag", degree).work
    # half squares; the causal half of (2 degree)^2 has as many
    assert set(work.sum(axis=0).tolist()) == {4 * degree}
    assert work.sum() == (2 * degree) ** 2


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_balanced_takes_its_critical_path_and_waits_for_its_helpers(degree: int) -> None:
    plan = plan_of((24,), [(0, degree, (0,))], strategy="balanced")
    topology = Topology(nodes=1, ranks_per_node=degree)
    free = simulate(plan, topology, ring_model(), detail=Detail(layers=2))
    stretch = 1.0 if degree % 2 else (degree + 1) / degree
    assert free.stop / 1e9 == pytest.approx(24**2 / degree * stretch, rel=1e-6)
    slow = simulate(plan, topology, ring_model(ring_bytes=300.0), detail=Detail(layers=2))
    assert slow.stop > free.stop


@pytest.mark.parametrize(
    "strategy, label",
    [
        ("hybrid", "all-to-all, within a node"),
        ("ulysses", "all-to-all, between nodes"),
    ],
)
def test_a_group_without_a_ring_is_its_closed_form(strategy: str, label: str) -> None:
    plan, topology = (
        plan_of((24, 7), [(0, 4, (0, 1))], strategy=strategy),
        Topology(nodes=2, ranks_per_node=2),
    )
    cost = ring_model(
        ring_bytes=30.0, all_to_all_bytes=30.0, all_to_all_overlap=0.8, piece_rows=9.0
    )
    for layers in (0, 3):
        timeline = simulate(plan, topology, cost, detail=Detail(layers=layers))
        assert timeline.stop == step_ns(
            cost, plan.micro_batches, plan.lengths, topology, sync="lockstep"
        )
        check_timeline(timeline)
    assert label in {e.label for e in timeline.events}


def test_memory_rises_in_the_forward_and_falls_in_the_backward() -> None:
    plan = plan_of((8, 6), [(0, 2, (0,)), (2, 3, (1,))], strategy="ulysses")
    timeline = simulate(plan, NODE, ring_model(), detail=Detail(layers=2))
    held = [[m.bytes for m in timeline.memory if m.rank == rank] for rank in range(4)]
    assert held[0] == [102, 104, 102, 100, 100]
    assert held[2] == [103, 106, 103, 100, 100]
    assert held[3] == [100] * 5
    assert timeline.peak_bytes == 106


def test_peak_memory_is_the_closed_forms() -> None:
    topology, lengths = Topology(nodes=2, ranks_per_node=4), [30_000, 7000, 5000, 3000, 100, 90]
    plan = make_plan(lengths, topology, FLEXSP, PlanOptions(max_tokens_per_rank=6000))
    fullest = max(max(mb.tokens_per_rank(plan.lengths, 8)) for mb in plan.micro_batches)
    expected = FLEXSP.token_bytes * fullest + FLEXSP.state_bytes + FLEXSP.sharded_state_bytes / 8
    assert simulate(plan, topology, FLEXSP).peak_bytes == pytest.approx(expected, rel=1e-9)


def test_shares_of_a_hand_made_step() -> None:
    """Rank 0 computes 100 s and rank 1 half of that, in lockstep."""
    plan = plan_of((10, 5), [(0, 1, (0,)), (1, 2, (1,))], strategy="ulysses")
    timeline = simulate(plan, Topology(nodes=1, ranks_per_node=2), ring_model(), detail=Detail())
    assert timeline.share("compute") == pytest.approx(125 / 200, rel=1e-6)
    assert timeline.share("wait") == pytest.approx(75 / 200, rel=1e-6)
    assert timeline.starts == (0,)


def test_an_empty_plan_takes_no_time() -> None:
    timeline = simulate(plan_of((), strategy="ulysses"), NODE, FLEXSP)
    assert timeline.stop == 0
    assert timeline.share("wait") == 0.0


@given(st.integers(0, 10**12), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_spread_keeps_the_total(total: int, sizes: list[int]) -> None:
    parts = spread(total, sizes)
    assert sum(parts) == total
    assert all(
        abs(part * sum(sizes) - total * size) <= sum(sizes)
        for part, size in zip(parts, sizes, strict=True)
    )


def test_refuses_what_it_cannot_price() -> None:
    plan = plan_of((16,), [(0, 4, (0,))], strategy="zigzag")
    with pytest.raises(ValueError, match="no ring_bytes"):
        simulate(plan, NODE, FLEXSP)
    with pytest.raises(ValueError, match="neither lockstep nor free"):
        simulate(plan, NODE, FLEXSP, sync="sometimes")
    with pytest.raises(ValueError, match="layers=-1"):
        Detail(layers=-1)


def test_64_ranks_and_512_sequences_take_well_under_a_second() -> None:
    topology = Topology(nodes=8, ranks_per_node=8)
    rng = random.Random(0)
    lengths = [min(200_000, 1 + int(rng.lognormvariate(6.9, 1.5))) for _ in range(512)]
    plan = make_plan(lengths, topology, FLEXSP)
    timeline = simulate(plan, topology, FLEXSP)
    closed = step_ns(FLEXSP, plan.micro_batches, plan.lengths, topology, sync="lockstep")
    assert closed <= timeline.stop < 1.05 * closed
