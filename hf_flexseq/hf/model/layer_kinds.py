"""Read the token mixers of a model's layers from its configuration: attention, of which it says
how far back queries read, how scores are made, the sizes of heads, and whose keys are read; and
recurrent mixers. A layer may have both, one of them or neither.

    layer_types, sliding_window, attention_chunk_size   what there is, and how far back it reads
    attn_logit_softcapping                              softcapped scores
    per_layer_config, num_key_value_heads, head_dim,    sizes of heads, which may differ from layer
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim      to layer
    kv_sharing_modes                                    keys of an earlier layer

Of a recurrent layer configurations say linear_attention, or conv; the options that they have for
its sizes tell the kinds apart:

    linear_num_value_heads, ...       Gated DeltaNet: Qwen3-Next, Qwen3.5, OLMo-Hybrid
    linear_num_heads, ...             Kimi's delta attention: Kimi Linear, Ling 2.5
    mamba_n_heads, mamba_n_groups,    Mamba 2: Granite 4, Bamba, Falcon-H1; Nemotron-H and Zamba 2
    ...                               have other names for the same
    conv_L_cache                      a short convolution alone: LFM2

In transformers a window of w is w tokens, the query's own among them: `sliding_window_overlay`
shows keys above query - w.

The configuration alone is read, so that costs and plans need no model. `checks.py` compares these
mixers with the calls of a model's layers (`trial.py`).
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedConfig

from hf_flexseq.base.layers import FULL, Reach, RecurrentShape

# Configurations do not say which layers have sinks: by model_type, the types of such layers.
_EVERY_LAYER = ("full_attention", "sliding_attention")
_SINKS = {
    "flint": _EVERY_LAYER,
    "gpt_oss": _EVERY_LAYER,
    "granite_swa": _EVERY_LAYER,
    "granitemoe_swa": _EVERY_LAYER,
    "mimo_v2_flash": ("sliding_attention",),
}
# Models whose configuration has a softcap, and whose layers do not ask for it.
_NEVER_SOFTCAPPED = ("gemma3_text",)
# Types of layers that mix no tokens, and of those with attention and a recurrent mixer.
_NO_MIXING = ("mlp", "moe")
_BOTH = "hybrid"


class UnknownLayers(NotImplementedError):
    """A configuration has layers that mix tokens in no way that is known here."""


class LayerKind(NamedTuple):
    """One attention layer, as its model's configuration describes it."""

    reach: Reach
    """Keys that a query reads."""
    softcap: float | None
    """Bound of the scores, approached by c tanh(s / c); None for plain scores."""
    sinks: bool
    """True if every head has a sink, a score without a value."""
    query_heads: int
    kv_heads: int
    """Heads of keys and values; fewer than query heads where several of these share one."""
    head_dim: int
    """Size of a head of queries and keys."""
    value_dim: int
    """Size of a head of values."""
    keys_of: int
    """The layer whose keys and values are read: the layer itself, or an earlier one."""

    @property
    def width(self) -> int:
        """The head size that a kernel sees: the smaller of queries and values is padded."""
        return max(self.head_dim, self.value_dim)


class Layer(NamedTuple):
    """Token mixers of one layer, as its model's configuration describes them."""

    attention: LayerKind | None
    recurrent: RecurrentShape | None


def layers_of(config: PreTrainedConfig) -> tuple[Layer, ...]:
    """Return the token mixers of each layer of a decoder-only model, in the order of the layers.

    config: its text configuration. Raises UnknownLayers for layers that are neither attention over
    full, window or chunk nor recurrent of a known kind, and ValueError for windows and chunks
    below 1, naming the layer.
    """
    if getattr(config, "num_hidden_layers", None) is None:
        raise UnknownLayers("its configuration has no num_hidden_layers")
    types = layer_types(config)
    sources = _keys_of(config, types)
    layers = []
    for layer, kind in enumerate(types):
        attention = None
        recurrent = None
        if kind in (*SCANS, *CONVOLUTIONS, _BOTH):
            recurrent = recurrent_shape(config, kind)
            if recurrent is None:
                raise _unknown(config)
        if kind not in (*SCANS, *CONVOLUTIONS, *_NO_MIXING):
            attention = _attention(config, layer, kind, sources[layer])
        layers.append(Layer(attention, recurrent))
    return tuple(layers)


