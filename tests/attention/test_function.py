"""What autograd and a model may do around attention: memory in any order, several backwards,
checkpointing, and what is refused."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.attention.replay import Replay
from hf_flexseq.base.registry import STRATEGIES
from tests.attention.group import context_of, nodes_of, qkv_and_dout
from tests.kernels.reference import Reference
from tests.ranks import join, run_threads

HEADS = (4, 2)
LENGTHS = (23, 40, 31, 9)
RANKS = 4


def in_order(x, order):
    """x [tokens, heads, head_dim] with its dimensions in this order in memory."""
    back = [order.index(dim) for dim in range(3)]
    return x.permute(order).contiguous().permute(back)


def results_of(attend, q, k, v, dout, backwards=1):
    """out, dq, dk and dv, of the last of several backwards by one graph."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    for left in reversed(range(backwards)):
        gradients = torch.autograd.grad(out, leaves, dout, retain_graph=left > 0)
    return (out.detach(), *gradients)


def differing(rank, world_size, strategy, heads):
    """In which of the ways in which a model may call it attention has other bits."""
    context = context_of(join(nodes_of(world_size)), strategy, LENGTHS)
    tensors = qkv_and_dout(rank, context.tokens, *heads)
    attend = partial(sequence_parallel_attention, seq_ctx=context)
    expected = results_of(attend, *tensors)
    found = {
        "graph kept": results_of(attend, *tensors, backwards=2),
        # there the backward has q, k, v and out in the token layout
        "checkpointed": results_of(partial(checkpoint, attend, use_reentrant=False), *tensors),
    }
    for order in ((1, 0, 2), (2, 0, 1), (2, 1, 0)):
        found[order] = results_of(attend, *[in_order(x, order) for x in tensors])
    return [
        way
        for way, results in found.items()
        if not all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
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


class Noting(Reference):
    """The reference, and whether transfers were under way when it was called."""

    def __init__(self):
        self.beside = []

    def forward(self, call):
        self.beside.append(call.beside_transfers)
        return super().forward(call)

    def backward(self, call, *given):
        self.beside.append(call.beside_transfers)
        return super().backward(call, *given)


def beside_transfers(rank, world_size, strategy):
    kernel = Noting()
    communicator = join(nodes_of(world_size), use_blocks=True)
    context = context_of(communicator, strategy, LENGTHS, kernel=kernel)
    *qkv, dout = qkv_and_dout(rank, context.tokens, *HEADS)
    results_of(partial(sequence_parallel_attention, seq_ctx=context), *qkv, dout)
    return kernel.beside


@pytest.mark.parametrize(
    ("strategy", "known"),
    [
        ("local", [False] * 2),
        ("ulysses", [False] * 2),  # nothing else is under way inside a node
        # the diagonal, while keys travel; the last half of it, while gradients travel back
        ("zigzag", [True, ..., False, True, ..., True]),
    ],
)
def test_a_kernel_is_told_of_transfers_beside_it(strategy, known):
    for found in run_threads(beside_transfers, 2, strategy):
        if ... not in known:
            assert found == known
            continue
        middle = known.index(...)
        assert found[:middle] == known[:middle]
        assert found[-1] == known[-1]


def test_one_tensor_of_heads_is_sent_as_it_is():
    x = torch.arange(24.0).view(3, 2, 4)
    flat = Replay.flat_heads(None, x)
    assert flat.tolist() == list(range(24))
    assert flat.data_ptr() == x.data_ptr()


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
    q, k, v, dout = (x.clone() for x in qkv_and_dout(0, sum(LENGTHS), *HEADS))
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
