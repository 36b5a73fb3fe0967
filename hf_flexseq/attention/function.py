"""Attention of one layer over all the groups this rank works in, as one autograd node.

    q, k, v  --program (`program/compile.py`), replayed (`replay.py`)-->  out

One node, not one per group: autograd then cannot reorder the groups' communication, and in the
backward too they run together, in the same order on every rank.

There are two such nodes. The plain one saves what every zone asks for. The one for layers under
activation checkpointing (`remat.py`) saves this rank's own rows alone.

The slow, obvious twin is `dense_attention` in `tests/attention/test_sequence_parallel.py`.
"""

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from hf_flexseq.attention.programs import (
    BACKWARD,
    BACKWARD_OF_ROWS,
    FORWARD,
    MicroBatchPrograms,
    layer_shape,
)
from hf_flexseq.attention.remat import Kept, KeptAttention, Region, checkpointed_region
from hf_flexseq.attention.replay import CutAttention, Tensors
from hf_flexseq.kernels.cuda_flash import rows_contiguous


class AttentionContext(Protocol):
    """All that one layer's attention must know of the tokens that this rank works on.

    `context.SequenceContext` says it of a micro-batch, `pipeline.context.LayerContext` of a chunk
    in a pipeline's stage.
    """

    @property
    def programs(self) -> MicroBatchPrograms:
        """What this rank does."""

    @property
    def cut(self) -> CutAttention | None:
        """Attention of the part of a cut sequence; None where all are whole."""

    @property
    def kept(self) -> KeptAttention | None:
        """Results that wait for the replay of their layers; None where none are kept."""

    @property
    def linear_tokens(self) -> int:
        """Tokens this rank holds in norms, MLP and head."""


def sequence_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_ctx: AttentionContext,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute causal attention of every sequence over itself, wherever its tokens are.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], of this rank's shard, rotary
    embedding applied. Returns [tokens, heads, head_dim]. scale defaults to head_dim ** -0.5.
    Collective over the groups of the shard. Raises ValueError when the tensors do not have the
    shard's number of tokens, or one dtype. Its gradients have none themselves.
    """
    if q.shape[0] != seq_ctx.linear_tokens:
        raise ValueError(
            f"the shard has {seq_ctx.linear_tokens} tokens, but the queries are {tuple(q.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"queries are {q.dtype}, keys {k.dtype} and values {v.dtype}: give all three one dtype"
        )
    # The numbers of a head lie together, as Triton's operations want them.
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if seq_ctx.kept is not None:
        region = checkpointed_region()
        if region is not None and seq_ctx.kept.serves(region):
            return _CheckpointedAttention.apply(q, k, v, seq_ctx, scale, region)
    return _SequenceParallelAttention.apply(q, k, v, seq_ctx, scale)


class _SequenceParallelAttention(torch.autograd.Function):
    """Attention that saves, in every zone's own layout, what the zone's backward needs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seq_ctx: AttentionContext,
        scale: float,
    ) -> torch.Tensor:
        """Return out [tokens, heads, head_dim] from q and k, v [tokens, kv_heads, head_dim]."""
        ctx.seq_ctx = seq_ctx
        ctx.scale = scale
        ctx.shape = layer_shape(q, k)
        out, saved = _attend(q, k, v, seq_ctx, scale)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk, dv, shaped as q, k, v are, from dout [tokens, heads, head_dim]."""
        seq_ctx: AttentionContext = ctx.seq_ctx
        program = seq_ctx.programs.find(BACKWARD, ctx.shape)
        inputs = (dout.contiguous(), *ctx.saved_tensors)
        (dq, dk, dv), _ = program.run(inputs, ctx.scale, seq_ctx.cut)
        return dq, dk, dv, None, None


class _CheckpointedAttention(torch.autograd.Function):
    """Attention in a region that will be replayed, or is (`remat.py`).

    What it saves is this rank's own rows, which the replay has without communication: whatever a
    strategy needs in another layout it makes in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seq_ctx: AttentionContext,
        scale: float,
        region: Region,
    ) -> torch.Tensor:
        """Return out [tokens, heads, head_dim]: computed in the first run, taken in the replay."""
        store = seq_ctx.kept
        assert store is not None, "this context keeps no attention for a replay"
        ctx.shape = layer_shape(q, k)
        kept = store.take(region)
        if kept is None:
            out, saved = _attend(q, k, v, seq_ctx, scale)
            program = seq_ctx.programs.find(FORWARD, ctx.shape).program
            kept = Kept.of(out, program.log_sum_exps(saved))
        if not region.replays:
            store.put(region, kept)
        ctx.seq_ctx = seq_ctx
        ctx.scale = scale
        ctx.lse_shapes = kept.lse_shapes
        # What is kept must not come to hold the graph.
        out = kept.out.detach()
        ctx.save_for_backward(q, k, v, out, kept.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk, dv, shaped as q, k, v are, from dout [tokens, heads, head_dim]."""
        seq_ctx: AttentionContext = ctx.seq_ctx
        q, k, v, out, flat_lse = ctx.saved_tensors
        # The zones' log-sum-exps, which stand in one flat tensor, one after the other.
        flat = flat_lse.split([shape.numel() for shape in ctx.lse_shapes])
        lses = [lse.view(shape) for lse, shape in zip(flat, ctx.lse_shapes, strict=True)]
        program = seq_ctx.programs.find(BACKWARD_OF_ROWS, ctx.shape)
        inputs = (q, k, v, out, dout.contiguous(), *lses)
        (dq, dk, dv), _ = program.run(inputs, ctx.scale, seq_ctx.cut)
        return dq, dk, dv, None, None, None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_ctx: AttentionContext, scale: float
) -> tuple[torch.Tensor, Tensors]:
    """Return out [linear tokens, heads, head_dim] and what all zones save for their backward.

    q: [linear tokens, heads, head_dim]. k, v: [linear tokens, kv_heads, head_dim].
    """
    program = seq_ctx.programs.find(FORWARD, layer_shape(q, k))
    (out,), saved = program.run((q, k, v), scale, seq_ctx.cut)
    return out, saved
