"""Attention under random plans against dense softmax attention in one process, in float64."""

import random

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.shard import make_shard
from tests.plans import random_plan
from tests.ranks import run_ranks

HEAD_DIM = 8


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal softmax attention of one sequence, [length, heads, head_dim], written out."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def sequence_tensors(length: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    """q, k, v and dout of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, h, HEAD_DIM) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def reference(length: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    """out, dq, dk, dv of one sequence."""
    q, k, v, dout = sequence_tensors(length, heads, kv_heads, seed)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = dense_attention(q, k, v)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def on_shard(tensors, which, shard):
    """Tensor `which` of every slice of the shard, in row order; a rank may work for a group and hold none of it."""
    return torch.cat([tensors[0][which][:0], *(tensors[s.sequence][which][s.start : s.stop] for s in shard.slices)])


def compare_with_dense(communicator, micro_batch, lengths, heads, kv_heads):
    """The largest relative error of this rank's out, dq, dk, dv in one micro-batch."""
    shard = make_shard(micro_batch, lengths, communicator.rank)
    if not shard.zones:
        return 0.0
    kernel = choose_kernel(torch.device("cpu"), torch.float64, HEAD_DIM)
    seq_ctx = SequenceContext(shard, communicator, kernel, torch.device("cpu"))
    inputs = {i: sequence_tensors(n, heads, kv_heads, i) for i, n in enumerate(lengths)}
    expected = {i: reference(n, heads, kv_heads, i) for i, n in enumerate(lengths)}
    q, k, v, dout = (on_shard(inputs, x, shard) for x in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sequence_parallel_attention(q, k, v, seq_ctx)
    out.backward(dout)
    errors = []
    for index, found in enumerate((out.detach(), q.grad, k.grad, v.grad)):
        wanted = on_shard(expected, index, shard)
        scale = max(float(e[index].abs().max()) for e in expected.values())
        errors.append(float((found - wanted).abs().sum()) / scale)
    return max(errors)


def run_random_plans(rank, world_size, heads, kv_heads, lengths, plans, use_blocks):
    communicator = Communicator(use_blocks=use_blocks)
    rng = random.Random(world_size * 1000 + heads)
    errors = [
        compare_with_dense(communicator, micro_batch, lengths, heads, kv_heads)
        for _ in range(plans)
        for micro_batch in random_plan(lengths, world_size, rng).micro_batches
    ]
    return max(errors)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 1), (3, 1)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_plans_are_exact(world_size, heads, kv_heads):
    lengths = [1, 2, 17, 5, 31, 3, 1, 40]
    errors = run_ranks(run_random_plans, world_size, heads, kv_heads, lengths, 6, world_size != 3)
    assert max(errors) < 1e-12


def run_one_group(rank, world_size, strategy, heads, kv_heads, lengths):
    group = Group(ranks=tuple(range(world_size)), sequences=tuple(range(len(lengths))), strategy=strategy)
    return compare_with_dense(Communicator(), MicroBatch(groups=(group,)), lengths, heads, kv_heads)


@pytest.mark.parametrize("strategy", ["ulysses", "zigzag"])
@pytest.mark.parametrize(("world_size", "heads", "kv_heads"), [(5, 4, 2), (6, 4, 4), (7, 8, 2)])
def test_degrees_that_divide_nothing_are_exact(world_size, heads, kv_heads, strategy):
    errors = run_ranks(run_one_group, world_size, strategy, heads, kv_heads, [1, 2, 17, 13, 29])
    assert max(errors) < 1e-12


def run_in_bfloat16(rank, world_size, strategy, length):
    """The error of bfloat16 attention over the group, and of one bfloat16 kernel call, against float64."""
    group = Group(ranks=tuple(range(world_size)), sequences=(0,), strategy=strategy)
    shard = make_shard(MicroBatch(groups=(group,)), [length], rank)
    kernel = choose_kernel(torch.device("cpu"), torch.bfloat16, HEAD_DIM)
    tensors = [x.bfloat16() for x in sequence_tensors(length, 4, 2, 0)]
    expected = dense_attention(*(x.double() for x in tensors[:3]))
    mine = torch.cat([torch.arange(s.start, s.stop) for s in shard.slices])
    seq_ctx = SequenceContext(shard, Communicator(), kernel, torch.device("cpu"))
    out = sequence_parallel_attention(*(x[mine] for x in tensors[:3]), seq_ctx)
    assert out.dtype == torch.bfloat16
    alone = SequenceContext(
        make_shard(MicroBatch(groups=(Group(ranks=(rank,), sequences=(0,), strategy="local"),)), [length], rank),
        Communicator(),
        kernel,
        torch.device("cpu"),
    )
    single = sequence_parallel_attention(*tensors[:3], alone)
    return float((out.double() - expected[mine]).norm()), float((single.double() - expected)[mine].norm())


@pytest.mark.parametrize("strategy", ["ulysses", "zigzag"])
def test_bfloat16_stays_close_to_one_kernel(strategy):
    results = run_ranks(run_in_bfloat16, 2, strategy, 96)
    assert sum(found for found, _ in results) <= 1.5 * sum(single for _, single in results)
