"""The default planner against the optimum of few sequences, and the lower bound below both."""

import random
from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.lower_bound import bound_ns
from hf_flexseq.planner.make import loosest_task, make_plan
from tests.budget import examples
from tests.planner.exact import least_lockstep_ns
from tests.plans import planned

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
MODEL = replace(FLEXSP, micro_batch_s=0.05)
WITH_LATENCY = replace(MODEL, group_s=0.02, overlap=0.0)
# Its launches are not hidden, so that they can be counted with the latency.
WITH_LAUNCHES = replace(PRESETS["llama-3.1-8b-h200"], micro_batch_s=0.05, overlap=0.0)


def drawn_lengths(rng: random.Random, fewest: int, most: int) -> list[int]:
    return [int(2 ** rng.uniform(8, 15)) for _ in range(rng.randint(fewest, most))]


def cap_of(lengths: list[int], world: int, fill: float) -> int:
    """Tokens of a rank, so that all ranks are `fill` full in one micro-batch."""
    return int(max(max(lengths) / world + 1, sum(lengths) / world / fill))


@pytest.mark.parametrize(
    "model, mean", [(MODEL, 1.005), (WITH_LATENCY, 1.01), (WITH_LAUNCHES, 1.025)]
)
def test_plans_of_few_sequences_are_close_to_the_optimum(model, mean):
    over = []
    for seed in range(20):
        rng = random.Random(seed)
        topology = Topology(nodes=1, ranks_per_node=rng.randint(2, 8))
        lengths = drawn_lengths(rng, 1, 8)
        plan = planned(lengths, topology, model, max_tokens_per_rank=sum(lengths))
        least = least_lockstep_ns(lengths, topology, model, cap=sum(lengths)) / 1e9
        assert plan.lower_bound_s <= least <= plan.objective_s
        over.append(plan.objective_s / least)
    assert sum(over) / len(over) <= mean
    assert max(over) <= 1.05


@pytest.mark.parametrize("fill", [0.6, 0.9, 1.8, 2.7])
def test_plans_are_close_to_the_optimum_where_memory_is_tight(fill):
    for seed in range(examples(5)):
        rng = random.Random(seed)
        topology = Topology(nodes=rng.choice((1, 2)), ranks_per_node=rng.randint(1, 4))
        lengths = drawn_lengths(rng, 4, 8)
        cap = cap_of(lengths, topology.world_size, fill)
        plan = planned(lengths, topology, MODEL, max_tokens_per_rank=cap)
        least = least_lockstep_ns(lengths, topology, MODEL, cap=cap) / 1e9
        assert plan.lower_bound_s <= least <= plan.objective_s <= 1.03 * least


# ---- bounds


@pytest.mark.parametrize("fill", [None, 0.6, 0.9, 1.8, 2.7])
def test_the_tight_bound_is_between_the_loose_one_and_the_optimum(fill):
    """Also if the known plan is far from the optimum."""
    tight_bound = pytest.importorskip("hf_flexseq.planner.tight_bound")
    closer = 0
    for seed in range(examples(8)):
        rng = random.Random(seed)
        # of four ranks the slow twin would put three into a group, which no plan may
        topology = Topology(nodes=rng.choice((1, 2)), ranks_per_node=rng.randint(1, 3))
        lengths = drawn_lengths(rng, 4, 8)
        cap = sum(lengths) if fill is None else cap_of(lengths, topology.world_size, fill)
        options = PlanOptions(max_tokens_per_rank=cap)
        plan = make_plan(lengths, topology, WITH_LATENCY, options)
        task = loosest_task(lengths, topology, WITH_LATENCY, options)
        found = tight_bound.tight_bound_ns(task, round(1.5e9 * plan.objective_s))[0] / 1e9
        assert plan.lower_bound_s <= found <= plan.objective_s
        if fill is None:  # elsewhere the slow twin is a bound, too
            assert found <= least_lockstep_ns(lengths, topology, WITH_LATENCY, cap=cap) / 1e9
        closer += found > 1.01 * plan.lower_bound_s
    assert closer >= examples(8) / 4


def test_the_tight_bound_is_close_to_plans_of_long_tailed_lengths():
    """The loose bound spreads the longest sequence over ranks that it cannot use."""
    tight_bound = pytest.importorskip("hf_flexseq.planner.tight_bound")
    rng = random.Random(0)
    topology = Topology(nodes=8, ranks_per_node=8)
    lengths = [60_000, *(min(int(rng.lognormvariate(6.9, 1.7)), 40_000) for _ in range(64))]
    options = PlanOptions(max_tokens_per_rank=12_000)
    plan = make_plan(lengths, topology, FLEXSP, options)
    task = loosest_task(lengths, topology, FLEXSP, options)
    found, solved = tight_bound.tight_bound_ns(task, round(1e9 * plan.objective_s))
    assert solved
    assert 1.15 * plan.lower_bound_s < found / 1e9 <= plan.objective_s < 1.03 * found / 1e9


def test_the_tight_bound_by_hand():
    tight_bound = pytest.importorskip("hf_flexseq.planner.tight_bound")

    def bound(lengths, ranks, strategy="auto"):
        topology = Topology(nodes=1, ranks_per_node=ranks)
        options = PlanOptions(max_tokens_per_rank=4000, strategy=strategy)
        task = loosest_task(lengths, topology, MODEL, options)
        return tight_bound.tight_bound_ns(task, 10**10)[0] - MODEL.micro_batch_ns

    # One that needs both ranks, and one that runs before or after it on one of them or on both.
    wide = MODEL.sequence_ns(6000, 2, "ulysses", False)
    other = min(
        MODEL.sequence_ns(1000, degree, name, False)
        for degree, name in ((1, "local"), (2, "ulysses"))
    )
    assert bound([6000, 1000], 2) == pytest.approx(wide + other, rel=1e-4)
    # The longest alone, and two ranks with two each that wait for it.
    longest = MODEL.sequence_ns(4000, 1, "local", False)
    assert longest > 2.2 * MODEL.sequence_ns(1900, 1, "local", False)
    assert bound([4000] + 4 * [1900], 3, "local") == pytest.approx(longest, rel=1e-4)


def test_the_bound_by_hand():
    """Two sequences on two ranks of one node; the long one needs both."""
    node = Topology(nodes=1, ranks_per_node=2)
    cost = replace(FLEXSP, micro_batch_s=1.0)
    lengths = np.array([100, 3000])

    def bound(cap: int, sync: str) -> int:
        return bound_ns(lengths, node, cost, strategy="auto", cap=cap, sync=sync)

    short, long = (cost.sequence_ns(s, 1, "local", False) for s in (100, 3000))
    areas = short + 2 * cost.sequence_ns(3000, 2, "ulysses", False)
    assert bound(1500, "lockstep") == -(-areas // 2) + 2 * 10**9
    assert bound(1500, "free") == -(-(areas + 3 * 10**9) // 2)
    assert bound(3000, "free") == -(-(short + long) // 2) + 10**9
