"""Attention of one layer over all the groups this rank works in, as one autograd node.

    rows outside of attention  --remap-->  rows of the groups  --zones, woven-->  results of the
    groups  --remap-->  results outside of attention

One node, not one per group: autograd then cannot reorder the groups' communication, and in the
backward too they run together (`weave.py`), in the same order on every rank.

There are two such nodes. The plain one saves what every zone asks for. The one for layers under
activation checkpointing (`remat.py`) saves this rank's own rows alone.

The slow, obvious twin is `dense_attention` in `tests/attention/test_sequence_parallel.py`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hf_flexseq.attention.remat import Kept, KeptAttention, Region, checkpointed_region
from hf_flexseq.attention.types import Saved, Tensors, ZoneAttention, joined
from hf_flexseq.attention.weave import run_zones


class AttentionContext(Protocol):
    """All that one layer's attention must know of the tokens that this rank works on.

    `context.SequenceContext` says it of a micro-batch, `pipeline.context.LayerContext` of a chunk
    in a pipeline's stage.
    """

    @property
    def zones(self) -> tuple[ZoneAttention, ...]:
        """The attention of every group of this rank, widest group first."""

    @property
    def kept(self) -> KeptAttention | None:
        """Results that wait for the replay of their layers; None where none are kept."""

    @property
    def linear_tokens(self) -> int:
        """Tokens this rank holds in norms, MLP and head."""

    def linear_to_attention(self, *tensors: torch.Tensor) -> Tensors:
        """Move each [linear tokens, heads, head_dim] -> [attention tokens, heads, head_dim]."""

    def attention_to_linear(self, *tensors: torch.Tensor) -> Tensors:
        """Move each [attention tokens, heads, head_dim] -> [linear tokens, heads, head_dim]."""


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
    shard's number of tokens.
    """
    if q.shape[0] != seq_ctx.linear_tokens:
        raise ValueError(
            f"the shard has {seq_ctx.linear_tokens} tokens, but the queries are {tuple(q.shape)}"
        )
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
        out, saved = _attend(q, k, v, seq_ctx, scale)
        ctx.seq_ctx = seq_ctx
        ctx.scale = scale
        # Autograd takes tensors as one flat list, and must have all of them.
        ctx.counts = [len(of_zone.tensors) for of_zone in saved]
        ctx.kv_heads = [of_zone.kv_heads for of_zone in saved]
        flat: list[torch.Tensor] = []
        for of_zone in saved:
            flat.extend(of_zone.tensors)
        ctx.save_for_backward(*flat)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk, dv, shaped as q, k, v are, from dout [tokens, heads, head_dim]."""
        seq_ctx: AttentionContext = ctx.seq_ctx
        flat: Tensors = ctx.saved_tensors
        (dout,) = seq_ctx.linear_to_attention(dout.contiguous())
        steps = []
        start = 0
        for zone, count, kv_heads in zip(seq_ctx.zones, ctx.counts, ctx.kv_heads, strict=True):
            saved = Saved(tuple(flat[start : start + count]), kv_heads)
            steps.append(zone.backward(dout[zone.rows], saved, ctx.scale))
            start += count
        grads = _joined_gradients(run_zones(steps), dout.dtype)
        dq, dk, dv = seq_ctx.attention_to_linear(*grads)
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
        kept = store.take(region)
        if kept is None:
            out, saved = _attend(q, k, v, seq_ctx, scale)
            kept = Kept.of(out, [of_zone.tensors for of_zone in saved])
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
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk, dv, shaped as q, k, v are, from dout [tokens, heads, head_dim]."""
        seq_ctx: AttentionContext = ctx.seq_ctx
        q, k, v, out, flat_lse = ctx.saved_tensors
        q, k, v, out, dout = seq_ctx.linear_to_attention(q, k, v, out, dout.contiguous())
        # The zones' log-sum-exps, which stand in one flat tensor, one after the other.
        lses = flat_lse.split([shape.numel() for shape in ctx.lse_shapes])
        steps = []
        for zone, lse, lse_shape in zip(seq_ctx.zones, lses, ctx.lse_shapes, strict=True):
            rows = zone.rows
            zone_steps = zone.backward_of_rows(
                q=q[rows],
                k=k[rows],
                v=v[rows],
                out=out[rows],
                dout=dout[rows],
                lse=lse.view(lse_shape),
                scale=ctx.scale,
            )
            steps.append(zone_steps)
        grads = _joined_gradients(run_zones(steps), dout.dtype)
        dq, dk, dv = seq_ctx.attention_to_linear(*grads)
        return dq, dk, dv, None, None, None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_ctx: AttentionContext, scale: float
) -> tuple[torch.Tensor, Sequence[Saved]]:
    """Return out [linear tokens, heads, head_dim] and what every zone saves for its backward.

    q: [linear tokens, heads, head_dim]. k, v: [linear tokens, kv_heads, head_dim].
    """
    # 1. to the rows of the groups: each [linear tokens, ...] -> [attention tokens, ...]
    q, k, v = seq_ctx.linear_to_attention(q, k, v)

    # 2. all zones together, each on rows of its own
    steps = []
    for zone in seq_ctx.zones:
        steps.append(zone.forward(q[zone.rows], k[zone.rows], v[zone.rows], scale))
    results = run_zones(steps)
    outs = [out for out, _ in results]
    saved = [of_zone for _, of_zone in results]

    # 3. and back: [attention tokens, heads, head_dim] -> [linear tokens, heads, head_dim]
    (out,) = seq_ctx.attention_to_linear(joined(outs))
    return out, saved


def _joined_gradients(grads: Sequence[Tensors], dtype: torch.dtype) -> Tensors:
    """Join dq, dk and dv of all zones, each [tokens of the zone, ...] -> [tokens, ...].

    They are complete sums by now, and so are rounded to `dtype`, once.
    """
    complete = []
    for parts in zip(*grads, strict=True):
        complete.append(joined([part.to(dtype) for part in parts]))
    return tuple(complete)
