"""Which units a planner takes, how it cuts them, and what its plans promise; and where it puts
sequences that see both ways."""

import math
from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.lengths import with_shares
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.plan.units import Unit
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.shared_rows import SharedRows

COST = PRESETS["llama-3.1-8b-h200"]


def group_of(prompt, answers, first=0):
    """A prompt with answers of so many tokens, whose rows begin with `first`."""
    nodes = [(-1, prompt), *((0, answer) for answer in answers)]
    return Unit.of(nodes, [(first + i, i + 1) for i in range(len(answers))])


def tokens_of(units, others=()):
    rows = {}
    for unit in units:
        rows |= unit.row_tokens()
    return tuple(rows[row] for row in sorted(rows)) + tuple(others)


def test_a_plan_with_units_promises_less_than_one_without():
    units = [group_of(8192, [1024] * 8, first=8 * i) for i in range(8)]
    rows = tokens_of(units, others=[5000, 300])
    topology = Topology(nodes=1, ranks_per_node=8)
    apart = make_plan(rows, topology, COST)
    shared = make_plan(rows, topology, COST, units=units)
    assert len(shared.units) == 8
    assert sum(shared.lengths) == sum(unit.tokens for unit in units) + 5300
    assert shared.objective_s < 0.5 * apart.objective_s
    assert shared.lower_bound_s <= shared.objective_s
    # without any the plan is the same as ever
    assert make_plan(rows, topology, COST, units=[]).digest() == apart.digest()


def test_a_unit_that_no_ranks_can_hold_is_cut():
    unit = group_of(600, [100] * 10)
    rows = tokens_of([unit])
    options = PlanOptions(max_tokens_per_rank=500)
    topology = Topology(nodes=1, ranks_per_node=2)
    plan = make_plan(rows, topology, COST, options, units=[unit])
    assert len(plan.units) > 1
    assert max(plan.lengths) <= 1000
    with pytest.raises(PlanInfeasible, match="700 tokens"):
        make_plan(rows, topology, COST, PlanOptions(max_tokens_per_rank=300), units=[unit])


def test_ids_of_rows_come_back():
    units = (group_of(50, [5, 6], first=1),)
    shared = SharedRows(rows=(9, 55, 56, 7), units=units)
    assert shared.planned == (0, 1, 3)
    assert shared.held == (9, 61, 0, 7)
    assert list(shared.lengths()) == [9, 61, 7]
    assert shared.lengths().shares[1] < 1 == shared.lengths().shares[0]
    topology = Topology(nodes=1, ranks_per_node=1)
    options = PlanOptions(max_tokens_per_rank=1000)
    plan = make_plan(shared.rows, topology, COST, options, units=units)
    assert {i for group in plan.groups for i in group.sequences} == {0, 1, 3}
    objective_ns = step_ns(COST, plan.micro_batches, shared.by_id(), topology, sync="lockstep")
    assert objective_ns == round(plan.objective_s * 1e9)


UNITS = [group_of(8192, [1024] * 64), group_of(2048, [100, 90_000], first=64)]
OTHERS = (200_000, *[500] * 8)


@pytest.mark.parametrize("strategy", ["auto", "zigzag"])
def test_no_ring_holds_a_unit(strategy):
    topology = Topology(nodes=1, ranks_per_node=8)
    rows = tokens_of(UNITS, OTHERS)
    plan = make_plan(rows, topology, COST, PlanOptions(strategy=strategy), units=UNITS)
    groups = [group for one in plan.micro_batches for group in one.groups]
    assert any(group.units for group in groups)
    assert {group.strategy for group in groups if group.units} <= {"local", "ulysses"}


@pytest.mark.parametrize(
    "options", [{"planner": "static", "sp_degree": 1}, {"strategy": "local"}, {}]
)
@pytest.mark.parametrize("prompt", [256, 2048])
def test_units_never_make_a_step_slower(options, prompt):
    topology = Topology(nodes=1, ranks_per_node=8)
    unit = group_of(prompt, [prompt] * 32)
    rows = tokens_of([unit], [100] * 8)
    alone, shared = (
        make_plan(rows, topology, COST, PlanOptions(**options), units=units)
        for units in ((), (unit,))
    )
    assert shared.objective_s <= 1.01 * alone.objective_s


# ---- sequences that see both ways


def many_plans(**fields):
    """Plans on one node and on several, where exchanges of heads cost more than rings."""
    cost = replace(COST, all_to_all_bytes=20 * COST.all_to_all_bytes)
    found = []
    for topology in (Topology(nodes=1, ranks_per_node=8), Topology(nodes=4, ranks_per_node=4)):
        for lengths in ((400_000, 90_000, *[500] * 8), (1_000_000,), (120_000,) * 6):
            found.append(make_plan(lengths, topology, cost, **fields))
    return found


def strategies_of(plans, sequence):
    return {
        group.strategy
        for plan in plans
        for one in plan.micro_batches
        for group in one.groups
        if sequence in group.rows and group.degree > 1
    }


def test_no_ring_holds_a_sequence_that_sees_both_ways():
    assert strategies_of(many_plans(), 0) & {"zigzag", "hybrid"}
    assert strategies_of(many_plans(later_pairs={0: 1}), 0) == {"ulysses"}
    plain, none = many_plans(), many_plans(later_pairs={0: 0})
    assert [plan.digest() for plan in plain] == [plan.digest() for plan in none]


def test_later_keys_take_seconds():
    n, cost = 50_000, replace(COST, kernel=None)
    topology = Topology(nodes=1, ranks_per_node=1)
    options = PlanOptions(max_tokens_per_rank=n)
    causal, half, whole = (
        make_plan((n,), topology, cost, options, later_pairs={0: pairs}).objective_s
        for pairs in (0, n * n // 4, n * (n - 1) // 2)
    )
    assert whole - causal == pytest.approx(cost.attention_s * n * n, rel=1e-3)
    assert half - causal == pytest.approx((whole - causal) / 2, rel=1e-3)


def test_a_ring_that_was_asked_for_refuses_tokens_that_see_both_ways():
    topology = Topology(nodes=1, ranks_per_node=8)
    options = PlanOptions(strategy="zigzag", max_tokens_per_rank=60_000)
    with pytest.raises(ValueError, match=r"sequence 1 has tokens that see both ways.*'zigzag'"):
        make_plan((500, 400_000), topology, COST, options, later_pairs={1: 9})
    # on one rank nothing is in a ring
    plan = make_plan((500, 4_000), topology, COST, options, later_pairs={1: 9})
    assert strategies_of([plan], 1) == set()


def test_units_that_see_both_ways_are_in_no_ring_and_have_a_share_of_their_own():
    unit = group_of(9, [1, 1])  # 11 tokens and 65 pairs, of 66
    tokens = (unit.tokens, 0, 7)
    shares = [with_shares(tokens, [unit], later).shares[0] for later in ({}, {1: 1}, {0: 3, 1: 5})]
    assert shares == [65 / 66, math.nextafter(1.0, 2.0), 70 / 66]
    assert with_shares(tokens, [unit], {1: 1, 2: 14}).shares[2] == 1.5
    topology = Topology(nodes=2, ranks_per_node=4)
    rows = tokens_of(UNITS, OTHERS)
    later = {UNITS[1].rows[-1][0]: 100}
    plan = make_plan(rows, topology, COST, units=UNITS, later_pairs=later)
    groups = [group for one in plan.micro_batches for group in one.groups]
    assert any(group.units for group in groups)
    assert {group.strategy for group in groups if group.units} <= {"local", "ulysses"}
