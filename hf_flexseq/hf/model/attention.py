"""Register `flexseq` as an attention implementation of transformers.

    model.set_attn_implementation("flexseq")

It serves micro-batches of whole sequences and chunks on a pipeline stage, depending on `seq_ctx`.
It converts the tensors of transformers, [1, heads, tokens, head_dim], to the packed rows of
`sequence_parallel_attention`, [tokens, heads, head_dim], and back.

No mask function is registered, so transformers never builds a mask [tokens, tokens]: `seq_ctx`
separates documents. Windows and chunks are read from the configuration (`model/layer_kinds.py`)
and compared with the model's own masks when it is attached (`model/trial.py`).
"""

from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.attention.function import AttentionContext
from hf_flexseq.hf.model.calls import read_call

NAME = "flexseq"


class PlannedCall(Protocol):
    """What a model is called with on planned steps: the `SequenceContext` of a micro-batch, or a
    pipeline's `ChunkContext`."""

    calls: list[Any] | None
    """Modules that have called attention in the forward that runs; None outside of one."""

    def of_layer(self, layer: int | None, *, keeps_grad: bool) -> AttentionContext:
        """Return what the attention of one layer must know, by its index in the model. keeps_grad:
        True if a backward will follow."""


def flexseq_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    seq_ctx: PlannedCall | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the sequences of a micro-batch, across ranks, or from a pipeline's chunk to
    itself and to the carried keys before it.

    query [1, heads, tokens, D], key [1, kv_heads, tokens, D] and value [1, kv_heads, tokens, V]
    -> [1, tokens, heads, V]. Raises ValueError without `seq_ctx`, and NotImplementedError for
    attention that is not causal, with a window or in chunks.
    """
    if seq_ctx is None:
        raise ValueError(
            "the attention implementation 'flexseq' needs a batch of hf_flexseq; to call the "
            "model directly or to generate, first do "
            "model.set_attn_implementation('sdpa')"
        )
    if seq_ctx.calls is not None:
        seq_ctx.calls.append(module)
    asked = read_call(module, attention_mask, {"dropout": dropout, **kwargs})
    qkv = packed_rows(query, key, value)
    given = qkv if asked.sinks is None else (*qkv, asked.sinks)
    needs_grad = any(x.requires_grad for x in given)
    layer = getattr(module, "layer_idx", None)
    context = seq_ctx.of_layer(layer, keeps_grad=torch.is_grad_enabled() and needs_grad)
    out = sequence_parallel_attention(
        *qkv,
        context,
        scale=scaling,
        softcap=asked.softcap,
        reach=asked.reach,
        sinks=asked.sinks,
        both_ways=layer in getattr(seq_ctx, "both_ways", ()),
    )  # [tokens, heads, V]
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, flexseq_attention)


def packed_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert each tensor, [1, heads, tokens, D], to [tokens, heads, D] in the compute dtype."""
    device_type = query.device.type
    dtype = value.dtype
    # Under autocast the rotary embedding promotes queries and keys, but not values.
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    return _rows(query, dtype), _rows(key, dtype), _rows(value, dtype)


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # [1, heads, tokens, D] -> [heads, tokens, D] -> [tokens, heads, D]
    return x.squeeze(0).transpose(0, 1).to(dtype).contiguous()
