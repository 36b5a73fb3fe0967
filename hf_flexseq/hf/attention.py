"""`flexseq` as an attention implementation of transformers, and what a model must be for it to be exact.

Registering only the attention function, and no mask function, makes transformers build no mask: documents are kept
apart by what `seq_ctx` says, and a mask of tokens x tokens never exists.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention

NAME = "flexseq"
# What an attention layer may ask for beyond causal attention. Each changes the result, so none may be dropped.
_REFUSED_KWARGS = ("sliding_window", "softcap", "s_aux", "position_bias")


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
    """query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim] -> [1, tokens, heads, head_dim].

    Raises ValueError when called without `seq_ctx`, and NotImplementedError for attention that is not plain causal.
    """
    if seq_ctx is None:
        raise ValueError(
            "the attention implementation 'flexseq' works on batches of hf_flexseq alone; to call or generate with "
            "this model yourself, first do model.set_attn_implementation('sdpa')"
        )
    asked = [name for name in _REFUSED_KWARGS if kwargs.get(name) is not None]
    if asked or dropout or attention_mask is not None or kwargs.get("is_causal") is False:
        raise NotImplementedError(
            f"{type(module).__name__} asks for more than causal attention "
            f"({', '.join(asked) or 'dropout, a mask, or both directions'}), which 'flexseq' does not do"
        )
    dtype = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else query.dtype
    # Under autocast the rotary embedding has promoted queries and keys, but not values.
    q, k, v = (x.squeeze(0).transpose(0, 1).to(dtype).contiguous() for x in (query, key, value))  # [tokens, heads, D]
    return sequence_parallel_attention(q, k, v, seq_ctx, scale=scaling).unsqueeze(0), None


AttentionInterface.register(NAME, flexseq_attention)


def check_model(model: PreTrainedModel) -> None:
    """Raise NotImplementedError, naming the reason, when `flexseq` could not be exact for this model."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        raise NotImplementedError(f"{name} does not use transformers' attention interface, so it cannot be replaced")
    if model.config.is_encoder_decoder:
        raise NotImplementedError(f"{name} is an encoder-decoder; hf_flexseq trains decoder-only models")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise NotImplementedError(f"{name} has layers of the kinds {sorted(kinds)}; only full attention is supported")
    for option, why in {
        "attention_dropout": "dropout inside attention: set config.attention_dropout=0",
        "attn_pdrop": "dropout inside attention: set config.attn_pdrop=0",
        "attn_logit_softcapping": "softcapped attention scores",
        "output_router_logits": "a router loss, which is no sum over tokens: set config.output_router_logits=False",
        "attention_chunk_size": "chunked attention",
    }.items():
        if getattr(config, option, None):
            raise NotImplementedError(f"{name} uses {why} ({option}={getattr(config, option)})")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise NotImplementedError(f"{name} uses a sliding window (sliding_window={config.sliding_window})")
    if any(parameter.endswith("self_attn.sinks") for parameter, _ in model.named_parameters()):
        raise NotImplementedError(f"{name} uses attention sinks")
