"""The default planner against the optimum of few sequences, and the lower bound below both."""

import random
from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.lower_bound import step_bound_ns
from hf_flexseq.planner.make import loosest_task, make_plan
from hf_flexseq.planner.task import PlanTask
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


def test_the_bound_by_hand():
    """Two sequences on two ranks of one node; the long one needs both."""
    node = Topology(nodes=1, ranks_per_node=2)
    cost = replace(FLEXSP, micro_batch_s=1.0)

    def bound(cap: int, sync: str) -> int:
        task = PlanTask(lengths=(100, 3000), topology=node, cost=cost, cap=cap, sync=sync)
        return step_bound_ns(task)

    short, long = (cost.sequence_ns(s, 1, "local", False) for s in (100, 3000))
    areas = short + 2 * cost.sequence_ns(3000, 2, "ulysses", False)
    assert bound(1500, "lockstep") == -(-areas // 2) + 2 * 10**9
    assert bound(1500, "free") == -(-(areas + 3 * 10**9) // 2)
    assert bound(3000, "free") == -(-(short + long) // 2) + 10**9
