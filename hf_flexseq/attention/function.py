"""Attention of one layer over all the groups this rank works in, as one autograd node.

One node, not one per group: autograd then cannot reorder the groups' communication, and in the
backward too they run together (`zones.py`), in the same order on every rank.
"""

from collections.abc import Sequence

import torch

from hf_flexseq.attention.context import SequenceContext
from hf_flexseq.attention.local import Tensors
from hf_flexseq.attention.remat import Kept, checkpointed_region
from hf_flexseq.attention.weave import run_zones


def sequence_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_ctx: SequenceContext,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention of every sequence over itself, wherever its tokens are.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], of this rank's shard, rotary
    embedding applied. Returns [tokens, heads, head_dim]. scale defaults to head_dim ** -0.5.
    Collective over the groups of the shard. Raises ValueError when the tensors do not have the
    shard's number of tokens.
    """
    if q.shape[0] != seq_ctx.linear_tokens:
        raise ValueError(
            f"the shard has {seq_ctx.linear_tokens} tokens, but the queries are {tuple(q.shape)}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    region = checkpointed_region() if seq_ctx.kept is not None else None
    if region is None or not seq_ctx.kept.serves(region):
        return _SequenceParallelAttention.apply(q, k, v, seq_ctx, scale)
    return _CheckpointedAttention.apply(q, k, v, seq_ctx, scale, region)


class _SequenceParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, seq_ctx, scale):  # type: ignore[no-untyped-def]
        out, saved = _remapped(q, k, v, seq_ctx, scale)
        ctx.seq_ctx, ctx.scale = seq_ctx, scale
        ctx.counts = [len(kept) for kept in saved]
        ctx.save_for_backward(*(tensor for kept in saved for tensor in kept))
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        tensors = iter(ctx.saved_tensors)
        (dout,) = ctx.seq_ctx.arriving(dout.contiguous())
        grads = []
        for zone, count in zip(ctx.seq_ctx.zones, ctx.counts, strict=True):
            kept = tuple(next(tensors) for _ in range(count))
            grads.append(zone.backward(dout[zone.rows], kept, ctx.scale))
        return *ctx.seq_ctx.leaving(*_joined(run_zones(grads), dout.dtype)), None, None


class _CheckpointedAttention(torch.autograd.Function):
    """The same in a region that will be replayed; see `remat.py`. What it saves is this rank's own
    rows, which the replay has without communication: whatever a strategy needs in another layout
    it makes in the backward."""

    @staticmethod
    def forward(ctx, q, k, v, seq_ctx, scale, region):  # type: ignore[no-untyped-def]
        kept = seq_ctx.kept.take(region) or Kept.of(*_remapped(q, k, v, seq_ctx, scale))
        if not region.replays:
            seq_ctx.kept.put(region, kept)
        ctx.seq_ctx, ctx.scale, ctx.shapes = seq_ctx, scale, kept.lse_shapes
        out = kept.out.detach()  # what is kept must not come to hold the graph
        ctx.save_for_backward(q, k, v, out, kept.lse)
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        *rows, lse = ctx.saved_tensors
        rows = ctx.seq_ctx.arriving(*rows, dout.contiguous())
        lses = lse.split([shape.numel() for shape in ctx.shapes])
        grads = []
        for zone, own_lse, shape in zip(ctx.seq_ctx.zones, lses, ctx.shapes, strict=True):
            own = [x[zone.rows] for x in rows]
            grads.append(zone.backward_of_rows(*own, own_lse.view(shape), ctx.scale))
        return *ctx.seq_ctx.leaving(*_joined(run_zones(grads), rows[-1].dtype)), None, None, None


def _remapped(q, k, v, seq_ctx, scale):  # type: ignore[no-untyped-def]
    """`_attend` on rows as they stand outside of attention."""
    out, saved = _attend(*seq_ctx.arriving(q, k, v), seq_ctx, scale)
    (out,) = seq_ctx.leaving(out)
    return out, saved


def _attend(q, k, v, seq_ctx, scale):  # type: ignore[no-untyped-def]
    """The result, and for every zone what its backward needs, the last of which is its
    log-sum-exp."""
    results = run_zones(
        [zone.forward(q[zone.rows], k[zone.rows], v[zone.rows], scale) for zone in seq_ctx.zones]
    )
    outs, saved = zip(*results, strict=True)
    return outs[0] if len(outs) == 1 else torch.cat(outs), saved


def _joined(grads: Sequence[Tensors], dtype: torch.dtype) -> Tensors:
    """dq, dk, dv of all zones, which are sums by now and so are rounded, once."""
    rounded = ([part.to(dtype) for part in parts] for parts in zip(*grads, strict=True))
    return tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in rounded)
