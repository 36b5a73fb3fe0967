"""Every planner's plans against a checker that shares no code with the package.

PLAN_EXAMPLES=10000 pytest tests/planner/test_legal.py
"""

import os
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flexseq.base.topology import Topology
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from tests.budget import examples
from tests.planner.small_model import rings

EXAMPLES = int(os.environ.get("PLAN_EXAMPLES", "100"))


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


@pytest.mark.parametrize("planner", ["auto", "zeppelin", "megatron", "batch-ada"])
@settings(deadline=None, max_examples=examples(EXAMPLES))
@given(
    st.lists(
        st.integers(0, 255).map(lambda x: int(2 ** (x / 16)) + x % 7), min_size=1, max_size=60
    ),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(["auto", "ulysses", "zigzag", "balanced", "hybrid"]),
    st.sampled_from([1.0, 1.01, 1.1, 2.0]),
)
def test_plans_are_legal(
    planner: str, lengths: list[int], nodes: int, per_node: int, strategy: str, spare: float
) -> None:
    topology = Topology(nodes=nodes, ranks_per_node=per_node)
    cost = rings(topology)
    cap = int(-(-max(lengths) // topology.world_size) * spare)
    plan = make_plan(
        lengths,
        topology,
        cost,
        PlanOptions(planner=planner, strategy=strategy, max_tokens_per_rank=cap),
    )
    assert problems(plan.to_record(), nodes, per_node, cap) == []
    assert plan.lower_bound_s <= plan.objective_s


def test_the_checker_sees_what_is_wrong() -> None:
    def group(ranks: list[int], sequences: list[int], strategy: str = "ulysses") -> dict:
        return {"ranks": ranks, "sequences": sequences, "strategy": strategy}

    def said(*groups: dict) -> list[str]:
        return problems(
            {"lengths": [10, 10], "micro_batches": [{"groups": list(groups)}]}, 2, 2, 10
        )

    assert said(group([0, 1], [0, 1])) == []
    assert said(group([0, 1], [0])) == ["not every sequence once"]
    assert said(group([0, 1], [0, 1], "local")) == ["a strategy that does not fit the degree"]
    assert said(group([0], [0, 1], "local")) == ["a rank above its memory"]
    assert said(group([1, 2], [0, 1])) == ["a group of parts of nodes"]
    assert said(group([0, 2], [0, 1])) == ["ranks outside the world, or with gaps"]
    assert said(group([0], [0], "local"), group([2, 3], [1])) == ["not widest first"]
    assert "groups that partly overlap" in said(group([0, 1, 2], [0]), group([2, 3], [1]))
