"""The lower bound: below every plan."""

import random
from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.bound import bound_ns
from planner.brute import best_lockstep_ns

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
SMALL = [Topology(nodes=n, ranks_per_node=r) for n, r in ((1, 2), (1, 3), (1, 4), (2, 2))]


def random_case(rng, topologies):
    """(lengths, topology, cost, cap) of a step: some long sequences, memory plenty or tight."""
    topology = rng.choice(topologies)
    world = topology.world_size
    cost = replace(
        FLEXSP,
        micro_batch_s=rng.choice([0.0, 0.05]),
        group_s=rng.choice([0.0, 0.01]),
        linear_s=FLEXSP.linear_s * rng.choice([0.01, 1.0, 20.0]),
        all_to_all_bytes=FLEXSP.all_to_all_bytes * rng.choice([1.0, 10.0, 40.0]),
    )
    lengths = [int(2 ** rng.uniform(8, 17)) for _ in range(rng.randint(1, 4 if world < 4 else 3))]
    fill = rng.choice([0.3, 0.6, 0.9, 1.8])
    cap = int(max(max(lengths) / world + 1, sum(lengths) / world / fill))
    return lengths, topology, cost, cap


def test_no_plan_beats_it():
    rng = random.Random(0)
    reached = 0
    for _ in range(50):
        lengths, topology, cost, cap = random_case(rng, SMALL)
        bound = bound_ns(
            np.array(lengths), topology, cost, strategy="auto", cap=cap, sync="lockstep"
        )
        exact = best_lockstep_ns(lengths, topology, cost, cap=cap, batches=2)
        assert bound <= exact
        reached += bound > 0.99 * exact
    assert reached > 5


@pytest.mark.parametrize("planner", ["auto", "zeppelin"])
def test_no_plan_of_many_ranks_beats_it(planner):
    rng = random.Random(1)
    topologies = [*SMALL, Topology(nodes=2, ranks_per_node=4), Topology(nodes=4, ranks_per_node=2)]
    for _ in range(60):
        lengths, topology, cost, cap = random_case(rng, topologies)
        plan = make_plan(
            lengths, topology, cost, PlanOptions(planner=planner, max_tokens_per_rank=cap)
        )
        assert plan.lower_bound_s <= plan.objective_s
