"""Read what an attention layer asks for when transformers calls its attention.

A layer says how to attend by keywords, by its configuration and in its mask. Keywords that are not
known are those of the whole model's call, and change nothing; those that are known to change the
result are computed, or refused by name.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

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
    """Return what a layer asks for by `keywords`. Raises UnsupportedAttention for other attention
    than causal of a known kind, and for a call that contradicts the configuration. is_masked: True
    if a mask that is looked at elsewhere says what is causal."""
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
    """Return what the call says about causality, else what the layer says, else None."""
    called_with: bool | None = keywords.get("is_causal")
    if called_with is not None:
        return called_with
    of_layer: bool | None = getattr(module, "is_causal", None)
    return of_layer
