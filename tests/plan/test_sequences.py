"""Plans of groups: what they count, and every kind of illegal plan refused."""

from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Group, Plan, check, widest_first
from tests.plans import group, plan_of_groups

NODE = Topology(nodes=1, ranks_per_node=4)


def test_tokens_and_degrees_are_counted():
    plan = plan_of_groups((10, 3, 7), [group(0, 4, 0), group(0, 2, 1), group(3, 4, 2)])
    check(plan, NODE, max_tokens_per_rank=10)
    (micro_batch,) = plan.micro_batches
    assert micro_batch.tokens_per_rank(plan.lengths, 4) == (5, 5, 3, 10)
    assert plan.degrees() == {1: 1, 2: 1, 4: 1}
    assert [g.degree for g in micro_batch.groups_of(0)] == [4, 2]
    assert widest_first([group(0, 1, 0), group(0, 2, 1)])[0].degree == 2


def test_a_plan_for_other_ranks_is_the_plan_in_fewer_bytes():
    groups = [group(0, 4, 0), group(0, 2, 1), group(3, 4, 2)]
    plan = replace(plan_of_groups((10, 3, 7), groups), notes=("a reason",), objective_s=0.25)
    assert Plan.from_bytes(plan.to_bytes()) == plan
    assert len(plan.to_bytes()) < len(plan.to_json())


@pytest.mark.parametrize(
    "ranks, sequences, strategy, message",
    [
        ((), (0,), "local", "contiguous"),
        ((0, 2), (0,), "ulysses", "contiguous"),
        ((1, 0), (0,), "ulysses", "contiguous"),
        ((0, 1), (), "ulysses", "no sequence"),
        ((0, 1), (0,), "ring", "must be one of"),
        ((0, 1), (0,), "local", "does not fit degree 2"),
        ((0,), (0,), "zigzag", "does not fit degree 1"),
    ],
)
def test_illegal_groups_are_refused(ranks, sequences, strategy, message):
    with pytest.raises(ValueError, match=message):
        Group(ranks=ranks, sequences=sequences, strategy=strategy)


def plan(lengths: tuple[int, ...], *groups: tuple[int, ...]) -> Plan:
    """One micro-batch of (first rank, past the last rank, sequences)."""
    return plan_of_groups(lengths, [group(*one) for one in groups])


@pytest.mark.parametrize(
    "illegal, message",
    [
        (plan((1, 1), (0, 1, 0)), r"missing \[1\]"),
        (plan_of_groups((1,), [group(0, 1, 0)], [group(0, 1, 0)]), r"more than once \[0\]"),
        (plan((1,), (0, 1, 0, 1)), r"unknown \[1\]"),
        (plan((0,), (0, 1, 0)), "no token"),
        (plan((1,), (3, 5, 0)), "neither inside one node nor whole nodes"),
        (plan((1, 1), (0, 1, 0), (0, 2, 1)), "widest first"),
        (plan((1, 1), (0, 3, 0), (2, 4, 1)), "partly overlap"),
        (plan((9, 4), (0, 2, 0), (1, 2, 1)), "rank 1 holds 9 tokens, the limit is 8"),
    ],
)
def test_illegal_plans_are_refused(illegal, message):
    with pytest.raises(ValueError, match=message):
        check(illegal, NODE, max_tokens_per_rank=8)


def test_groups_across_half_nodes_are_refused():
    two_nodes = Topology(nodes=2, ranks_per_node=2)
    check(plan((8,), (0, 4, 0)), two_nodes)
    with pytest.raises(ValueError, match="2 x 2"):
        check(plan((8,), (1, 3, 0)), two_nodes)
