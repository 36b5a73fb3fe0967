"""Read the sizes of a model's recurrent layers from its configuration.

Configurations do not name the kind of such a layer: all of them say linear_attention, or conv. The
options that they have for its sizes do tell the kinds apart:

    linear_num_value_heads, ...       Gated DeltaNet: Qwen3-Next, Qwen3.5, OLMo-Hybrid
    linear_num_heads, ...             Kimi's delta attention: Kimi Linear, Ling 2.5
    mamba_n_heads, mamba_n_groups,    Mamba 2: Granite 4, Bamba, Falcon-H1; Nemotron-H and Zamba 2
    ...                               have other names for the same
    conv_L_cache                      a short convolution alone: LFM2

The trial of a model (`trial.py`) compares these with what its layers call.
"""

from typing import NamedTuple

from transformers import PreTrainedConfig

from hf_flexseq.base.layers import RecurrentShape

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


class _Mamba2Names(NamedTuple):
    """Names of the sizes of a Mamba 2 in a configuration."""

    heads: str
    head_dim: str
    groups: str
    state_dim: str
    width: str


_MAMBA2 = (
    # Granite 4, Bamba, Falcon-H1
    _Mamba2Names(
        "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
    ),
    # Nemotron-H
    _Mamba2Names("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    # Zamba 2
    _Mamba2Names(
        "n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"
    ),
    # Mamba 2 itself
    _Mamba2Names("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
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
