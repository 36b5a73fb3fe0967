"""The closed forms of launches, posts and messages against the programs that ranks run."""

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
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import ring
from hf_flexseq.program.compile import Machine, MicroBatchLayout, backward, forward
from hf_flexseq.program.heads import PIECE_ROWS
from hf_flexseq.program.instructions import LayerShape
from hf_flexseq.program.ring_steps import WORTHY_PAIRS

SHAPE = LayerShape(query_heads=32, kv_heads=8, head_dim=16, dtype="bfloat16")
TOKENS = 64  # of a rank


def counted(
    strategy: str, degree: int, per_node: int, rank: int, shape: LayerShape = SHAPE
) -> LayerWork:
    """What one rank of a group does in a layer, of which it runs the programs."""
    nodes = max(1, degree // per_node)
    topology = Topology(nodes=nodes, ranks_per_node=max(per_node, degree // nodes))
    group = Group(ranks=tuple(range(degree)), sequences=(0,), strategy=strategy)
    shard = make_shard(MicroBatch(groups=(group,)), (TOKENS * degree,), rank)
    machine = Machine(topology=topology, device="cuda", wide_gradients=False)
    parts = MicroBatchLayout(shard, machine).parts
    there = forward(parts, shape)
    back = backward(parts, shape, there.saved)
    posts = 0
    for program in (there, back):
        posts += program.posts(topology.node_of, rank=rank)
    return LayerWork(
        calls=there.kernel_calls + back.kernel_calls,
        launches=there.launches + back.launches,
        posts=posts,
        messages=there.messages + back.messages,
    )


def busiest(strategy: str, degree: int, per_node: int, shape: LayerShape = SHAPE) -> LayerWork:
    ranks = [counted(strategy, degree, per_node, rank, shape) for rank in range(degree)]
    return LayerWork(
        calls=max(work.calls for work in ranks),
        launches=max(work.launches for work in ranks),
        posts=max(work.posts for work in ranks),
        messages=max(work.messages for work in ranks),
    )


@pytest.fixture(autouse=True)
def ring_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few tokens are worth a ring step."""
    monkeypatch.setitem(WORTHY_PAIRS, "cuda", 1)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "local"])
@pytest.mark.parametrize(
    "degree, per_node", [(2, 8), (4, 8), (8, 8), (4, 2), (8, 4), (8, 2), (16, 4)]
)
def test_the_closed_forms_are_what_the_busiest_rank_does(
    strategy: str, degree: int, per_node: int
) -> None:
    nodes = max(1, degree // per_node)
    assert busiest(strategy, degree, per_node) == layer_work(strategy, degree, nodes=nodes)


def test_a_zigzag_of_eight_launches_and_posts_no_more_than_that() -> None:
    work = busiest("zigzag", 8, 8)
    assert (work.launches, work.posts) == (59, 16)


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
@pytest.mark.parametrize("degree, per_node", [(12, 2), (12, 4), (6, 3), (15, 5), (9, 3)])
def test_rings_on_any_nodes(strategy: str, degree: int, per_node: int) -> None:
    wanted = layer_work(strategy, degree, nodes=degree // per_node)
    assert busiest(strategy, degree, per_node) == wanted


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
@pytest.mark.parametrize("degree", [3, 5, 7])
def test_rings_of_odd_degrees(strategy: str, degree: int) -> None:
    assert busiest(strategy, degree, 8) == layer_work(strategy, degree)


@pytest.mark.parametrize("strategy", ["zigzag", "balanced", "hybrid"])
@pytest.mark.parametrize(
    "degree, per_node", [(2, 8), (3, 8), (8, 8), (4, 2), (8, 4), (8, 2), (4, 1), (6, 2), (16, 8)]
)
def test_a_window_launches_one_call_and_posts_its_halo_once_each_way(
    strategy: str, degree: int, per_node: int
) -> None:
    nodes = max(1, degree // per_node)
    if strategy == "hybrid" and nodes in (1, degree):
        pytest.skip("inside a node a hybrid is Ulysses, and with one rank on each a zigzag")
    shape = SHAPE._replace(reach=Reach(window=TOKENS // 2 + 1))
    wanted = halo_work(strategy, degree, nodes=nodes)
    assert busiest(strategy, degree, per_node, shape) == wanted


def test_windows_leave_ulysses_its_launches_and_posts() -> None:
    shape = SHAPE._replace(reach=Reach(window=TOKENS // 2 + 1))
    assert busiest("ulysses", 8, 8, shape) == layer_work("ulysses", 8)


def test_a_rank_alone_launches_its_attention_and_nothing_else() -> None:
    assert counted("local", 1, 8, 0) == layer_work("local", 1)


@pytest.mark.parametrize("pieces", [2, 4])
def test_every_piece_of_the_heads_is_exchanged_on_its_own(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIECE_ROWS, "cuda", TOKENS * 8 * SHAPE.query_heads // 8 // pieces)
    assert busiest("ulysses", 8, 8) == layer_work("ulysses", 8, pieces=pieces)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_count_exceeds_the_bound(strategy: str) -> None:
    for degree in (2, 3, 4, 7, 8, 64, 1024):
        for nodes in (1, 2, degree // 2, degree):
            if degree % nodes == 0:
                work = layer_work(strategy, degree, nodes=nodes)
                most = max(work.calls, work.launches, work.posts, work.messages)
                assert most <= MOST_PER_RANK * degree


def test_rings_fetch_as_far_ahead_as_they_are_priced() -> None:
    assert RING_AHEAD == ring.AHEAD


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy 'ring' has no counted launches"):
        layer_work("ring", 2)
