"""Routed exchanges on 4 ranks in two nodes: the bits that would have come straight, whoever carries them."""

import random

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.distributed import routing
from hf_flexseq.distributed.communicator import Communicator, Exchange, unnamed
from hf_flexseq.distributed.routing import RoutedExchange
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.schedule.routing import Links, Transfer, make_routing
from hf_flexseq.shard import make_shard
from hf_flexseq.topology import Topology
from tests.ranks import run_ranks

TOPOLOGY = Topology(nodes=2, ranks_per_node=2)
LINKS = Links(ranks_per_node=2, nics_per_node=2, inside_s=1e-15, across_s=1e-9, transfer_s=0.0)
CPU = torch.device("cpu")
PACKS = [(64,), (31, 1, 2, 17, 13, 29), (5, 3), (1,), (40, 40)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def attention(communicator, strategy, lengths, dtype, links):
    """Bytes of this rank's out, dq, dk and dv."""
    group = Group(ranks=(0, 1, 2, 3), sequences=tuple(range(len(lengths))), strategy=strategy)
    shard = make_shard(MicroBatch(groups=(group,)), lengths, communicator.rank)
    seq_ctx = SequenceContext(shard, communicator, choose_kernel(CPU, dtype, 8), CPU, links=links)
    generator = torch.Generator().manual_seed(communicator.rank)
    q, k, v, dout = (torch.randn(shard.tokens, h, 8, generator=generator).to(dtype) for h in (3, 1, 1, 3))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sequence_parallel_attention(q, k, v, seq_ctx)
    out.backward(dout)
    return [x.detach().contiguous().view(torch.uint8).tolist() for x in (out, q.grad, k.grad, v.grad)]


def compare(rank, world_size, strategy):
    """By case: the results straight and routed, and how many exchanges were routed."""
    communicator, made = Communicator(TOPOLOGY), []
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        post = RoutedExchange.post
        monkeypatch.setattr(RoutedExchange, "post", lambda *args, **kwargs: (made.append(1), post(*args, **kwargs))[1])
        for lengths in PACKS:
            for dtype in DTYPES:
                results = [attention(communicator, strategy, lengths, dtype, links) for links in (None, LINKS)]
                found[lengths, dtype] = (*results, len(made))
                made.clear()
    return found


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
def test_attention_is_the_same_to_the_bit(strategy):
    by_rank = run_ranks(compare, 4, strategy)
    for found in by_rank:
        for case, (straight, routed, _) in found.items():
            assert straight == routed, case
    counts = [[count for *_, count in found.values()] for found in by_rank]
    assert counts == counts[:1] * 4, "ranks differ about what is routed"
    assert all(count for (lengths, _), (*_, count) in by_rank[0].items() if lengths == (64,))


def exchange_at_random(rank, world_size, rounds):
    """Random tensors in random exchanges, some ranks without a part in them; what came, and what should have."""
    communicator, shared = Communicator(TOPOLOGY), random.Random(0)
    found, routed = [], 0
    for n in range(rounds):
        pairs = shared.sample([(a, b) for a in range(4) for b in range(4) if a != b], shared.randint(1, 6))
        sent = {pair: _tensors(shared.randint(1, 500), seed) for seed, pair in enumerate(pairs)}
        transfers = tuple(Transfer(*pair, sum(-(-x.nbytes // 16) * 16 for x in xs)) for pair, xs in sent.items())
        decided = make_routing(transfers, LINKS)
        exchange = RoutedExchange(unnamed, decided, communicator, CPU) if decided.paths else Exchange(unnamed)
        for (source, target), tensors in sent.items():
            if source == rank:
                exchange.send(tensors, target)
        came = {pair: exchange.recv(xs, len(xs[0]), pair[0]) for pair, xs in sent.items() if pair[1] == rank}
        exchange.post(communicator, tag=8 * (n % 50))
        exchange.wait()
        found += [torch.equal(x, y) for pair, xs in came.items() for x, y in zip(xs, sent[pair], strict=True)]
        routed += bool(decided.paths)
    return found, routed


def _tensors(rows, seed):
    """As a message of the backward: of several types and shapes."""
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator}
    return [
        torch.randn(rows, 3, 5, **options).bfloat16(),
        torch.randn(rows, 3, **options),
        torch.randn(rows, **options, dtype=torch.float64),
    ]


def test_random_exchanges_bring_what_was_sent():
    by_rank = run_ranks(exchange_at_random, 4, 150)
    assert all(all(found) and found for found, _ in by_rank)
    assert {routed for _, routed in by_rank} == {by_rank[0][1]}
    assert by_rank[0][1] > 50


def test_legs_have_tags_of_their_own():
    tags = [routing.tag_of_legs(8 * n) for n in range(16)]
    width = 3 * routing.MOST_PIECES * routing.TAGS_OF_BATCH
    assert len(set(tags)) == 16
    assert max(tags) + width < routing.TAGS_OF_ZONE
    assert min(tags) >= routing.TAGS_OF_ZONE // 2
    assert routing.tag_of_legs(1 << 30) + width < (1 << 31) - 1
