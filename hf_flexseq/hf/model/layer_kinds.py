"""Read the token mixers of a model's layers from its configuration: attention, of which it says
how far back queries read, how scores are made, and the sizes of heads; and recurrent mixers. A
layer may have both, one of them or neither.

    layer_types, sliding_window, attention_chunk_size   what there is, and how far back it reads
    attn_logit_softcapping                              softcapped scores
    per_layer_config, num_key_value_heads, head_dim,    sizes of heads, which may differ from layer
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim      to layer

Of a recurrent layer configurations say linear_attention, conv or hybrid; a model's trial shows of
which kind it is, and its sizes.

In transformers a window of w is w tokens, the query's own among them: `sliding_window_overlay`
shows keys above query - w.

The configuration alone is read, so that costs and plans need no model. `checks.py` compares these
mixers with the calls of a model's layers (`trial.py`).
"""

from collections.abc import Iterable
from typing import NamedTuple

from transformers import PreTrainedConfig

from hf_flexseq.base.layers import FULL, Reach

# Models whose configuration has a softcap, and whose layers do not ask for it.
_NEVER_SOFTCAPPED = ("gemma3_text",)
# Types of layers that mix no tokens, that are a scan after a convolution, that are a convolution
# alone, and those with attention and a scan.
_NO_MIXING = ("mlp", "moe")
_SCANS = ("linear_attention",)
CONVOLUTIONS = ("conv",)
_BOTH = "hybrid"
_RECURRENT = (*_SCANS, *CONVOLUTIONS, _BOTH)


class UnknownLayers(NotImplementedError):
    """A configuration has layers that mix tokens in no way that is known here."""


class LayerKind(NamedTuple):
    """One attention layer, as its model's configuration describes it."""

    reach: Reach
    """Keys that a query reads."""
    softcap: float | None
    """Bound of the scores, approached by c tanh(s / c); None for plain scores."""
    query_heads: int
    kv_heads: int
    """Heads of keys and values; fewer than query heads where several of these share one."""
    width: int
    """Size of a head as a kernel sees it: the smaller of queries and values is padded."""


class Layer(NamedTuple):
    """Token mixers of one layer, as its model's configuration describes them."""

    attention: LayerKind | None
    recurrent: str | None
    """Type of a layer with a recurrent mixer, in configurations' words."""


def layers_of(config: PreTrainedConfig) -> tuple[Layer, ...]:
    """Return the token mixers of each layer of a decoder-only model, in the order of the layers.

    config: its text configuration. Raises UnknownLayers for layers that are neither attention over
    full, window or chunk nor recurrent, and ValueError for windows and chunks below 1, naming the
    layer.
    """
    if getattr(config, "num_hidden_layers", None) is None:
        raise UnknownLayers("its configuration has no num_hidden_layers")
    layers = []
    for layer, kind in enumerate(layer_types(config)):
        attention = None
        if kind not in (*_SCANS, *CONVOLUTIONS, *_NO_MIXING):
            attention = _attention(config, layer, kind)
        layers.append(Layer(attention, recurrent=kind if kind in _RECURRENT else None))
    return tuple(layers)


def attention_layers(config: PreTrainedConfig) -> dict[int, LayerKind]:
    """Return each attention layer of a decoder by its number. Raises as `layers_of` does."""
    kinds = {}
    for number, layer in enumerate(layers_of(config)):
        if layer.attention is not None:
            kinds[number] = layer.attention
    return kinds


def has_recurrent(config: PreTrainedConfig) -> bool:
    """Tell if a decoder has recurrent layers, by its text configuration."""
    return any(kind in _RECURRENT for kind in layer_types(config))


