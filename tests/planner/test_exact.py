"""The two exhaustive searches against each other, and the default planner against the quicker
one."""

import random
from dataclasses import replace
from itertools import product

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from planner.brute import best_lockstep_ns, best_of_one_micro_batch_ns
from planner.exact import least_lockstep_ns
from tests.budget import for_seeds

MODEL = replace(PRESETS["flexsp-gpt-7b-a100"], micro_batch_s=0.05)


@for_seeds(30)
def test_the_two_searches_agree(seed: int) -> None:
    rng = random.Random(seed)
    topology = rng.choice(
        [Topology(nodes=n, ranks_per_node=r) for n, r in ((1, 2), (1, 3), (1, 4), (2, 2), (2, 1))]
    )
    world = topology.world_size
    lengths = [int(2 ** rng.uniform(8, 15)) for _ in range(rng.randint(1, 5 if world < 4 else 4))]
    roomy = sum(lengths)
    exact = best_lockstep_ns(lengths, topology, MODEL, cap=roomy, batches=2)
    assert least_lockstep_ns(lengths, topology, MODEL, cap=roomy) == exact
    tight = int(max(max(lengths) / world + 1, sum(lengths) / world / rng.choice([0.6, 0.9])))
    exact = best_lockstep_ns(lengths, topology, MODEL, cap=tight, batches=3)
    assert least_lockstep_ns(lengths, topology, MODEL, cap=tight) <= exact


def test_the_default_planner_is_within_1_percent_of_the_optimum_of_few_sequences() -> None:
    over = []
    for seed in range(40):
        rng = random.Random(seed)
        topology = Topology(nodes=1, ranks_per_node=rng.randint(2, 8))
        lengths = [int(2 ** rng.uniform(8, 15)) for _ in range(rng.randint(1, 8))]
        model = replace(MODEL, group_s=rng.choice((0.0, 0.02)))
        plan = make_plan(lengths, topology, model, PlanOptions(max_tokens_per_rank=sum(lengths)))
        least = least_lockstep_ns(lengths, topology, model, cap=sum(lengths)) / 1e9
        assert least <= plan.objective_s
        over.append(plan.objective_s / least)
    assert sum(over) / len(over) <= 1.01
    assert max(over) <= 1.05


@pytest.mark.parametrize("fill", [0.6, 0.9, 1.8, 2.7])
@pytest.mark.parametrize("seed", range(5))
def test_the_default_planner_is_close_where_memory_is_tight(fill: float, seed: int) -> None:
    rng = random.Random(seed)
    topology = Topology(nodes=rng.choice((1, 2)), ranks_per_node=rng.randint(1, 4))
    lengths = [int(2 ** rng.uniform(8, 15)) for _ in range(rng.randint(4, 8))]
    cap = int(
        max(max(lengths) / topology.world_size + 1, sum(lengths) / topology.world_size / fill)
    )
    plan = make_plan(lengths, topology, MODEL, PlanOptions(max_tokens_per_rank=cap))
    least = least_lockstep_ns(lengths, topology, MODEL, cap=cap) / 1e9
    assert least <= plan.objective_s <= 1.03 * least


def test_launches_are_shared_by_good_groups() -> None:
    """Three sequences on three H200: every group of every strategy, priced whole."""
    node = Topology(nodes=1, ranks_per_node=3)
    over = []
    for overlap, typical in product((1.0, 0.5, 0.0), (7, 8, 9)):
        model = replace(PRESETS["llama-3.1-8b-h200"], micro_batch_s=10.0, host_overlap=overlap)
        rng = random.Random(typical)
        for _ in range(2):
            lengths = [200 + int(rng.lognormvariate(typical, 1.2)) for _ in range(3)]
            plan = make_plan(lengths, node, model, PlanOptions(max_tokens_per_rank=10**6))
            best = best_of_one_micro_batch_ns(lengths, node, model)
            work = round(plan.objective_s * 1e9) - model.micro_batch_ns
            over.append(work / (best - model.micro_batch_ns))
    assert min(over) >= 1
    assert sum(over) / len(over) <= 1.01
    assert max(over) <= 1.07
