"""Routed exchanges on 4 ranks in two nodes: the bits that would have come straight, whoever
carries them."""

import random

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.attention.replay import BoundProgram
from hf_flexseq.attention.uploads import Uploads
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.layers import Scores
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard, remapped
from hf_flexseq.program.builder import Builder, Tables
from hf_flexseq.program.exchange import STRAIGHT, Exchange, Label, post
from hf_flexseq.program.instructions import INPUT, WIDE, LayerShape
from hf_flexseq.schedule.routing import NicFigures, Transfer, make_routing
from hf_flexseq.topology import Topology
from tests.plans import random_plan
from tests.ranks import join, run_ranks, run_threads
from tests.routed import routed_exchanges

TOPOLOGY = Topology(nodes=2, ranks_per_node=2)
LINKS = NicFigures(
    ranks_per_node=2, nics_per_node=2, inside_s=1e-15, across_s=1e-9, transfer_s=0.0
)
CPU = torch.device("cpu")
PACKS = [(64,), (31, 1, 2, 17, 13, 29), (5, 3), (1,), (40, 40)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def attention(communicator, micro_batch, lengths, dtype, links):
    """Bytes of this rank's out, dq, dk and dv."""
    shard = make_shard(micro_batch, lengths, communicator.rank)
    if micro_batch.remap:
        shard = remapped(shard, micro_batch, lengths, TOPOLOGY)
    seq_ctx = SequenceContext(shard, communicator, choose_kernel(CPU, dtype, 8), CPU, links=links)
    generator = torch.Generator().manual_seed(communicator.rank)
    q, k, v, dout = (
        torch.randn(shard.linear_tokens, h, 8, generator=generator).to(dtype) for h in (3, 1, 1, 3)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sequence_parallel_attention(q, k, v, seq_ctx)
    out.backward(dout)
    return [
        x.detach().contiguous().view(torch.uint8).tolist() for x in (out, q.grad, k.grad, v.grad)
    ]


@pytest.fixture
def routed():
    """The ranks whose programs have a routed exchange, once for each that they have."""
    with routed_exchanges() as ranks:
        yield ranks


def compare(rank, world_size, cases, routed):
    """Of each (micro-batch, lengths, dtype): the results straight and routed, and how many
    exchanges were routed."""
    communicator = join(TOPOLOGY)
    found = []
    for case in cases:
        if case[0].remap or case[0].groups_of(rank):
            before = routed.count(rank)
            straight, by_routes = (
                attention(communicator, *case, links) for links in (None, LINKS)
            )
            found.append((straight, by_routes, routed.count(rank) - before))
    return found


def assert_same(by_rank):
    for found in by_rank:
        for straight, routed, _ in found:
            assert straight == routed


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
def test_attention_is_the_same_to_the_bit(strategy, routed):
    groups = [
        Group(ranks=(0, 1, 2, 3), sequences=tuple(range(len(p))), strategy=strategy) for p in PACKS
    ]
    cases = [
        (MicroBatch(groups=(g,)), p, dtype)
        for g, p in zip(groups, PACKS, strict=True)
        for dtype in DTYPES
    ]
    by_rank = run_threads(compare, 4, cases, routed)
    assert_same(by_rank)
    counts = [[count for *_, count in found] for found in by_rank]
    assert counts == counts[:1] * 4, "ranks differ about what is routed"
    assert all(counts[0][: len(DTYPES)]), "no exchange of a sequence of 64 tokens was routed"


def test_a_remapping_is_the_same_to_the_bit_and_passed_on_by_who_gives_nothing(routed):
    lengths = (100, 30, 4, 2)  # rank 0 gives to all; the others' NICs are idle
    groups = tuple(Group(ranks=(rank,), sequences=(rank,), strategy="local") for rank in range(4))
    cases = [(MicroBatch(groups=groups, remap=True), lengths, dtype) for dtype in DTYPES]
    by_rank = run_threads(compare, 4, cases, routed)
    assert_same(by_rank)
    # to and from the groups, forward and backward
    assert all(count == 4 for found in by_rank for *_, count in found)


def test_random_plans_are_the_same_to_the_bit(routed):
    rng = random.Random(0)
    cases = []
    while len(cases) < 60:
        plan = random_plan([rng.choice((1, 3, 9, 40)) for _ in range(8)], 4, rng, nodes=2)
        cases += [(micro_batch, plan.lengths, torch.float32) for micro_batch in plan.micro_batches]
    by_rank = run_threads(compare, 4, cases, routed)
    assert_same(by_rank)
    assert all(sum(count for *_, count in found) > 100 for found in by_rank)


SHAPE = LayerShape(query_heads=3, kv_heads=1, head_dim=5, dtype="bfloat16")
KINDS = (((3, 5), INPUT), ((3,), WIDE), ((2,), WIDE))  # shape of a row, and dtype


def exchange_at_random(rank, world_size, rounds):
    """Random tensors in random exchanges, some ranks without a part in them; what came, and what
    should have."""
    communicator, shared = join(TOPOLOGY), random.Random(0)
    found, routed = [], 0
    for n in range(rounds):
        pairs = shared.sample(
            [(a, b) for a in range(4) for b in range(4) if a != b], shared.randint(1, 6)
        )
        sent = {pair: _tensors(shared.randint(1, 500), seed) for seed, pair in enumerate(pairs)}
        transfers = tuple(
            Transfer(*pair, sum(-(-x.nbytes // 16) * 16 for x in xs)) for pair, xs in sent.items()
        )
        decided = make_routing(transfers, LINKS)
        program, inputs, wanted = _program(rank, sent, decided, tag=8 * (n % 50))
        bound = BoundProgram(program, Uploads(Tables(), CPU), communicator, None, torch.bfloat16)
        came, _ = bound.run(inputs, Scores(1.0))
        found += [torch.equal(x, y) for x, y in zip(came, wanted, strict=True)]
        routed += bool(decided.paths)
    return found, routed


def _program(rank, sent, routing, tag):
    """The program of a rank's part in an exchange, its inputs, and what should come of it."""
    b = Builder(Tables(), SHAPE, rank=rank, wide=False)
    inputs, values = [], {}
    for pair, tensors in sent.items():
        if pair[0] == rank:
            values[pair] = _inputs(b, tensors)
            inputs += tensors
    label = Label(None, lambda peer, sent: "a message")
    exchange = Exchange(b, tag, label, routing=routing or STRAIGHT)
    came, wanted = [], []
    for pair, of_pair in values.items():
        exchange.send(of_pair, pair[1])
    likes = [b.empty((1, *shape), dtype) for shape, dtype in KINDS]
    for pair, tensors in sent.items():
        if pair[1] == rank:
            came += exchange.recv(likes, len(tensors[0]), pair[0])
            wanted += tensors
    post(b, [exchange])
    exchange.wait()
    return b.program(tuple(came)), inputs, wanted


def _inputs(b, tensors):
    values = []
    for tensor, (shape, dtype) in zip(tensors, KINDS, strict=True):
        values.append(b.input((len(tensor), *shape), dtype))
    return values


def _tensors(rows, seed):
    """As a message of the backward: of several types and shapes."""
    options = {"generator": torch.Generator().manual_seed(seed)}
    return [
        torch.randn(rows, 3, 5, **options).bfloat16(),
        torch.randn(rows, 3, **options),
        torch.randn(rows, 2, **options),
    ]


@pytest.mark.parametrize(
    "start", [run_threads, pytest.param(run_ranks, marks=pytest.mark.processes)]
)
def test_random_exchanges_bring_what_was_sent(start):
    by_rank = start(exchange_at_random, 4, 150)
    assert all(all(found) and found for found, _ in by_rank)
    assert {routed for _, routed in by_rank} == {by_rank[0][1]}
    assert by_rank[0][1] > 50
