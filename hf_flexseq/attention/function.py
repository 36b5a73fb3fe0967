"""Attention of one layer over all the groups this rank works in, as one autograd node."""

import torch

from hf_flexseq.attention.context import SequenceContext


def sequence_parallel_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_ctx: SequenceContext, *, scale: float | None = None
) -> torch.Tensor:
    """Causal attention of every sequence over itself, wherever its tokens are.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], of this rank's shard, rotary embedding applied.
    Returns [tokens, heads, head_dim]. scale defaults to head_dim ** -0.5. Collective over the groups of the shard.
    Raises ValueError when the tensors do not have the shard's number of tokens.
    """
    if q.shape[0] != seq_ctx.tokens:
        raise ValueError(f"the shard has {seq_ctx.tokens} tokens, but the queries are {tuple(q.shape)}")
    return _SequenceParallelAttention.apply(q, k, v, seq_ctx, q.shape[-1] ** -0.5 if scale is None else scale)


class _SequenceParallelAttention(torch.autograd.Function):
    """One node, not one per group: autograd then cannot reorder the groups' communication, and backward too walks
    through them widest first, on every rank alike."""

    @staticmethod
    def forward(ctx, q, k, v, seq_ctx, scale):  # type: ignore[no-untyped-def]
        outs, saved = [], []
        for zone in seq_ctx.zones:
            out, kept = zone.forward(q[zone.rows], k[zone.rows], v[zone.rows], scale)
            outs.append(out)
            saved.append(kept)
        ctx.seq_ctx, ctx.scale = seq_ctx, scale
        ctx.counts = [len(kept) for kept in saved]
        ctx.save_for_backward(*(tensor for kept in saved for tensor in kept))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        tensors = iter(ctx.saved_tensors)
        dout = dout.contiguous()
        grads = []
        for zone, count in zip(ctx.seq_ctx.zones, ctx.counts, strict=True):
            kept = tuple(next(tensors) for _ in range(count))
            grads.append(zone.backward(dout[zone.rows], kept, ctx.scale))
        dq, dk, dv = grads[0] if len(grads) == 1 else (torch.cat(parts) for parts in zip(*grads, strict=True))
        return dq, dk, dv, None, None
