"""What autograd and a model may do around attention: memory in any order, several backwards,
checkpointing, and what is refused."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.attention.replay import Replay
from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.kernels.choose import choose_kernel
from tests.attention.group import CPU, context_of, nodes_of
from tests.plans import one_group
from tests.published.zeppelin.always import Always
from tests.ranks import join, run_threads

HEADS = (4, 2)
LENGTHS = (23, 40, 31, 9)
RANKS = 4


def tensors_of(rank, tokens, dtype=torch.float64, heads=HEADS):
    """q, k, v and dout [tokens, heads, head_dim] of a rank."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(tokens, n, 8) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def in_order(x, order):
    """x [tokens, heads, head_dim] with its dimensions in this order in memory."""
    back = [order.index(dim) for dim in range(3)]
    return x.permute(order).contiguous().permute(back)


def results_of(attend, q, k, v, dout):
    """out, dq, dk and dv; and the gradients once more, by the same graph."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return (out.detach(), *first), torch.autograd.grad(out, leaves, dout)


def differing(rank, world_size, strategy, heads):
    """In which of the ways in which a model may call it attention has other bits."""
    context = context_of(join(nodes_of(world_size)), strategy, LENGTHS)
    tensors = tensors_of(rank, context.tokens, heads=heads)
    attend = partial(sequence_parallel_attention, seq_ctx=context)
    expected, again = results_of(attend, *tensors)
    found = {"graph kept": (expected[0], *again)}
    for order in ((1, 0, 2), (2, 0, 1), (2, 1, 0)):
        found[order], _ = results_of(attend, *[in_order(x, order) for x in tensors])
    # there the backward has q, k, v and out in the token layout
    checkpointed = partial(checkpoint, attend, use_reentrant=False)
    *leaves, dout = tensors
    leaves = [x.requires_grad_() for x in leaves]
    out = checkpointed(*leaves)
    found["checkpointed"] = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    return [
        way
        for way, tensors in found.items()
        if not all(torch.equal(x, y) for x, y in zip(tensors, expected, strict=True))
    ]


@pytest.mark.parametrize(
    ("strategy", "heads", "ranks"),
    [
        *((name, HEADS, RANKS) for name in STRATEGIES if name != "local"),
        ("ulysses", (4, 4), 2),
        ("ulysses", (6, 1), 3),
    ],
)
def test_memory_in_any_order_a_second_backward_and_checkpointing_change_no_bit(
    strategy, heads, ranks
):
    assert run_threads(differing, ranks, strategy, heads) == [[]] * ranks


def run_moves(rank, world_size, checkpointed, dtype):
    """out, dq, dk and dv of this rank, of sequences that rank 0 attends to alone."""
    communicator = join(nodes_of(world_size))
    passes = Always(communicator.topology)
    shard = passes.shard(one_group([0], len(LENGTHS), "local"), LENGTHS, rank)
    kernel = choose_kernel(CPU, dtype, 8)
    context = SequenceContext(shard, communicator, kernel, CPU, passes=passes)
    *leaves, dout = tensors_of(rank, shard.tokens, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    attend = partial(sequence_parallel_attention, seq_ctx=context)
    if checkpointed:
        attend = partial(checkpoint, attend, use_reentrant=False)
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def attend_alone(rank, world_size, tokens, dtype):
    """out, dq, dk and dv of the tokens of all ranks, tokens of each, on one."""
    context = context_of(join(nodes_of(1)), "local", LENGTHS, dtype=dtype)
    by_rank = [tensors_of(other, count, dtype) for other, count in enumerate(tokens)]
    whole = [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
    return results_of(partial(sequence_parallel_attention, seq_ctx=context), *whole)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_ranks_that_only_move_tokens_have_the_results_of_one(checkpointed, dtype):
    by_rank = run_threads(run_moves, RANKS, checkpointed, dtype)
    found = [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
    (expected,) = run_threads(attend_alone, 1, [len(out) for out, *_ in by_rank], dtype)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_repeated_heads_are_rounded_once(dtype):
    small = torch.finfo(dtype).eps / 2  # what 1 does not notice, but for several of it
    grads = torch.tensor([1.0, small, small, small, small, 3.0], dtype=dtype).view(1, 6, 1)
    sums = Replay.sum_heads(None, grads, torch.tensor([0, 0, 0, 0, 0, 1]), 2)
    assert sums.dtype == dtype
    assert sums.flatten().tolist() == [1.0 + 4 * small, 3.0]


def refused(rank, world_size):
    """What is said of a gradient of gradients, of mixed dtypes and of a row too many."""
    context = context_of(join(nodes_of(1)), "local", LENGTHS)
    q, k, v, dout = tensors_of(0, sum(LENGTHS))
    said = []
    for mixed in ((q, k.float(), v), (q[1:], k, v)):
        with pytest.raises(ValueError) as raised:
            sequence_parallel_attention(*mixed, context)
        said.append(str(raised.value))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = sequence_parallel_attention(*leaves, context)
    dq, *_ = torch.autograd.grad(out, leaves, dout.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
    return said


def test_other_dtypes_other_rows_and_gradients_of_gradients_are_refused():
    ((dtypes, rows),) = run_threads(refused, 1)
    assert "queries are torch.float64, keys torch.float32 and values torch.float64" in dtypes
    assert "the shard has 103 tokens, but the queries are (102, 4, 8)" in rows
