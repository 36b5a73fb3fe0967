"""`flexseq` as an attention implementation of transformers.

Registering only the attention function, and no mask function, makes transformers build no mask:
documents are kept apart by what `seq_ctx` says, and a mask of tokens x tokens never exists.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention

NAME = "flexseq"
# What an attention layer may ask for beyond causal attention. Each changes the result, so none may
# be dropped.
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
    """query [1, heads, tokens, D], key and value [1, kv_heads, tokens, D] -> [1, tokens, heads,
    D].

    Raises ValueError when called without `seq_ctx`, and NotImplementedError for attention that is
    not plain causal.
    """
    if seq_ctx is None:
        raise ValueError(
            "the attention implementation 'flexseq' works on batches of hf_flexseq alone; to call "
            "or generate with "
            "this model yourself, first do model.set_attn_implementation('sdpa')"
        )
    check_call(module, attention_mask, {"dropout": dropout, **kwargs})
    q, k, v = packed_rows(query, key, value)
    return sequence_parallel_attention(q, k, v, seq_ctx, scale=scaling).unsqueeze(0), None


AttentionInterface.register(NAME, flexseq_attention)


def packed_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Each [1, heads, tokens, D] -> [tokens, heads, D], all of the dtype that kernels compute
    in."""
    # Under autocast the rotary embedding has promoted queries and keys, but not values.
    autocast = torch.is_autocast_enabled(query.device.type) and value.dtype != torch.float64
    dtype = torch.get_autocast_dtype(query.device.type) if autocast else value.dtype
    return tuple(x.squeeze(0).transpose(0, 1).to(dtype).contiguous() for x in (query, key, value))


class UnsupportedAttention(NotImplementedError):
    """An attention layer asks for what `flexseq` does not compute."""


def check_call(
    module: nn.Module, attention_mask: torch.Tensor | None, asked: dict[str, Any]
) -> None:
    """Raise UnsupportedAttention unless a layer asks for causal attention and no more."""
    found = {
        "a mask of its own": attention_mask is not None,
        "attention in both directions": _first_of(
            asked.get("is_causal"), getattr(module, "is_causal", None)
        )
        is False,
        "dropout in attention": bool(asked.get("dropout")),
        **{name: asked.get(name) is not None for name in _REFUSED_KWARGS},
    }
    if any(found.values()):
        names = ", ".join(name for name, there in found.items() if there)
        raise UnsupportedAttention(
            f"{type(module).__name__} asks for {names}; hf_flexseq computes causal attention"
        )


def _first_of(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
