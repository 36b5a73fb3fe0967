"""Register `flexseq` as an attention implementation of transformers.

    model.set_attn_implementation("flexseq")

It serves micro-batches of whole sequences, and chunks on a pipeline stage: `seq_ctx` says which.
It turns the tensors of transformers, [1, heads, tokens, head_dim], into the packed rows that
`sequence_parallel_attention` takes, [tokens, heads, head_dim], and back.

Registering only the attention function, and no mask function, makes transformers build no mask:
documents are kept apart by the context `seq_ctx`, and a mask [tokens, tokens] never exists. What a
mask would say about windows and chunks, the configuration says, too (`model/layer_kinds.py`); both
are compared when a model is attached (`model/trial.py`).
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.hf.model.calls import read_call
from hf_flexseq.pipeline.context import ChunkContext

NAME = "flexseq"


def flexseq_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    seq_ctx: SequenceContext | ChunkContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the sequences of a micro-batch, wherever their tokens are, or from the tokens
    of a pipeline's chunk to the chunk and to the carried keys before it.

    query [1, heads, tokens, D], key [1, kv_heads, tokens, D] and value [1, kv_heads, tokens, V]
    -> [1, tokens, heads, V]. Raises ValueError when called without `seq_ctx`, and
    NotImplementedError for attention that is not causal, with a window or in chunks.
    """
    if seq_ctx is None:
        raise ValueError(
            "the attention implementation 'flexseq' works on batches of hf_flexseq alone; to call "
            "or generate with this model yourself, first do "
            "model.set_attn_implementation('sdpa')"
        )
    asked = read_call(module, attention_mask, {"dropout": dropout, **kwargs})
    qkv = packed_rows(query, key, value)
    given = qkv if asked.sinks is None else (*qkv, asked.sinks)
    needs_grad = any(x.requires_grad for x in given)
    context = seq_ctx.of_layer(
        getattr(module, "layer_idx", None), keeps_grad=torch.is_grad_enabled() and needs_grad
    )
    out = sequence_parallel_attention(
        *qkv,
        context,
        scale=scaling,
        softcap=asked.softcap,
        reach=asked.reach,
        sinks=asked.sinks,
    )  # [tokens, heads, V]
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, flexseq_attention)


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
