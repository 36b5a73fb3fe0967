"""The closed forms of launches, posts and messages against the programs that ranks run."""

from dataclasses import astuple

import pytest

from hf_flexseq.base.layers import Reach
from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.launches import (
    MOST_PER_RANK,
    RING_AHEAD,
    LayerWork,
    halo_work,
    layer_work,
)
from hf_flexseq.program import ring
from hf_flexseq.program.compile import Machine, MicroBatchLayout, backward, forward
from hf_flexseq.program.instructions import LayerShape
from hf_flexseq.program.ring_steps import WORTHY_PAIRS
from tests.plans import shards_of

SHAPE = LayerShape(query_heads=32, kv_heads=8, head_dim=16, dtype="bfloat16")
TOKENS = 64  # of a rank
WINDOW = SHAPE._replace(reach=Reach(window=TOKENS // 2 + 1))
RINGS = ["zigzag", "balanced"]
ONE_NODE = [(2, 1), (4, 1), (8, 1)]  # (degree, nodes)
TWO_NODES = [(4, 2), (8, 2), (8, 4), (16, 4)]
UNEVEN = [(3, 1), (5, 1), (7, 1), (12, 6), (12, 3), (6, 2), (15, 3), (9, 3)]


def busiest(strategy: str, degree: int, nodes: int, shape: LayerShape = SHAPE) -> LayerWork:
    """What the ranks of a group do at most in a layer, by the programs that they run."""
    topology = Topology(nodes=nodes, ranks_per_node=degree // nodes)
    machine = Machine(topology=topology, device="cuda", wide_gradients=False)
    most = dict.fromkeys(("calls", "launches", "posts", "messages"), 0)
    for rank, shard in enumerate(shards_of(strategy, degree, (TOKENS * degree,))):
        parts = MicroBatchLayout(shard, machine).parts
        there = forward(parts, shape)
        programs = (there, backward(parts, shape, there.saved))
        counts = {
            "calls": [program.kernel_calls for program in programs],
            "launches": [program.launches for program in programs],
            "posts": [program.posts(topology.node_of, rank=rank) for program in programs],
            "messages": [program.messages for program in programs],
        }
        most = {name: max(most[name], sum(of_rank)) for name, of_rank in counts.items()}
    return LayerWork(**most)


@pytest.fixture(autouse=True)
def ring_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few tokens are worth a ring step."""
    monkeypatch.setitem(WORTHY_PAIRS, "cuda", 1)


@pytest.mark.parametrize(
    "strategy, places",
    [
        ("local", [(1, 1)]),
        ("ulysses", ONE_NODE + TWO_NODES),
        ("hybrid", ONE_NODE + TWO_NODES),
        *((name, ONE_NODE + TWO_NODES + UNEVEN) for name in RINGS),
    ],
)
def test_the_closed_forms_are_what_the_busiest_rank_does(strategy, places):
    for degree, nodes in places:
        wanted = layer_work(strategy, degree, nodes=nodes)
        assert busiest(strategy, degree, nodes) == wanted, (degree, nodes)


def test_a_zigzag_of_eight_launches_and_posts_no_more_than_that():
    work = layer_work("zigzag", 8)
    assert (work.launches, work.posts) == (59, 16)


@pytest.mark.parametrize(
    "strategy, places",
    [
        ("hybrid", [(8, 2), (8, 4), (6, 3), (16, 2)]),
        *((name, [(2, 1), (3, 1), (8, 1), (4, 2), (8, 2), (8, 4), (4, 4)]) for name in RINGS),
    ],
)
def test_a_window_launches_one_call_and_posts_its_halo_once_each_way(strategy, places):
    for degree, nodes in places:
        wanted = halo_work(strategy, degree, nodes=nodes)
        assert busiest(strategy, degree, nodes, WINDOW) == wanted, (degree, nodes)


def test_windows_leave_ulysses_its_launches_and_posts():
    assert busiest("ulysses", 8, 1, WINDOW) == layer_work("ulysses", 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_count_exceeds_the_bound(strategy):
    for degree in (2, 3, 4, 7, 8, 64, 1024):
        for nodes in (1, 2, degree // 2, degree):
            if degree % nodes == 0:
                work = astuple(layer_work(strategy, degree, nodes=nodes))
                assert max(work) <= MOST_PER_RANK * degree


def test_rings_fetch_as_far_ahead_as_they_are_priced():
    assert RING_AHEAD == ring.AHEAD


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="strategy 'ring' has no counted launches"):
        layer_work("ring", 2)
