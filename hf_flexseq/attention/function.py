"""Attention of one layer over all the groups this rank works in, as one autograd node.

    q, k, v  --program (`program/compile.py`), replayed (`replay.py`)-->  out

One node, not one per group: autograd then cannot reorder the groups' communication, and in the
backward too they run together, in the same order on every rank.

Two such nodes exist. The plain one saves all tensors for which the zones ask. The one for layers
under activation checkpointing (`remat.py`) saves this rank's own rows alone.

The slow reference is `tests/attention/dense.py`.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_flexseq.attention.programs import MicroBatchPrograms, layer_shape
from hf_flexseq.attention.remat import Kept, KeptAttention, Region, kept_region
from hf_flexseq.attention.replay import CutAttention, Tensors
from hf_flexseq.base.layers import FULL, Reach, Scores
from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.cuda_flash import rows_contiguous
from hf_flexseq.program.compile import BACKWARD, BACKWARD_OF_ROWS, FORWARD
from hf_flexseq.program.instructions import LayerShape


class AttentionContext(Protocol):
    """The tokens that this rank works on, as one layer's attention sees them: a micro-batch's
    `context.SequenceContext`, or `pipeline.context.ChunkAttention`."""

    @property
    def programs(self) -> MicroBatchPrograms:
        """Programs of this rank."""

    @property
    def cut(self) -> CutAttention | None:
        """Attention of the part of a cut sequence; None where all are whole."""

    @property
    def kept(self) -> KeptAttention | None:
        """Results that wait for the replay of their layers; None where none are kept."""

    @property
    def tokens(self) -> int:
        """Tokens this rank holds in norms, MLP and head."""


def sequence_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_ctx: AttentionContext,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    reach: Reach = FULL,
    sinks: torch.Tensor | None = None,
    both_ways: bool = False,
) -> torch.Tensor:
    """Compute causal attention of every sequence over itself, wherever its tokens are.

    q: [tokens, heads, head_dim]; k: [tokens, kv_heads, head_dim]; v: [tokens, kv_heads,
    value_dim], of this rank's shard, rotary embedding applied. Returns [tokens, heads, value_dim].

    scale defaults to head_dim ** -0.5; with a softcap c a scaled score s becomes c tanh(s / c).
    reach: which keys a query reads. sinks: [heads], a score of each head that takes part in every
    softmax, and has no value (gpt-oss). both_ways: whether a query in a block of the context
    (`plan/blocks.py`) reads the later keys of its block, too (Gemma 3). A window leaves out older
    keys only.

    Collective over the groups of the shard. Raises ValueError when the tensors do not have the
    shard's number of tokens, or one dtype. Its gradients have none themselves.
    """
    if q.shape[0] != seq_ctx.tokens:
        raise ValueError(
            f"the shard has {seq_ctx.tokens} tokens, but the queries are {tuple(q.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"queries are {q.dtype}, keys {k.dtype} and values {v.dtype}: give all three one dtype"
        )
    if scale is None:
        scale = q.shape[-1] ** -0.5
    value_dim = v.shape[-1]
    q, k, v = _of_one_width(q, k, v)
    # The numbers of a head lie together, as Triton's operations want them.
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    shape = layer_shape(q, k, reach, sinks, both_ways=both_ways)
    layer = _Layer(seq_ctx, Scores(scale, softcap), shape)
    if sinks is not None:
        sinks = sinks.to(lse_dtype(q.dtype))
    out: torch.Tensor
    region = kept_region(seq_ctx.kept)
    if region is not None:
        out = _CheckpointedAttention.apply(layer, region, q, k, v, sinks)
    else:
        out = _SequenceParallelAttention.apply(layer, q, k, v, sinks)
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


class _Layer(NamedTuple):
    """Arguments of a layer's attention, besides tensors."""

    seq_ctx: AttentionContext
    scores: Scores
    shape: LayerShape

    def run(
        self, direction: str, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[Tensors, Tensors]:
        """Run a program of the layer's micro-batch: return its outputs, and its saved tensors.
        inputs: None stands for sinks that the layer does not have."""
        program = self.seq_ctx.programs.find(direction, self.shape)
        given = [x for x in inputs if x is not None]
        return program.run(given, self.scores, self.seq_ctx.cut)

    def gradients(
        self, direction: str, inputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k, v and sinks, in their shapes; None without sinks."""
        outputs, _ = self.run(direction, inputs)
        return (*outputs, None)[:4]


def _of_one_width(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Pad heads of q, k and v to one size with zeros, which change neither scores nor results."""
    width = max(q.shape[-1], v.shape[-1])
    padded = []
    for x in (q, k, v):
        missing = width - x.shape[-1]
        padded.append(functional.pad(x, (0, missing)) if missing else x)
    return tuple(padded)


class _SequenceParallelAttention(torch.autograd.Function):
    """Attention that saves the tensors for the backward, in every zone's own layout."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, *inputs: torch.Tensor | None) -> torch.Tensor:
        """Return out [tokens, heads, head_dim]. inputs: q, k, v [tokens, ..., head_dim], sinks."""
        ctx.layer = layer
        (out,), saved = layer.run(FORWARD, inputs)
        sinks = inputs[3]
        ctx.save_for_backward(sinks, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `_Layer.gradients` from dout [tokens, heads, head_dim]."""
        inputs = (dout.contiguous(), *ctx.saved_tensors)
        return None, *ctx.layer.gradients(BACKWARD, inputs)


class _CheckpointedAttention(torch.autograd.Function):
    """Attention in a region that will be replayed, or is (`remat.py`). It saves this rank's own
    rows; whatever a strategy needs in another layout is made in the backward."""

    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, region: Region, *inputs: torch.Tensor | None
    ) -> torch.Tensor:
        """Return out [tokens, heads, head_dim]: computed in the first run, taken in the replay."""
        store = layer.seq_ctx.kept
        assert store is not None, "this context keeps no attention for a replay"
        kept = store.take(region)
        if kept is None:
            (out,), saved = layer.run(FORWARD, inputs)
            program = layer.seq_ctx.programs.find(FORWARD, layer.shape).program
            kept = Kept.of(out, program.log_sum_exps(saved))
        if not region.replays:
            store.put(region, kept)
        ctx.layer = layer
        # What is kept must not come to hold the graph.
        out = kept.out.detach()
        ctx.save_for_backward(*inputs, out, *kept.others)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `_Layer.gradients` from dout [tokens, heads, head_dim]."""
        q, k, v, sinks, out, *lses = ctx.saved_tensors
        inputs = (q, k, v, out, dout.contiguous(), sinks, *lses)
        return None, None, *ctx.layer.gradients(BACKWARD_OF_ROWS, inputs)
