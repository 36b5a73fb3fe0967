"""Units of rows that share prefixes: places of their nodes, their form, and their plans."""

import pytest

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Group, Plan, check
from hf_flexseq.plan.units import Node, Unit
from tests.plans import plan_of_groups

#  0: a a a    1: b b    2: c    3: d d    and rows that end in 0, 2, 2 and 3
UNIT = Unit.of([(-1, 3), (0, 2), (1, 1), (0, 2)], [(0, 0), (1, 2), (2, 2), (3, 3)])


def test_descendants_stand_together_and_positions_count_along_paths():
    layout = UNIT.layout
    assert layout.starts == (0, 3, 5, 6)
    assert layout.subtree_stops == (8, 6, 6, 8)
    assert layout.before == (0, 3, 5, 3)
    assert layout.depths == (0, 1, 2, 1)
    pieces = [tuple(piece) for piece in layout.pieces(2, 7)]
    assert pieces == [(0, 2, 3), (1, 3, 5), (2, 5, 6), (3, 6, 7)]
    assert UNIT.row_tokens() == {0: 3, 1: 6, 2: 6, 3: 5}


@pytest.mark.parametrize("reach", [FULL, Reach(window=2), Reach(window=4), Reach(chunk=3)])
def test_pairs_are_those_of_every_token_on_its_path(reach):
    counted = 0
    for before, end in zip(UNIT.layout.before, UNIT.layout.ends, strict=True):
        counted += sum(query + 1 - reach.first_key(query) for query in range(before, end))
    assert UNIT.layout.pairs(reach) == counted


@pytest.mark.parametrize(
    ("nodes", "rows", "said"),
    [
        ([], [(0, 0)], "needs nodes"),
        ([(0, 3)], [(0, 0)], "node 0 .* parent 0"),
        ([(-1, 3), (-1, 2)], [(0, 0), (1, 1)], "node 1 .* parent -1"),
        ([(-1, 3), (0, 1), (0, 1), (1, 1)], [(0, 2), (1, 3)], "node 3 .* parent 1"),
        ([(-1, 3), (0, 0)], [(0, 1)], "0 tokens"),
        ([(-1, 3)], [(1, 0), (0, 0)], "ascend"),
        ([(-1, 3), (0, 1), (0, 2)], [(0, 1)], "rows end in"),
        ([(-1, 3)], [(0, 1)], "rows end in"),
    ],
)
def test_what_is_no_tree_of_rows_is_refused(nodes, rows, said):
    with pytest.raises(ValueError, match=said):
        Unit.of(nodes, rows).check()


def group_alone(*sequences, units=()):
    return Group(ranks=(0,), sequences=sequences, strategy="local", units=units)


def planned(units=(UNIT,)):
    return plan_of_groups((8, 0, 0, 0, 7), [group_alone(0, 4, units=units)])


def test_a_plan_with_units_is_read_as_it_was_written():
    plan = planned()
    check(plan, Topology(nodes=1, ranks_per_node=1), 15)
    assert Plan.from_record(plan.to_record()) == plan
    assert Plan.from_json(plan.to_json()) == plan
    other = UNIT._replace(nodes=(*UNIT.nodes[:2], Node(0, 1), UNIT.nodes[3]))
    assert planned(units=(other,)).digest() != plan.digest()
    (group,) = plan_of_groups((3,), [group_alone(0)]).to_record()["micro_batches"][0]["groups"]
    assert "units" not in group


@pytest.mark.parametrize(
    ("lengths", "units", "said"),
    [
        ((8, 0, 0, 0, 7), (), "missing \\[1, 2, 3\\]"),
        ((9, 0, 0, 0, 7), (UNIT,), "8 tokens in its nodes and 9 in the plan"),
        ((8, 1, 0, 0, 7), (UNIT,), "row 1 of a unit has 1 tokens of its own"),
        ((8, 0, 0, 0, 0), (UNIT,), "sequence 4 has no token"),
        ((8, 0, 0, 0, 7), (UNIT._replace(rows=UNIT.rows[:3]),), "missing \\[3\\]"),
    ],
)
def test_units_that_do_not_fit_their_plan_are_refused(lengths, units, said):
    with pytest.raises(ValueError, match=said):
        plan_of_groups(lengths, [group_alone(0, 4, units=units)]).check_form()


def test_nodes_are_made_of_pairs():
    assert UNIT.nodes[1] == Node(parent=0, tokens=2)
    assert Unit.from_record(UNIT.to_record()) == UNIT
    with pytest.raises(ValueError, match="not a unit"):
        Unit.from_record({"nodes": []})
    record = UNIT.to_record()
    record["rows"][0][1] = len(UNIT.nodes)
    with pytest.raises(ValueError, match="rows end in"):
        Unit.from_record(record)
