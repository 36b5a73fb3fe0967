"""Routes without processes: whole transfers over the level's NICs, off where they do not pay,
priced by legs."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B, PRESETS
from hf_flexseq.published.zeppelin import routing
from hf_flexseq.published.zeppelin.routing import (
    STRAIGHT,
    NicFigures,
    Transfer,
    links_of,
    make_routing,
)

MB = 1_000_000
TWO_BY_TWO = NicFigures(ranks_per_node=2, inside_s=5e-10, across_s=6e-8)
# Legs inside a node cost nothing.
EIGHTS = NicFigures(ranks_per_node=8, inside_s=1e-15, across_s=4e-11)
ALL = frozenset(range(24))  # ranks that may relay


def test_one_hop_takes_both_nics_and_half_the_time():
    hop = Transfer(0, 2, 16 * MB)
    found = make_routing((hop,), TWO_BY_TWO, ALL)
    assert found.paths == ((hop, ((0, 2, 0, 8 * MB), (1, 3, 8 * MB, 16 * MB))),)
    assert found.packets > 1


@pytest.mark.parametrize("change", [{"ranks_per_node": 1}, {"inside_s": 3.1e-8}])
def test_it_is_off_where_it_does_not_pay(change):
    links = replace(TWO_BY_TWO, **change)
    assert make_routing((Transfer(0, 2, 16 * MB),), links, ALL) == STRAIGHT


def test_small_and_inner_transfers_go_straight():
    for transfers in ((Transfer(0, 2, 1000),), (Transfer(0, 1, 16 * MB),), ()):
        assert make_routing(transfers, TWO_BY_TWO, ALL) == STRAIGHT


def test_only_ranks_that_may_relay_do():
    found = make_routing((Transfer(0, 12, 16 * MB),), EIGHTS, frozenset({0, 3, 9, 12}))
    ((_, paths),) = found.paths
    assert {path.exit_rank for path in paths} == {0, 3}
    assert {path.entry_rank for path in paths} == {9, 12}


def loads_of(paths, place):
    """Bytes that leave and enter every place. paths: of all transfers; place: of a rank."""
    loads = Counter()
    for leaves, enters, start, stop in paths:
        loads["out", place(leaves)] += stop - start
        loads["in", place(enters)] += stop - start
    return max(loads.values())


def test_any_transfers_arrive_whole_under_the_level(monkeypatch):
    monkeypatch.setattr(routing, "TRANSFER_S", 0.0)  # everything uneven is routed
    rng = random.Random(8)
    across = [(a, b) for a in range(24) for b in range(24) if a // 8 != b // 8]
    routed = 0
    for _ in range(100):
        pairs = rng.sample(across, rng.randint(1, 20))
        transfers = tuple(Transfer(*pair, rng.randint(1, 64 * MB)) for pair in pairs)
        found = dict(make_routing(transfers, EIGHTS, ALL).paths)
        straight = {t: [(t.source, t.target, 0, t.nbytes)] for t in transfers}
        paths = []
        for t, of_transfer in (straight | found).items():
            paths += of_transfer
            ends = [0, *(path[3] for path in of_transfer)]
            assert [path[2] for path in of_transfer] == ends[:-1]
            assert ends[-1] == t.nbytes
            for leaves, enters, *_ in of_transfer:
                assert (leaves // 8, enters // 8) == (t.source // 8, t.target // 8)
        if found:
            routed += 1
            level = loads_of(paths, EIGHTS.node) / 8
            most = loads_of(paths, int)
            assert most <= 1.2 * level  # a NIC takes no crumbs, but a little more
            assert most < loads_of([one for (one,) in straight.values()], int)
    assert routed > 50


def test_links_come_from_the_cost_model():
    topology = Topology(nodes=2, ranks_per_node=8)
    cost = PRESETS["llama-3.1-8b-a800"]
    links = links_of(cost, topology)
    assert (links.ranks_per_node, links.inside_s) == (8, 1 / 1.8e11)
    assert links.across_s == pytest.approx(1 / 2.5e10)
    assert links.may_route
    assert links_of(cost, Topology(nodes=1, ranks_per_node=8)) is None
    assert links_of(analytic_cost_model(LLAMA_8B, DEVICES["CPU"], topology), topology) is None
