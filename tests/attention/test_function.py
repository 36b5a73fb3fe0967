"""What autograd and a model may do around attention: memory in any order, several backwards, and
what is refused."""

import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.attention.replay import Replay
from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.published.zeppelin.always import Always
from tests.ranks import join, run_threads

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LENGTHS = (23, 40, 31, 9)
RANKS = 4


def context_of(rank, strategy, dtype=torch.float64):
    """A rank's context in a group of all ranks."""
    communicator = join(Topology(nodes=2, ranks_per_node=RANKS // 2))
    group = Group(ranks=tuple(range(RANKS)), sequences=(0, 1, 2, 3), strategy=strategy)
    shard = make_shard(MicroBatch(groups=(group,)), LENGTHS, rank)
    kernel = choose_kernel(CPU, dtype, HEAD_DIM)
    return SequenceContext(shard, communicator, kernel, CPU)


def tensors_of(rank, tokens, dtype=torch.float64):
    """q, k, v and dout [tokens, heads, head_dim] of a rank."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def alone(dtype=torch.float64):
    """A context of one rank, with its q, k, v and dout."""
    communicator = join(Topology(nodes=1, ranks_per_node=1))
    group = Group(ranks=(0,), sequences=(0, 1, 2, 3), strategy="local")
    shard = make_shard(MicroBatch(groups=(group,)), LENGTHS, 0)
    context = SequenceContext(shard, communicator, choose_kernel(CPU, dtype, HEAD_DIM), CPU)
    return context, tensors_of(0, sum(LENGTHS), dtype)


def in_order(x, order):
    """x [tokens, heads, head_dim] with its dimensions in this order in memory."""
    back = [order.index(dim) for dim in range(3)]
    return x.permute(order).contiguous().permute(back)


def gradients_of(context, q, k, v, dout):
    """out, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sequence_parallel_attention(*leaves, context)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def run_orders(rank, world_size, strategy):
    context = context_of(rank, strategy)
    tensors = tensors_of(rank, context.tokens)
    expected = gradients_of(context, *tensors)
    differing = []
    for order in ((1, 0, 2), (2, 0, 1), (2, 1, 0)):
        found = gradients_of(context, *[in_order(x, order) for x in tensors])
        if not all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)):
            differing.append(order)
    return differing


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "local"])
def test_tensors_may_lie_in_memory_in_any_order(strategy):
    assert run_threads(run_orders, RANKS, strategy, seconds=60) == [[]] * RANKS


def run_twice(rank, world_size, strategy):
    context = context_of(rank, strategy)
    *leaves, dout = tensors_of(rank, context.tokens)
    leaves = [x.requires_grad_() for x in leaves]
    out = sequence_parallel_attention(*leaves, context)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, dout)
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "local"])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(strategy):
    assert run_threads(run_twice, RANKS, strategy, seconds=60) == [True] * RANKS


def run_moves(rank, world_size, checkpointed, dtype):
    """out, dq, dk and dv of this rank, of sequences that rank 0 attends to alone."""
    topology = Topology(nodes=2, ranks_per_node=RANKS // 2)
    communicator = join(topology)
    group = Group(ranks=(0,), sequences=(0, 1, 2, 3), strategy="local")
    passes = Always(topology)
    shard = passes.shard(MicroBatch(groups=(group,)), LENGTHS, rank)
    kernel = choose_kernel(CPU, dtype, HEAD_DIM)
    context = SequenceContext(shard, communicator, kernel, CPU, passes=passes)
    *leaves, dout = tensors_of(rank, shard.tokens, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    if checkpointed:
        out = checkpoint(sequence_parallel_attention, *leaves, context, use_reentrant=False)
    else:
        out = sequence_parallel_attention(*leaves, context)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_ranks_that_only_move_tokens_have_the_results_of_one(checkpointed, dtype):
    by_rank = run_threads(run_moves, RANKS, checkpointed, dtype, seconds=60)
    found = [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
    (expected,) = run_threads(
        attend_alone, 1, [len(out) for out, *_ in by_rank], dtype, seconds=60
    )
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def attend_alone(rank, world_size, tokens, dtype):
    """out, dq, dk and dv of the tokens of all ranks, tokens of each, on one."""
    context, _ = alone(dtype)
    by_rank = [tensors_of(other, count, dtype) for other, count in enumerate(tokens)]
    return gradients_of(context, *[torch.cat(parts) for parts in zip(*by_rank, strict=True)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_repeated_heads_are_rounded_once(dtype):
    small = torch.finfo(dtype).eps / 2  # what 1 does not notice, but for several of it
    grads = torch.tensor([1.0, small, small, small, small, 3.0], dtype=dtype).view(1, 6, 1)
    sums = Replay.sum_heads(None, grads, torch.tensor([0, 0, 0, 0, 0, 1]), 2)
    assert sums.dtype == dtype
    assert sums.flatten().tolist() == [1.0 + 4 * small, 3.0]


def differentiate_twice(rank, world_size):
    context, (*leaves, dout) = alone()
    leaves = [x.requires_grad_() for x in leaves]
    out = sequence_parallel_attention(*leaves, context)
    dq, *_ = torch.autograd.grad(out, leaves, dout.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError) as raised:
        dq.sum().backward()
    return str(raised.value)


def test_a_gradient_of_gradients_is_refused():
    (said,) = run_threads(differentiate_twice, 1, seconds=60)
    assert "once_differentiable" in said


def mix_dtypes(rank, world_size):
    context, (q, k, v, _) = alone()
    with pytest.raises(ValueError) as raised:
        sequence_parallel_attention(q, k.float(), v, context)
    return str(raised.value)


def test_queries_and_keys_of_different_dtypes_are_refused():
    (said,) = run_threads(mix_dtypes, 1, seconds=60)
    assert re.search("float64.*float32.*float64", said), said