def layer_reach(config: PreTrainedConfig, layer: int | None) -> Reach:
    """Return which keys the queries of one layer read.

    layer: its number; None where it is not known, which will do if all layers read alike. Raises
    UnknownLayers where it will not, and for layers that are not attention over full, window or
    chunk; ValueError for windows and chunks below 1.
    """
    types = getattr(config, "layer_types", None)
    if types is None:
        return _reach(config, layer or 0, _type_of_all(config))
    if layer is None:
        without = (*_SCANS, *CONVOLUTIONS, *_NO_MIXING)
        attending = {kind for kind in types if kind not in without}
        if len(attending) == 1:
            layer = types.index(attending.pop())
    if layer is None or layer >= len(types):
        raise UnknownLayers("which of config.layer_types it has is not known")
    return _reach(config, layer, types[layer])


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the type of each layer in transformers' words, such as sliding_attention. Without
    types in the configuration one window, if any, holds for all layers."""
    types: list[str] | None = getattr(config, "layer_types", None)
    if types is not None:
        return list(types[: config.num_hidden_layers])
    return [_type_of_all(config)] * config.num_hidden_layers


def _type_of_all(config: PreTrainedConfig) -> str:
    """Return the type of the layers of a model whose configuration does not list them."""
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        return "sliding_attention"
    return "full_attention"


# ---- one layer


def _attention(config: PreTrainedConfig, layer: int, kind: str) -> LayerKind:
    """Return the kind of a layer's attention."""
    reach = _reach(config, layer, kind)
    if getattr(_of_layer(config, layer), "num_attention_heads", None) is None:
        raise UnknownLayers(f"its configuration has no num_attention_heads; {_KNOWN}")
    query_heads, kv_heads, width = _head_sizes(config, layer, kind)
    return LayerKind(
        reach=reach,
        softcap=_softcap(config),
        query_heads=query_heads,
        kv_heads=kv_heads,
        width=width,
    )


def _reach(config: PreTrainedConfig, layer: int, kind: str) -> Reach:
    """Return which keys the queries of a layer read."""
    if kind in ("full_attention", _BOTH):
        return FULL
    if kind not in _OPTIONS:
        known = ("full_attention", *_OPTIONS, *_NO_MIXING, *_RECURRENT)
        raise unknown_kinds(set(layer_types(config)).difference(known))
    option = _OPTIONS[kind]
    tokens = getattr(_of_layer(config, layer, option), option, None)
    if tokens is None:
        raise ValueError(
            f"layer {layer} is {kind}, but config.{option} is None; give it a number of tokens, "
            "or make the layer full_attention in config.layer_types"
        )
    if tokens < 1:
        raise ValueError(
            f"layer {layer} is {kind} over {option}={tokens} tokens; it must be at least 1"
        )
    if kind == "chunked_attention":
        return Reach(chunk=tokens)
    return Reach(window=tokens)


def unknown_kinds(kinds: Iterable[str]) -> UnknownLayers:
    """Return the refusal of a model with layers of kinds that are not known."""
    return UnknownLayers(
        f"it has layers of the kinds {', '.join(sorted(kinds))}, in a form that is not known; "
        f"{_KNOWN}"
    )


_KNOWN = (
    "hf_flexseq knows full, sliding and chunked attention, and the recurrent layers Gated "
    "DeltaNet, Kimi's delta attention, Mamba 2 and short convolutions"
)


# by type of layer: the option that says how many tokens
_OPTIONS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def _softcap(config: PreTrainedConfig) -> float | None:
    """Return the bound of a model's scores."""
    if config.model_type in _NEVER_SOFTCAPPED:
        return None
    softcap: float | None = getattr(config, "attn_logit_softcapping", None)
    return softcap


def _head_sizes(config: PreTrainedConfig, layer: int, kind: str) -> tuple[int, int, int]:
    """Return a layer's query heads, its key and value heads, and the size of its largest heads."""
    of_layer = _of_layer(config, layer)
    heads: int = of_layer.num_attention_heads
    kv_heads: int = getattr(of_layer, "num_key_value_heads", None) or heads

    # 1. latent attention: keys and values of every head are expanded from one latent vector
    rope_dim = getattr(of_layer, "qk_rope_head_dim", None)
    nope_dim = getattr(of_layer, "qk_nope_head_dim", None)
    if rope_dim is not None and nope_dim is not None:
        return heads, heads, max(nope_dim + rope_dim, of_layer.v_head_dim or nope_dim)

    # 2. attention with heads of its own
    head_dim: int = getattr(of_layer, "head_dim", None) or of_layer.hidden_size // heads
    value_dim: int = getattr(of_layer, "v_head_dim", None) or head_dim
    if config.model_type == "mimo_v2_flash" and kind == "sliding_attention":
        kv_heads *= 2
    return heads, kv_heads, max(head_dim, value_dim)


def _of_layer(config: PreTrainedConfig, layer: int, option: str | None = None) -> PreTrainedConfig:
    """Return the configuration of one layer, or the model's if layers do not differ in
    `option`."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    if option is not None and option not in config.per_layer_attributes:
        return config
    return config.per_layer_config[layer]
