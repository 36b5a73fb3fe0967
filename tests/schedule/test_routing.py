"""Routes without processes: whole transfers over the level's NICs, off where they do not pay,
priced by legs."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from hf_flexseq.cost.analytic import DEVICES, analytic_cost_model
from hf_flexseq.cost.presets import LLAMA_8B, PRESETS
from hf_flexseq.plan.shard import cuts
from hf_flexseq.schedule import attention
from hf_flexseq.schedule.routing import BUSY, NicFigures, Routing, Transfer, links_of, make_routing
from hf_flexseq.schedule.transfers import fetch_transfers, ring_fetches
from hf_flexseq.topology import Topology

MB = 1_000_000
TWO_BY_TWO = NicFigures(
    ranks_per_node=2, nics_per_node=2, inside_s=5e-10, across_s=6e-8, transfer_s=1e-4
)
EIGHTS = NicFigures(
    ranks_per_node=8, nics_per_node=8, inside_s=5e-12, across_s=4e-11, transfer_s=2e-5
)


def free(links):
    """The same where legs inside a node cost nothing, so that everything uneven is routed."""
    return replace(links, inside_s=1e-15, transfer_s=0.0)


def straight(t):
    return ((t.source, t.target, 0, t.nbytes),)


def all_paths(transfers, routing):
    routed = dict(routing.paths)
    return [(t, routed.get(t, straight(t))) for t in transfers]


def nic_loads(paths, links):
    loads = Counter()
    for t, found in paths:
        for leaves, enters, start, stop in found:
            if links.node(t.source) != links.node(t.target):
                loads["out", links.nic(leaves)] += stop - start
                loads["in", links.nic(enters)] += stop - start
    return loads


def test_one_hop_takes_both_nics_and_half_the_time():
    hop = Transfer(0, 2, 16 * MB)
    routing = make_routing((hop,), TWO_BY_TWO)
    assert routing.paths == ((hop, ((0, 2, 0, 8 * MB), (1, 3, 8 * MB, 16 * MB))),)
    assert 0.5 < routing.routed_s / routing.direct_s < 0.52
    assert routing.why_not is None
    assert routing.packets > 1


def test_a_hop_over_eight_nics_is_priced_by_its_slowest_leg():
    routing = make_routing((Transfer(3, 12, 64 * MB),), replace(EIGHTS, transfer_s=0.0))
    scatter = gather = 64 * MB * 7 / 8 * 5e-12
    across = 64 * MB / 8 * 4e-11
    assert routing.packets == 8
    assert routing.direct_s == pytest.approx(64 * MB * 4e-11)
    assert routing.routed_s == pytest.approx(across + (scatter + gather) / 8)


def test_where_all_nics_are_busy_nothing_is_routed():
    everyone = tuple(Transfer(rank, (rank + 2) % 4, 16 * MB) for rank in range(4))
    routing = make_routing(everyone, TWO_BY_TWO)
    assert (routing.paths, routing.why_not) == ((), BUSY)
    assert routing.direct_s == routing.routed_s


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"nics_per_node": 1}, "share one NIC"),
        ({"inside_s": 3.1e-8}, "not more than twice"),
        ({"inside_s": 2.5e-8, "transfer_s": 1.0}, "cost what it gains"),
    ],
)
def test_it_is_off_where_it_does_not_pay(change, reason):
    routing = make_routing((Transfer(0, 2, 16 * MB),), replace(TWO_BY_TWO, **change))
    assert routing.paths == ()
    assert reason in routing.why_not


def test_small_and_inner_transfers_go_straight():
    assert make_routing((Transfer(0, 2, 1000),), TWO_BY_TWO).paths == ()
    assert make_routing((Transfer(0, 1, 16 * MB),), TWO_BY_TWO) == Routing(
        why_not="nothing crosses nodes"
    )
    assert make_routing((), TWO_BY_TWO).paths == ()


@pytest.mark.parametrize("nics", [2, 3, 4, 8])
def test_any_transfers_arrive_whole_under_the_level(nics):
    rng = random.Random(nics)
    links = free(replace(EIGHTS, nics_per_node=nics))
    routed = 0
    for _ in range(200):
        pairs = rng.sample(
            [(a, b) for a in range(24) for b in range(24) if a // 8 != b // 8], rng.randint(1, 20)
        )
        transfers = tuple(Transfer(*pair, rng.randint(1, 64 * MB)) for pair in pairs)
        routing = make_routing(transfers, links)
        routed += bool(routing.paths)
        paths = all_paths(transfers, routing)
        for t, found in paths:
            ends = [0, *(path[3] for path in found)]
            assert [path[2] for path in found] == ends[:-1]
            assert ends[-1] == t.nbytes
            assert all(
                path[0] // 8 == t.source // 8 and path[1] // 8 == t.target // 8 for path in found
            )
        if routing.paths:
            loads = nic_loads(paths, links)
            nodes = Counter()
            for (way, (node, _)), nbytes in loads.items():
                nodes[way, node] += nbytes
            level = max(nodes.values()) / nics
            assert max(loads.values()) <= 1.2 * level  # a NIC takes no crumbs, but a little more
            assert max(loads.values()) < max(
                nic_loads([(t, straight(t)) for t in transfers], links).values()
            )
            assert routing.routed_s < 0.91 * routing.direct_s
    assert routed > 100


def test_only_what_does_not_fit_takes_other_ways():
    transfers = (Transfer(0, 2, 12 * MB), Transfer(1, 3, 4 * MB))
    ((routed, paths),) = make_routing(transfers, TWO_BY_TWO).paths
    assert routed == transfers[0]
    assert paths == ((0, 2, 0, 8 * MB), (1, 3, 8 * MB, 12 * MB))


def test_links_come_from_the_cost_model():
    topology = Topology(nodes=2, ranks_per_node=8)
    cost = PRESETS["llama-3.1-8b-a800"]
    links = links_of(cost, topology)
    assert (links.nics_per_node, links.inside_s, links.across_s) == (8, 1 / 1.8e11, 1 / 2.5e10)
    assert links.objection() is None
    assert links_of(cost, Topology(nodes=1, ranks_per_node=8)) is None
    assert links_of(replace(cost, nics_per_node=4), topology).across_s == pytest.approx(
        0.5 / 2.5e10
    )
    assert links_of(cost, Topology(nodes=4, ranks_per_node=4)).nics_per_node == 4
    cpu = links_of(analytic_cost_model(LLAMA_8B, DEVICES["CPU"], topology), topology)
    assert "share one NIC" in cpu.objection()


# ---- rings


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
@pytest.mark.parametrize("lengths", [(64,), (64, 60), (5, 1, 2), (40, 3, 29, 31)])
def test_steps_of_a_ring_with_idle_nics_are_routed_and_the_others_not(strategy, lengths):
    """Two nodes of four: at time t only t (counted from either end) of four ranks read from the
    other node."""
    links = free(
        NicFigures(ranks_per_node=4, nics_per_node=4, inside_s=1.0, across_s=1e-8, transfer_s=0.0)
    )
    for turn in ring_fetches(strategy, cuts(strategy, lengths, 8), 8):
        transfers = fetch_transfers(turn, 0, (64,), (32,), returns=False)
        back = fetch_transfers(turn, 0, (64,), (32,), returns=True)
        assert sorted((b, a) for a, b, _ in transfers) == sorted((a, b) for a, b, _ in back)
        crossing = [t for t in transfers if t.source // 4 != t.target // 4]
        routing = make_routing(transfers, links)
        if 0 < len(crossing) <= 2:
            assert routing.paths
        if len(crossing) == 8 and len({t.nbytes for t in crossing}) == 1:
            assert routing.why_not == BUSY


@pytest.mark.parametrize(
    ("large", "share"), [(1024, 0.72), (1 << 20, 0.66)], ids=["chunk by chunk", "together"]
)
def test_a_zigzag_ring_across_two_nodes_crosses_in_little_more_than_half_the_time(
    large, share, monkeypatch
):
    monkeypatch.setitem(attention.LARGE, "cuda", large)
    ring_fetches.cache_clear()
    turns = ring_fetches("zigzag", cuts("zigzag", (1 << 17, 1 << 17), 16), 16)
    found = [
        make_routing(fetch_transfers(turn, 0, (), (4096,), returns=False), EIGHTS)
        for turn in turns
    ]
    direct, routed = (
        sum(getattr(x, name) if x.paths else x.direct_s for x in found)
        for name in ("direct_s", "routed_s")
    )
    assert routed < share * direct
