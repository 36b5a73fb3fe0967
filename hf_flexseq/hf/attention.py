"""Register `flexseq` and `flexseq-pipeline` as attention implementations of transformers.

    model.set_attn_implementation("flexseq")            micro-batches of whole sequences
    model.set_attn_implementation("flexseq-pipeline")   chunks on a pipeline stage

Both turn the tensors of transformers, [1, heads, tokens, head_dim], into the packed rows that
`sequence_parallel_attention` takes, [tokens, heads, head_dim], and back.

Registering only the attention function, and no mask function, makes transformers build no mask:
documents are kept apart by the context `seq_ctx`, and a mask [tokens, tokens] never exists.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.pipeline.context import ChunkContext

NAME = "flexseq"
PIPELINE_NAME = "flexseq-pipeline"

# Keywords with which a layer asks for more than causal attention. Each of them changes the result,
# so none may be dropped.
_REFUSED_KEYWORDS = ("sliding_window", "softcap", "s_aux", "position_bias")


class UnsupportedAttention(NotImplementedError):
    """An attention layer asks for something that `flexseq` does not compute."""


def flexseq_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    seq_ctx: SequenceContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the sequences of a micro-batch, wherever their tokens are.

    query [1, heads, tokens, D], key and value [1, kv_heads, tokens, D] -> [1, tokens, heads, D].
    Raises ValueError when called without `seq_ctx`, and NotImplementedError for attention that is
    not plain causal.
    """
    if seq_ctx is None:
        raise ValueError(
            "the attention implementation 'flexseq' works on batches of hf_flexseq alone; to call "
            "or generate with this model yourself, first do "
            "model.set_attn_implementation('sdpa')"
        )
    check_call(module, attention_mask, {"dropout": dropout, **kwargs})
    q, k, v = packed_rows(query, key, value)
    out = sequence_parallel_attention(q, k, v, seq_ctx, scale=scaling)  # [tokens, heads, D]
    return out.unsqueeze(0), None


def pipeline_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    seq_ctx: ChunkContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from the tokens of one chunk to the chunk and to the carried keys before it.

    query [1, heads, tokens, D], key and value [1, kv_heads, tokens, D] -> [1, tokens, heads, D].
    Raises ValueError when called without `seq_ctx`, and NotImplementedError for attention that is
    not plain causal.
    """
    if seq_ctx is None:
        raise ValueError(
            "a pipeline stage runs on chunks of hf_flexseq alone; it cannot be called or generate"
        )
    check_call(module, attention_mask, {"dropout": dropout, **kwargs})
    q, k, v = packed_rows(query, key, value)
    needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
    keeps_grad = torch.is_grad_enabled() and needs_grad
    context = seq_ctx.of_layer(module.layer_idx, keeps_grad=keeps_grad)
    out = sequence_parallel_attention(q, k, v, context, scale=scaling)  # [tokens, heads, D]
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, flexseq_attention)
AttentionInterface.register(PIPELINE_NAME, pipeline_attention)


def packed_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn each tensor, [1, heads, tokens, D], into [tokens, heads, D] of the compute dtype."""
    device_type = query.device.type
    dtype = value.dtype
    # Under autocast the rotary embedding has promoted queries and keys, but not values.
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    return _rows(query, dtype), _rows(key, dtype), _rows(value, dtype)


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # [1, heads, tokens, D] -> [heads, tokens, D] -> [tokens, heads, D]
    return x.squeeze(0).transpose(0, 1).to(dtype).contiguous()


def check_call(
    module: nn.Module, attention_mask: torch.Tensor | None, asked: dict[str, Any]
) -> None:
    """Raise UnsupportedAttention unless a layer asks for causal attention and no more.

    asked: keyword arguments of the layer's call.
    """
    unsupported = []
    if attention_mask is not None:
        unsupported.append("a mask of its own")
    if _is_causal(module, asked) is False:
        unsupported.append("attention in both directions")
    if asked.get("dropout"):
        unsupported.append("dropout in attention")
    for name in _REFUSED_KEYWORDS:
        if asked.get(name) is not None:
            unsupported.append(name)
    if unsupported:
        raise UnsupportedAttention(
            f"{type(module).__name__} asks for {', '.join(unsupported)}; hf_flexseq computes "
            "causal attention"
        )


def _is_causal(module: nn.Module, asked: dict[str, Any]) -> bool | None:
    """Return what the call says about causality, else what the layer says, else None."""
    called_with: bool | None = asked.get("is_causal")
    if called_with is not None:
        return called_with
    of_layer: bool | None = getattr(module, "is_causal", None)
    return of_layer
