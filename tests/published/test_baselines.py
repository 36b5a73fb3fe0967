"""Zeppelin and the baselines: legal plans, their published rules, and what they refuse."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.trainer_pt_utils import BatchRebalanceSampler

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import PlanInfeasible, check
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.published.baselines.batch_rebalance import rebalanced
from tests.budget import examples
from tests.planner.small_model import rings

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
CLUSTER = Topology(nodes=8, ranks_per_node=8)
SHAPES = [(1, 1), (1, 3), (1, 6), (1, 8), (2, 2), (2, 6), (3, 4), (4, 8), (6, 8)]


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=40),
    st.sampled_from(SHAPES),
    st.sampled_from(["zeppelin", "megatron", "batch-ada", "batch-rebalance"]),
    st.sampled_from(["auto", "ulysses", "local"]),
    st.integers(0, 20_000),
)
def test_any_lengths_on_any_topology(
    lengths: list[int], shape: tuple[int, int], planner: str, strategy: str, spare: int
) -> None:
    topology = Topology(nodes=shape[0], ranks_per_node=shape[1])
    widest = 1 if strategy == "local" or planner == "batch-rebalance" else topology.world_size
    cap = -(-max(lengths) // widest) + spare
    cost = rings(topology)
    plan = make_plan(
        lengths,
        topology,
        cost,
        PlanOptions(planner=planner, strategy=strategy, max_tokens_per_rank=cap),
    )
    check(plan, topology, cap)
    assert plan.lower_bound_s <= plan.objective_s
    used = {g.strategy for mb in plan.micro_batches for g in mb.groups}
    assert strategy == "auto" or used <= {"local", strategy}


# ---- zeppelin


def zones(
    lengths: list[int], topology: Topology, cost: CostModel, cap: int
) -> dict[tuple[int, ...], tuple[int, str]]:
    """Return the (degree, strategy) of the group of each set of sequences, in one micro-batch."""
    plan = make_plan(
        lengths, topology, cost, PlanOptions(planner="zeppelin", max_tokens_per_rank=cap)
    )
    assert len(plan.micro_batches) == 1
    return {g.sequences: (g.degree, g.strategy) for g in plan.micro_batches[0].groups}


def test_zeppelin_makes_three_zones() -> None:
    """Plan a sequence above a node's memory, one above its share of a node's work, short ones."""
    topology = Topology(nodes=2, ranks_per_node=4)
    zone_of = zones([9000, 3000] + [100] * 12, topology, rings(topology), 2000)
    assert zone_of.pop((0,)) == (8, "zigzag")
    assert zone_of.pop((1,)) == (4, "zigzag")
    assert set(zone_of.values()) == {(1, "local")}


def test_zeppelin_uses_ulysses_where_no_ring_is_known() -> None:
    topology = Topology(nodes=1, ranks_per_node=2)
    assert zones([3000, 10], topology, FLEXSP, 2000)[(0,)] == (2, "ulysses")


@pytest.mark.parametrize("strategy", ["balanced", "ulysses"])
def test_zeppelin_uses_the_strategy_asked_for(strategy: str) -> None:
    topology = Topology(nodes=1, ranks_per_node=4)
    options = {"planner": "zeppelin", "strategy": strategy, "max_tokens_per_rank": 200}
    (micro_batch,) = make_plan(
        [600], topology, rings(topology), PlanOptions(**options)
    ).micro_batches
    assert [g.strategy for g in micro_batch.groups] == [strategy]


def test_zeppelin_levels_the_quadratic_work() -> None:
    rng = random.Random(2)
    topology = Topology(nodes=1, ranks_per_node=8)
    lengths = [int(rng.lognormvariate(7, 1)) + 1 for _ in range(200)]
    plan = make_plan(
        lengths,
        topology,
        FLEXSP,
        PlanOptions(planner="zeppelin", max_tokens_per_rank=2 * sum(lengths) // 8),
    )
    work = [
        sum(
            lengths[i] ** 2 / g.degree
            for g in plan.micro_batches[0].groups_of(rank)
            for i in g.sequences
        )
        for rank in range(8)
    ]
    assert max(work) <= 1.1 * sum(work) / 8


def test_zeppelin_splits_more_where_memory_is_full() -> None:
    topology = Topology(nodes=2, ranks_per_node=2)
    plan = make_plan(
        [600] * 6, topology, FLEXSP, PlanOptions(planner="zeppelin", max_tokens_per_rank=900)
    )
    assert len(plan.micro_batches) == 1
    assert max(plan.degrees()) > 1


@pytest.mark.parametrize("seed", range(5))
def test_zeppelin_cuts_long_tails_into_few_micro_batches(seed: int) -> None:
    rng = random.Random(seed)
    limit = 64 * 5951
    lengths = [min(limit, int(rng.lognormvariate(6.9, 1.75)) + 1) for _ in range(512)]
    plan = make_plan(
        lengths, Topology(nodes=8, ranks_per_node=8), FLEXSP, PlanOptions(planner="zeppelin")
    )
    assert len(plan.micro_batches) <= -(-sum(lengths) // limit) + 2


# ---- megatron


def degrees_of(
    lengths: list[int], topology: Topology, cap: int
) -> list[list[tuple[int, tuple[int, ...]]]]:
    plan = make_plan(
        lengths, topology, FLEXSP, PlanOptions(planner="megatron", max_tokens_per_rank=cap)
    )
    return [[(g.degree, g.sequences) for g in mb.groups] for mb in plan.micro_batches]


def test_megatron_packs_and_limits_the_work_by_the_longest() -> None:
    node = Topology(nodes=1, ranks_per_node=4)
    assert degrees_of([2500] * 8, node, 1536) == [[(2, (i,)), (2, (i + 1,))] for i in (0, 2, 4, 6)]
    # 4000 needs two ranks and sets the limit: the others share a rank below it, and grow over the
    # idle one, too.
    assert degrees_of([4000, 1000, 900], node, 2000) == [[(2, (0,)), (2, (1, 2))]]


def test_megatron_grows_groups_over_idle_ranks() -> None:
    assert degrees_of([1000, 900], Topology(nodes=1, ranks_per_node=4), 2000) == [
        [(2, (0,)), (2, (1,))]
    ]


# ---- the best degree per batch


def test_batch_ada_is_the_best_single_degree() -> None:
    rng = random.Random(0)
    for count in (10, 200):
        lengths = [min(100_000, int(rng.lognormvariate(7, 1.75)) + 1) for _ in range(count)]
        best = min(
            make_plan(
                lengths, CLUSTER, FLEXSP, PlanOptions(planner="static", sp_degree=d)
            ).objective_s
            for d in CLUSTER.degrees()
            if max(lengths) <= 5951 * d
        )
        assert (
            make_plan(lengths, CLUSTER, FLEXSP, PlanOptions(planner="batch-ada")).objective_s
            == best
        )


# ---- transformers' sampler


@pytest.mark.parametrize("seed", range(30))
def test_the_rebalancing_rule_is_transformers_own(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 5)
    batches = rng.randint(1, 4)
    count = rng.randint(ranks * batches, 60)
    lengths = [int(rng.lognormvariate(6, 1.2)) + 1 for _ in range(count)]
    sampler = BatchRebalanceSampler(lengths, count, ranks, batches, shuffle=False)
    order = sorted(range(count), key=lambda i: (-lengths[i], i))
    slices = rebalanced([lengths[i] for i in order], ranks, batches)
    theirs = sampler._assign(list(range(count)), lengths)  # [ranks][batches] ids
    for index, (start, stop) in enumerate(slices):
        batch, rank = divmod(index, ranks)
        assert theirs[rank][batch] == order[start:stop]


def test_batch_rebalance_never_splits() -> None:
    with pytest.raises(
        PlanInfeasible, match="sequence 1 has 6000 tokens: 6000 on each of 1 ranks"
    ):
        make_plan([5, 6000], CLUSTER, FLEXSP, PlanOptions(planner="batch-rebalance"))
    plan = make_plan([5, 5900], CLUSTER, FLEXSP, PlanOptions(planner="batch-rebalance"))
    assert plan.degrees() == {1: 2}


@pytest.mark.parametrize("planner", ["zeppelin", "megatron", "batch-ada", "batch-rebalance"])
def test_the_objective_is_the_closed_form(planner: str) -> None:
    rng = random.Random(1)
    lengths = [min(5000, int(rng.lognormvariate(7, 1.5)) + 1) for _ in range(300)]
    for sync in ("lockstep", "free"):
        plan = make_plan(lengths, CLUSTER, FLEXSP, PlanOptions(planner=planner, sync=sync))
        nanoseconds = step_ns(FLEXSP, plan.micro_batches, lengths, CLUSTER, sync=sync)
        assert plan.objective_s == nanoseconds / 1e9