def attention_layers(config: PreTrainedConfig) -> dict[int, LayerKind]:
    """Return each attention layer of a decoder by its number. Raises as `layers_of` does."""
    kinds = {}
    for number, layer in enumerate(layers_of(config)):
        if layer.attention is not None:
            kinds[number] = layer.attention
    return kinds


def layer_kinds(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """Return each attention layer of a decoder, in order. Raises as `layers_of` does."""
    return tuple(attention_layers(config).values())


def recurrent_kinds(config: PreTrainedConfig) -> tuple[RecurrentShape, ...]:
    """Return each recurrent mixer of a decoder, in order. Raises as `layers_of` does."""
    shapes = []
    for layer in layers_of(config):
        if layer.recurrent is not None:
            shapes.append(layer.recurrent)
    return tuple(shapes)


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
        without = (*SCANS, *CONVOLUTIONS, *_NO_MIXING)
        attending = {kind for kind in types if kind not in without}
        if len(attending) == 1:
            layer = types.index(attending.pop())
    if layer is None or layer >= len(types):
        raise UnknownLayers("which of config.layer_types it has is not known")
    return _reach(config, layer, types[layer])


def reach_counts(kinds: Sequence[LayerKind]) -> dict[Reach, int]:
    """Return the number of attention layers of each reach, in the order of first layers."""
    return dict(Counter(kind.reach for kind in kinds))


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


def _attention(config: PreTrainedConfig, layer: int, kind: str, keys_of: int) -> LayerKind:
    """Return the kind of a layer's attention."""
    reach = _reach(config, layer, kind)
    if getattr(_of_layer(config, layer), "num_attention_heads", None) is None:
        raise UnknownLayers(f"its configuration has no num_attention_heads; {_KNOWN}")
    query_heads, kv_heads, head_dim, value_dim = _head_sizes(config, layer, kind)
    return LayerKind(
        reach=reach,
        softcap=_softcap(config),
        sinks=kind in _SINKS.get(config.model_type, ()),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        keys_of=keys_of,
    )


def _reach(config: PreTrainedConfig, layer: int, kind: str) -> Reach:
    """Return which keys the queries of a layer read."""
    if kind in ("full_attention", _BOTH):
        return FULL
    if kind not in _OPTIONS:
        raise _unknown(config)
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


def _unknown(config: PreTrainedConfig) -> UnknownLayers:
    """Return the refusal of a model with layers of kinds that are not known."""
    others = set(layer_types(config)) - {"full_attention", *_OPTIONS, *_NO_MIXING}
    for kind in (*SCANS, *CONVOLUTIONS, _BOTH):
        if kind in others and recurrent_shape(config, kind) is not None:
            others.remove(kind)
    return UnknownLayers(
        f"it has layers of the kinds {', '.join(sorted(others))}, in a form that is not known; "
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


def _head_sizes(config: PreTrainedConfig, layer: int, kind: str) -> tuple[int, int, int, int]:
    """Return numbers and sizes of a layer's heads: query heads, key and value heads, the size of a
    query or key head, and of a value head."""
    of_layer = _of_layer(config, layer)
    heads: int = of_layer.num_attention_heads
    kv_heads: int = getattr(of_layer, "num_key_value_heads", None) or heads

    # 1. latent attention: keys and values of every head are expanded from one latent vector
    rope_dim = getattr(of_layer, "qk_rope_head_dim", None)
    nope_dim = getattr(of_layer, "qk_nope_head_dim", None)
    if rope_dim is not None and nope_dim is not None:
        return heads, heads, nope_dim + rope_dim, of_layer.v_head_dim or nope_dim

    # 2. attention with heads of its own
    head_dim: int = getattr(of_layer, "head_dim", None) or of_layer.hidden_size // heads
    value_dim: int = getattr(of_layer, "v_head_dim", None) or head_dim
    if config.model_type == "mimo_v2_flash" and kind == "sliding_attention":
        kv_heads *= 2
    return heads, kv_heads, head_dim, value_dim


def _of_layer(config: PreTrainedConfig, layer: int, option: str | None = None) -> PreTrainedConfig:
    """Return the configuration of one layer, or the model's if layers do not differ in
    `option`."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    if option is not None and option not in config.per_layer_attributes:
        return config
    return config.per_layer_config[layer]


def _keys_of(config: PreTrainedConfig, types: Sequence[str]) -> list[int]:
    """Return the layer whose keys and values each layer reads: a stored one of its type, or its
    own. Raises UnknownLayers for a layer that reads another model's keys, as an assistant's layers
    do."""
    modes = getattr(config, "kv_sharing_modes", None)
    own = list(range(len(types)))
    if modes is None:
        return own
    sources = []
    stored: dict[str, int] = {}  # type -> the layer of that type that has stored last
    for layer, kind, mode in zip(own, types, modes, strict=True):
        if mode == "store":
            stored[kind] = layer
        if mode == "reuse" and kind not in stored:
            raise UnknownLayers(f"its layer {layer} reads keys of {kind} that no layer stores")
        sources.append(stored[kind] if mode == "reuse" else layer)
    return sources


# ---- recurrent layers


# Types of layers, in the words of configurations, that are a scan after a convolution, and a
# convolution alone.
SCANS = ("linear_attention",)
CONVOLUTIONS = ("conv",)


def recurrent_shape(config: PreTrainedConfig, kind: str) -> RecurrentShape | None:
    """Return the sizes of a recurrent layer of a `kind` in configurations' words; None if
    unknown."""
    if kind in CONVOLUTIONS:
        return _convolution(config)
    return _gated_delta(config) or _kimi_delta(config) or _mamba2(config)


def _gated_delta(config: PreTrainedConfig) -> RecurrentShape | None:
    value_heads = getattr(config, "linear_num_value_heads", None)
    if value_heads is None:
        return None
    heads = (config.linear_num_key_heads, value_heads)
    dims = (config.linear_key_head_dim, config.linear_value_head_dim)
    return _delta_rule("gated_delta", config, heads, dims)


def _delta_rule(
    kind: str, config: PreTrainedConfig, heads: tuple[int, int], dims: tuple[int, int]
) -> RecurrentShape:
    """Return the sizes of a delta rule. heads, dims: of keys, of values."""
    return RecurrentShape(
        kind=kind,
        key_heads=heads[0],
        value_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        width=config.linear_conv_kernel_dim,
        channels=2 * heads[0] * dims[0] + heads[1] * dims[1],  # queries, keys, values
    )


def _kimi_delta(config: PreTrainedConfig) -> RecurrentShape | None:
    heads = getattr(config, "linear_num_heads", None)
    head_dim = getattr(config, "linear_head_dim", None)
    if heads is None or head_dim is None:
        return None
    return _delta_rule("kimi_delta", config, (heads, heads), (head_dim, head_dim))


# Names of Mamba 2's sizes in configurations: heads, their size, groups, size of states, width.
_MAMBA2 = (
    # Granite 4, Bamba, Falcon-H1
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    # Nemotron-H
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    # Zamba 2
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
    # Mamba 2 itself
    ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
)


def _mamba2(config: PreTrainedConfig) -> RecurrentShape | None:
    for names in _MAMBA2:
        if any(getattr(config, name, None) is None for name in names):
            continue
        heads, head_dim, groups, state_dim, width = (getattr(config, name) for name in names)
        return RecurrentShape(
            kind="mamba2",
            key_heads=groups,
            value_heads=heads,
            key_dim=state_dim,
            value_dim=head_dim,
            width=width,
            channels=heads * head_dim + 2 * groups * state_dim,  # values, B and C
        )
    return None


def _convolution(config: PreTrainedConfig) -> RecurrentShape | None:
    width = getattr(config, "conv_L_cache", None)
    if width is None:
        return None
    return RecurrentShape(kind="convolution", width=width, channels=config.hidden_size)
