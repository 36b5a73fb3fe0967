"""Plans as data: round trips, digests, and every kind of illegal plan refused."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Group, MicroBatch, Plan, check, widest_first
from plans import random_plan

NODE = Topology(nodes=1, ranks_per_node=4)


def group(start: int, stop: int, *sequences: int) -> Group:
    return Group(
        ranks=tuple(range(start, stop)),
        sequences=sequences,
        strategy="local" if stop - start == 1 else "ulysses",
    )


def plan(lengths: tuple[int, ...], *micro_batches: tuple[Group, ...]) -> Plan:
    return Plan(
        lengths=lengths,
        micro_batches=tuple(MicroBatch(groups=groups) for groups in micro_batches),
        objective_s=1.5,
        lower_bound_s=1.25,
        planner="auto",
        planning_s=0.01,
    )


LEGAL = plan((10, 3, 7), (group(0, 4, 0), group(0, 2, 1), group(3, 4, 2)))


def test_counts_tokens_and_degrees() -> None:
    check(LEGAL, NODE, max_tokens_per_rank=10)
    assert LEGAL.micro_batches[0].tokens_per_rank(LEGAL.lengths, 4) == (5, 5, 3, 10)
    assert LEGAL.degrees() == {1: 1, 2: 1, 4: 1}
    assert [g.degree for g in LEGAL.micro_batches[0].groups_of(0)] == [4, 2]
    assert widest_first([group(0, 1, 0), group(0, 2, 1)])[0].degree == 2


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 10**6),
)
def test_json_round_trip(lengths: list[int], world: int, seed: int) -> None:
    made = random_plan(lengths, world, random.Random(seed))
    assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json(made.to_json()).digest() == made.digest()


def test_digest_ignores_only_the_planning_time() -> None:
    assert replace(LEGAL, planning_s=99.0).digest() == LEGAL.digest()
    changes = [
        {"objective_s": 1.0},
        {"lower_bound_s": 1.0},
        {"planner": "static"},
        {"lengths": (10, 3, 8)},
    ]
    changes.append({"micro_batches": ()})
    assert all(replace(LEGAL, **change).digest() != LEGAL.digest() for change in changes)


@pytest.mark.parametrize(
    "text", ["{}", '{"micro_batches": 3}', '{"micro_batches": [{}]}', "[]", "no json"]
)
def test_refuses_what_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError):
        Plan.from_json(text)


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
def test_refuses_illegal_groups(
    ranks: tuple[int, ...], sequences: tuple[int, ...], strategy: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Group(ranks=ranks, sequences=sequences, strategy=strategy)


@pytest.mark.parametrize(
    "illegal, message",
    [
        (plan((1, 1), (group(0, 1, 0),)), r"missing \[1\]"),
        (plan((1,), (group(0, 1, 0),), (group(0, 1, 0),)), r"more than once \[0\]"),
        (plan((1,), (group(0, 1, 0, 1),)), r"unknown \[1\]"),
        (plan((0,), (group(0, 1, 0),)), "no token"),
        (plan((1,), (group(3, 5, 0),)), "neither inside one node nor whole nodes"),
        (plan((1, 1), (group(0, 1, 0), group(0, 2, 1))), "widest first"),
        (plan((1, 1), (group(0, 3, 0), group(2, 4, 1))), "partly overlap"),
        (plan((9, 4), (group(0, 2, 0), group(1, 2, 1))), "rank 1 holds 9 tokens, the limit is 8"),
    ],
)
def test_check_refuses_illegal_plans(illegal: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(illegal, NODE, max_tokens_per_rank=8)


def test_check_refuses_groups_across_half_nodes() -> None:
    two_nodes = Topology(nodes=2, ranks_per_node=2)
    check(plan((8,), (group(0, 4, 0),)), two_nodes)
    with pytest.raises(ValueError, match="2 x 2"):
        check(plan((8,), (group(1, 3, 0),)), two_nodes)
