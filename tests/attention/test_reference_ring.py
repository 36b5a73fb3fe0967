"""The ring that is written out, against dense attention and the compiled ring, in float64."""

from functools import partial

import torch

from hf_flexseq.attention import sequence_parallel_attention
from tests.attention.dense import dense_attention
from tests.attention.group import context_of, forward_backward, nodes_of, qkv_and_dout
from tests.attention.reference_ring import ring_backward, ring_forward
from tests.ranks import join, run_threads

LENGTH, HEADS, SIZE = 41, 2, 8


def of_rank(rank, world_size):
    """out, dq, dk, dv of the compiled ring, and the positions that a rank has."""
    seq_ctx = context_of(join(nodes_of(world_size)), "balanced", (LENGTH,), head_dim=SIZE)
    given = [qkv_and_dout(0, LENGTH, HEADS, HEADS, SIZE)]
    layer = partial(sequence_parallel_attention, seq_ctx=seq_ctx)
    found = forward_backward(given, seq_ctx.shard, layer)
    (part,) = seq_ctx.shard.slices
    return found, part.start


def test_the_ring_in_one_page_is_dense_attention_and_what_is_compiled():
    *qkv, dout = qkv_and_dout(0, LENGTH, HEADS, HEADS, SIZE)
    by_rank = sorted(run_threads(of_rank, 3), key=lambda found: found[1])
    lengths = [len(out) for (out, *_), _ in by_rank]
    chunks = [x.split(lengths) for x in qkv]
    outs, lses = ring_forward(*chunks)
    written = [outs, *ring_backward(dout.split(lengths), *chunks, outs, lses)]

    qkv = [x.clone().requires_grad_() for x in qkv]
    dense = dense_attention(*qkv)
    dense.backward(dout)
    for found, compiled, wanted in zip(
        written,
        zip(*(tensors for tensors, _ in by_rank), strict=True),
        (dense.detach(), *(x.grad for x in qkv)),
        strict=True,
    ):
        torch.testing.assert_close(torch.cat(found), wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat(compiled), torch.cat(found), rtol=0, atol=1e-12)
