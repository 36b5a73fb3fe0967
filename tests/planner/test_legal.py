"""Every planner's plans against a checker that shares no code with the package, their price and
their bound.

PLAN_EXAMPLES=10000 pytest tests/planner/test_legal.py
"""

import os
import random
from collections import Counter
from itertools import combinations

import pytest

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.published.aligned_groups import aligned_degrees
from tests.budget import examples, for_seeds
from tests.costs import rings
from tests.plans import planned

EXAMPLES = int(os.environ.get("PLAN_EXAMPLES", "60"))
SHAPES = [
    (1, 1), (1, 2), (1, 3), (1, 5), (1, 6), (1, 7), (1, 8), (1, 12),
    (2, 1), (2, 2), (3, 2), (2, 6), (2, 7), (3, 4), (4, 8), (6, 8),
]  # fmt: skip


def problems(record: dict, nodes: int, per_node: int, cap: int) -> list[str]:
    """What is wrong with a plan, from its JSON record alone."""
    lengths, found = record["lengths"], []
    used = Counter(
        i for mb in record["micro_batches"] for g in mb["groups"] for i in g["sequences"]
    )
    if used != Counter(range(len(lengths))):
        found.append("not every sequence once")
    for micro_batch in record["micro_batches"]:
        held = [0] * (nodes * per_node)
        groups = [set(group["ranks"]) for group in micro_batch["groups"]]
        for ranks, group in zip(groups, micro_batch["groups"], strict=True):
            found += wrong_ranks(ranks, nodes, per_node)
            if (len(ranks) == 1) != (group["strategy"] == "local"):
                found.append("a strategy that does not fit the degree")
            own = [lengths[i] for i in group["sequences"]]
            if own != sorted(own, reverse=True):
                found.append("sequences not longest first")
            for rank in ranks:
                held[rank] += -(-sum(lengths[i] for i in group["sequences"]) // len(ranks))
        if max(held) > cap:
            found.append("a rank above its memory")
        if any(a & b and not a <= b and not b <= a for a, b in combinations(groups, 2)):
            found.append("groups that partly overlap")
        if [len(g) for g in groups] != sorted((len(g) for g in groups), reverse=True):
            found.append("not widest first")
    return found


def wrong_ranks(ranks: set[int], nodes: int, per_node: int) -> list[str]:
    if not ranks <= set(range(nodes * per_node)) or max(ranks) - min(ranks) + 1 != len(ranks):
        return ["ranks outside the world, or with gaps"]
    touched = {rank // per_node for rank in ranks}
    whole = len(ranks) == len(touched) * per_node
    return [] if len(touched) == 1 or whole else ["a group of parts of nodes"]


def drawn(rng: random.Random, planner: str):
    """Lengths, topology, cost model and options of a step."""
    most = 12 if planner == "flexsp" else 60
    lengths = [int(2 ** rng.uniform(0, 16)) for _ in range(rng.randint(1, most))]
    shapes = [shape for shape in SHAPES if planner != "flexsp" or shape[0] * shape[1] <= 14]
    nodes, per_node = rng.choice(shapes)
    topology = Topology(nodes=nodes, ranks_per_node=per_node)
    cost = rng.choice(
        [rings(topology), PRESETS["flexsp-gpt-7b-a100"], PRESETS["gemma-3-27b-h100"]]
    )
    strategies = ["auto", "ulysses", "local"]
    if cost.ring_bytes is not None:
        strategies += ["zigzag", "balanced", "hybrid"]
    options = {"planner": planner, "sync": rng.choice(["lockstep", "free"])}
    widest = topology.world_size
    if planner == "static":
        widest = options["sp_degree"] = rng.choice(topology.degrees())
        if widest > 1:
            strategies.remove("local")
    options["strategy"] = rng.choice(strategies)
    if options["strategy"] == "local" or not PLANNERS[planner].splits:
        widest = 1
    fewest = -(-max(lengths) // widest)
    cap = int(fewest * rng.choice([1, 1.01, 1.1, 2])) + rng.choice([0, 0, 20_000])
    return lengths, topology, cost, options | {"max_tokens_per_rank": cap}


@pytest.mark.parametrize("planner", PLANNERS)
@for_seeds(examples(EXAMPLES))
def test_plans_are_legal_and_cost_what_they_say(planner, seed):
    if planner == "flexsp" and seed % 3:
        return  # its integer programs take most of the time
    lengths, topology, cost, options = drawn(random.Random(seed), planner)
    plan = planned(lengths, topology, cost, **options)
    cap, world = options["max_tokens_per_rank"], topology.world_size
    assert problems(plan.to_record(), topology.nodes, topology.ranks_per_node, cap) == []
    priced = step_ns(cost, plan.micro_batches, lengths, topology, sync=options["sync"])
    assert plan.lower_bound_s <= plan.objective_s == priced / 1e9
    used = {group.strategy for one in plan.micro_batches for group in one.groups}
    assert options["strategy"] == "auto" or used <= {"local", options["strategy"]}
    if planner == "static":
        assert set(plan.degrees()) == {options["sp_degree"]}
        assert len(plan.micro_batches) <= 2 * -(-sum(lengths) // (cap * world)) + 1
    if planner == "flexsp":
        assert set(plan.degrees()) <= set(aligned_degrees(topology))
    if seed % 10 == 0:
        assert planned(lengths, topology, cost, **options).digest() == plan.digest()
