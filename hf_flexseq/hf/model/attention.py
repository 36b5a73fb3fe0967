"""Register `flexseq` as an attention implementation of transformers, and read the attention that
layers ask for.

    model.set_attn_implementation("flexseq")

A layer says how to attend by keywords, by its configuration and in its mask (`read_call`).
Unknown keywords belong to the whole model's call, and change nothing; keywords that are known to
change the result are computed, or refused by name. No mask function is registered, so transformers
never builds a mask [tokens, tokens]: `seq_ctx` separates documents. Windows and chunks are read
from the configuration (`layer_kinds.py`) and compared with the model's own masks when it is
attached (`trial.py`).

`flexseq_attention` serves micro-batches of whole sequences and chunks on a pipeline stage,
depending on `seq_ctx`. It converts the tensors of transformers, [1, heads, tokens, head_dim], to
the packed rows of `sequence_parallel_attention`, [tokens, heads, head_dim], and back.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.attention.function import AttentionContext
from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.hf.model.layer_kinds import UnknownLayers, layer_reach

# Keywords with which a layer asks for attention that is not computed here. Each of them changes
# the result, so none may be dropped.
_REFUSED_KEYWORDS = ("position_bias", "indices", "block_indices", "sinks", "head_mask")


class UnsupportedAttention(NotImplementedError):
    """An attention layer asks for something that `flexseq` does not compute."""


class Asked(NamedTuple):
    """Requests of a layer's call, besides queries, keys and values."""

    where: str
    """The layer in words, or nothing where it has no number."""
    layer: int | None
    """Its number in the model."""
    reach: Reach
    """Keys that a query reads."""
    softcap: float | None
    """Bound of the scores; None for plain scores."""
    sinks: torch.Tensor | None
    """A score of each head, [heads], that takes part in every softmax."""


def read_call(
    module: nn.Module,
    attention_mask: torch.Tensor | None,
    keywords: dict[str, Any],
    *,
    is_masked: bool = False,
) -> Asked:
    """Return the attention that a layer asks for by `keywords`. Raises UnsupportedAttention for
    other attention than causal of a known kind, and for a call that contradicts the configuration.
    is_masked: True if a mask that is checked elsewhere decides causality."""
    layer = number_of(module)
    where = "" if layer is None else f" of layer {layer}"
    unsupported = []
    if attention_mask is not None:
        unsupported.append("a mask of its own")
    if not is_masked and _is_causal(module, keywords) is False:
        unsupported.append("attention in both directions")
    if keywords.get("dropout"):
        unsupported.append("dropout in attention, which modules keep from when they were made")
    for name in _REFUSED_KEYWORDS:
        if keywords.get(name) is not None:
            unsupported.append(name)
    if getattr(module, "sinks", None) is not None and keywords.get("s_aux") is None:
        unsupported.append("sinks that its call does not give")
    if unsupported:
        raise UnsupportedAttention(
            f"{type(module).__name__}{where} asks for {', '.join(unsupported)}; hf_flexseq "
            "computes causal attention"
        )
    return Asked(
        where=where,
        layer=layer,
        reach=_reach(module, where, keywords),
        softcap=keywords.get("softcap"),
        sinks=keywords.get("s_aux"),
    )


def number_of(module: nn.Module) -> int | None:
    """Return the layer number of a mixer; None if unknown, as for one that layers share."""
    layer: int | None = getattr(module, "layer_idx", None)
    return None if layer is None or layer < 0 else layer


def _reach(module: nn.Module, where: str, keywords: dict[str, Any]) -> Reach:
    """Return which keys the queries of a layer read, by its call and configuration."""
    name = type(module).__name__
    window = keywords.get("sliding_window")
    called = FULL if window is None else Reach(window=window)

    # 1. the configuration, where the layer knows it
    config: PreTrainedConfig | None = getattr(module, "config", None)
    layer = number_of(module)
    if config is None:
        return called
    try:
        configured = layer_reach(config, layer)
    except UnknownLayers as reason:
        raise UnsupportedAttention(f"{name}{where}: {reason}") from reason

    # 2. Some layers leave windows and all leave chunks to their masks.
    is_left_to_mask = "sliding_window" not in keywords or configured.chunk is not None
    if configured != called and not (is_left_to_mask and called.is_full):
        raise UnsupportedAttention(
            f"{name}{where}: its call asks for {called} attention (sliding_window={window}), but "
            f"its configuration says {configured}"
        )
    return configured


def _is_causal(module: nn.Module, keywords: dict[str, Any]) -> bool | None:
    """Return the call's `is_causal`, else the layer's, else None."""
    called_with: bool | None = keywords.get("is_causal")
    if called_with is not None:
        return called_with
    of_layer: bool | None = getattr(module, "is_causal", None)
    return of_layer


# ---- attention


NAME = "flexseq"


class PlannedCall(Protocol):
    """The context of a model's call on planned steps: the `SequenceContext` of a micro-batch, or a
    pipeline's `ChunkContext`."""

    calls: list[Any] | None
    """Modules that have called attention in the forward that runs; None outside of one."""

    def of_layer(self, layer: int | None, *, keeps_grad: bool) -> AttentionContext:
        """Return the context for the attention of one layer, by its index in the model.
        keeps_grad: True if a backward will follow."""


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
