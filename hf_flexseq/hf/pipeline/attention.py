"""`flexseq-pipeline` as an attention implementation of transformers: attention of one chunk, with
its carry."""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.hf.attention import check_call, packed_rows
from hf_flexseq.pipeline.context import ChunkContext

NAME = "flexseq-pipeline"


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
    """query [1, heads, tokens, D], key and value [1, kv_heads, tokens, D] -> [1, tokens, heads,
    D].

    Raises ValueError when called without `seq_ctx`, and NotImplementedError for attention that is
    not plain causal.
    """
    if seq_ctx is None:
        raise ValueError(
            "a pipeline stage runs on chunks of hf_flexseq alone; it cannot be called or generate"
        )
    check_call(module, attention_mask, {"dropout": dropout, **kwargs})
    q, k, v = packed_rows(query, key, value)
    keeps_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    context = seq_ctx.of_layer(module.layer_idx, keeps_grad=keeps_grad)
    return sequence_parallel_attention(q, k, v, context, scale=scaling).unsqueeze(0), None


AttentionInterface.register(NAME, pipeline_attention)
