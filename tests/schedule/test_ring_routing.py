"""All ranks of a ring find the routing of all transfers, each the part of its own node."""

import random
from dataclasses import replace

import pytest

from hf_flexseq.plan import Group
from hf_flexseq.plan.shard import cuts
from hf_flexseq.schedule import attention
from hf_flexseq.schedule.ring_routing import TOO_ALIKE, all_ring_routings, ring_routings
from hf_flexseq.schedule.routing import NicFigures, make_routing
from hf_flexseq.schedule.transfers import fetch_transfers, ring_fetches

WIDTHS = [((), (4096,)), ((8192,), (4096,)), ((8192, 8192, 8192, 128), (4096,)), ((24, 6), (2, 2))]
EIGHTS = NicFigures(
    ranks_per_node=8, nics_per_node=8, inside_s=5e-12, across_s=4e-11, transfer_s=2e-5
)


def group_of(strategy, first, degree, lengths):
    ranks = tuple(range(first, first + degree))
    return Group(ranks=ranks, sequences=tuple(range(len(lengths))), strategy=strategy)


def random_ring(rng, strategy):
    """(group, lengths, links) of a ring over some nodes: long sequences, short ones, tiny ones."""
    per_node = rng.choice([2, 3, 4, 8])
    degree = per_node * rng.choice([2, 3, 4])
    most = rng.choice([3 * degree, 2000, 200_000])
    lengths = tuple(rng.randint(1, rng.choice([30, most])) for _ in range(rng.randint(1, 5)))
    links = NicFigures(
        ranks_per_node=per_node,
        nics_per_node=rng.randint(1 if rng.random() < 0.1 else 2, per_node),
        inside_s=rng.choice([1e-15, 5e-12]),
        across_s=rng.choice([4e-11, 4e-10]),
        transfer_s=rng.choice([0.0, 1e-9, 2e-5]),
    )
    return group_of(strategy, per_node * rng.randint(0, 3), degree, lengths), lengths, links


def slow_routings(group, lengths, links, widths, returns):
    """The routing of each turn, from a list of all transfers."""
    turns = ring_fetches(group.strategy, cuts(group.strategy, lengths, group.degree), group.degree)
    routings = []
    for fetches in turns:
        transfers = fetch_transfers(fetches, group.start, *widths, returns=returns)
        routings.append(make_routing(transfers, links))
    return routings


@pytest.mark.parametrize("large", [1, 1024, 1 << 20], ids="chunk size {}".format)
@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
def test_every_rank_finds_the_paths_of_its_node(strategy, large, monkeypatch):
    monkeypatch.setitem(attention.LARGE, "cuda", large)
    ring_fetches.cache_clear()
    rng = random.Random(f"{strategy} {large}")
    routed = 0
    for _ in range(12):
        group, lengths, links = random_ring(rng, strategy)
        widths = rng.choice(WIDTHS)
        for returns in (False, True):
            expected = slow_routings(group, lengths, links, widths, returns)
            if not returns:
                found = all_ring_routings(group, lengths, links, widths)
                for whole, slow in zip(found, expected, strict=True):
                    assert whole == slow if slow.paths else straight(whole) == straight(slow)
            for rank in rng.sample(group.ranks, 2):
                found = ring_routings(group, lengths, links, *widths, returns=returns, rank=rank)
                for own, of_all in zip(found, expected, strict=True):
                    compare(own, of_all, rank // links.ranks_per_node, links)
            routed += sum(bool(routing.paths) for routing in expected)
    assert routed > 20
    ring_fetches.cache_clear()


def straight(routing):
    """The same, without the seconds of paths that were looked for and not worth it."""
    return replace(routing, routed_s=routing.direct_s, packets=1)


def compare(own, of_all, node, links):
    """`own` is the part of a node in the routing of all its turn's transfers."""
    assert (own.why_not is None) == (of_all.why_not is None)
    if of_all.paths:
        assert (own.packets, own.direct_s, own.routed_s) == (
            of_all.packets,
            of_all.direct_s,
            of_all.routed_s,
        )
    of_node = []
    for transfer, paths in of_all.paths:
        if node in (links.node(transfer.source), links.node(transfer.target)):
            of_node.append((transfer, paths))
    assert own.paths == tuple(of_node)


def test_most_turns_of_a_large_ring_are_settled_by_bounds_and_only_its_ends_are_routed():
    group = group_of("zigzag", 0, 256, (1 << 17,))
    found = ring_routings(group, (1 << 17,), EIGHTS, (), (4096,), returns=False, rank=100)
    routed = [turn for turn, routing in enumerate(found) if routing.paths]
    assert routed
    assert all(turn < 8 or turn > 248 for turn in routed)
    assert {routing.why_not for routing in found[8:249]} == {TOO_ALIKE}


def test_nothing_is_routed_inside_a_node():
    group = group_of("balanced", 8, 8, (5000,))
    found = ring_routings(group, (5000,), EIGHTS, (64,), (64,), returns=True, rank=9)
    assert [routing.why_not for routing in found] == ["nothing crosses nodes"] * 5
