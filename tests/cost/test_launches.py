"""The closed forms of launches, posts and messages against what the executor does, counted on a
transport that is always done."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_flexseq.attention import SequenceContext, heads, sequence_parallel_attention
from hf_flexseq.cost.launches import MOST_PER_RANK, LayerWork, layer_work
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import STRATEGIES, Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.topology import Topology

SCRIPTS = Path(__file__).parents[2] / "scripts"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 16
TOKENS = 64  # of a rank


@pytest.fixture
def host_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark that counts operations and posts."""
    for folder in (SCRIPTS, SCRIPTS / "benchmarks"):
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module("host_time")


def counted(
    host_time: ModuleType, strategy: str, degree: int, per_node: int, rank: int, pieces: int
) -> LayerWork:
    """What one rank of a group does in a layer."""

    class Kernel(host_time.FreeKernel):
        turns = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.turns += 1
            return super().forward(*args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            self.turns += 1
            return super().backward(*args, **kwargs)

    class Transport(host_time.CountingTransport):
        messages = 0

        def post(self, lane: Any, *, sends: Any, recvs: Any, **kwargs: Any) -> Any:
            self.messages += len(sends) + len(recvs)
            return super().post(lane, sends=sends, recvs=recvs, **kwargs)

    # 1. the rank, all alone
    nodes = max(1, degree // per_node)
    topology = Topology(nodes=nodes, ranks_per_node=max(per_node, degree // nodes))
    transport = Transport(rank, topology.world_size)
    communicator = Communicator(topology, transport=transport)
    kernel = Kernel(choose_kernel(torch.device("cpu"), torch.float32, HEAD_DIM))
    heads.PIECE_ROWS["cpu"] = TOKENS * degree * max(1, HEADS // degree) / pieces
    group = Group(ranks=tuple(range(degree)), sequences=(0,), strategy=strategy)
    shard = make_shard(MicroBatch(groups=(group,)), (TOKENS * degree,), rank)
    context = SequenceContext(shard, communicator, kernel, torch.device("cpu"))
    q, k, v = (
        torch.randn(shard.attention_tokens, count, HEAD_DIM, requires_grad=True)
        for count in (HEADS, KV_HEADS, KV_HEADS)
    )

    # 2. a layer, counted the second time
    def run() -> None:
        out = sequence_parallel_attention(q, k, v, context)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(q))

    with torch.autograd.set_multithreading_enabled(False):
        run()
        kernel.turns = transport.posts = transport.messages = 0
        with host_time.CountingMode() as mode:
            run()
    ones = 1  # the gradient of the output is made here
    return LayerWork(
        turns=kernel.turns,
        launches=mode.operations - ones + kernel.turns,
        posts=transport.posts,
        messages=transport.messages,
    )


def busiest(
    host_time: ModuleType, strategy: str, degree: int, per_node: int, pieces: int
) -> LayerWork:
    ranks = [
        counted(host_time, strategy, degree, per_node, rank, pieces) for rank in range(degree)
    ]
    return LayerWork(
        turns=max(work.turns for work in ranks),
        launches=max(work.launches for work in ranks),
        posts=max(work.posts for work in ranks),
        messages=max(work.messages for work in ranks),
    )


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "local"])
@pytest.mark.parametrize("degree, per_node", [(2, 8), (4, 8), (8, 8), (4, 2), (8, 4), (8, 2)])
def test_the_closed_forms_are_what_the_busiest_rank_does(
    host_time: ModuleType,
    strategy: str,
    degree: int,
    per_node: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(heads.PIECE_ROWS, "cpu", 1)
    nodes = max(1, degree // per_node)
    assert busiest(host_time, strategy, degree, per_node, 1) == layer_work(
        strategy, degree, nodes=nodes
    )


def test_rings_of_odd_degrees(host_time: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(heads.PIECE_ROWS, "cpu", 1)
    for strategy in ("zigzag", "balanced", "allgather"):
        assert busiest(host_time, strategy, 3, 8, 1) == layer_work(strategy, 3)


def test_a_rank_alone_launches_its_attention_and_nothing_else(
    host_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(heads.PIECE_ROWS, "cpu", 1)
    assert counted(host_time, "local", 1, 8, 0, 1) == layer_work("local", 1)


@pytest.mark.parametrize("pieces", [2, 4])
def test_every_piece_of_the_heads_is_exchanged_on_its_own(
    host_time: ModuleType, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(heads.PIECE_ROWS, "cpu", 1)
    found = busiest(host_time, "ulysses", 8, 8, pieces)
    wanted = layer_work("ulysses", 8, pieces=pieces)
    assert (found.turns, found.posts, found.messages) == (
        wanted.turns,
        wanted.posts,
        wanted.messages,
    )
    assert wanted.launches == pytest.approx(found.launches, rel=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_count_exceeds_the_bound(strategy: str) -> None:
    for degree in (2, 3, 4, 7, 8, 64, 1024):
        for nodes in (1, 2, degree // 2, degree):
            if degree % nodes == 0:
                work = layer_work(strategy, degree, nodes=nodes)
                most = max(work.turns, work.launches, work.posts, work.messages)
                assert most <= MOST_PER_RANK * degree


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy 'ring' has no counted launches"):
        layer_work("ring", 2)
