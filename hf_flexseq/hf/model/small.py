"""A small model with the layer kinds of a large one, for comparisons that take seconds.

    small = small_model(LlamaForCausalLM, plain_options(config.to_diff_dict()))

Kinds of layers, the ratio of query heads to key heads, sinks, softcaps, shared keys, experts and
the kind of rotary embedding stay. Widths, the vocabulary and the number of layers become small:
one layer of each kind at least, and windows and chunks that are shorter than short sequences.
"""

import copy
import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_flexseq.hf.model.layer_kinds import attention_layers

# Options of the sizes that a probe can run. Windows and chunks are below its sequences' lengths.
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    # other names for the same
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 24,
    "d_model": 32,
    "n_heads": 4,
    "ffn_dim": 24,
    "rotary_dim": 8,
    "word_embed_proj_dim": 32,
    "dff": 24,
    "n_layer": 3,
    # kinds of layers
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 2.0,
    "sliding_window": 6,
    "local_attention": 12,  # a window of half of it
    "attention_chunk_size": 8,
    "floor_scale": 8,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_k": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "zero_expert_num": 2,
    "moe_topk": 2,
    # recurrent layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_mamba_heads": 4,
    "mamba_ngroups": 2,
    "chunk_size": 16,
    "adapter_rank": 4,
    "num_mem_blocks": 1,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    # towers for images and sounds
    "embed_dim": 32,
    "num_heads": 4,
    "depth": 2,
    "out_hidden_size": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "output_dim": 32,
}
# Further ones of towers, and of models that have one: images of a few patches.
SMALL_TOWER: dict[str, Any] = {
    "patch_size": 4,
    "image_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "insert_layer_id": 0,
    "window_size": 16,
    "max_image_size": 32,
    "img_max_token_num": 64,
    "mm_tokens_per_image": 4,
    "projection_dim": 32,
    "projector_hidden_size": 32,
    "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
}
# Those of them that a configuration keeps at None where it has them so.
OPTIONAL = (
    "q_lora_rank",
    "sliding_window",
    "attention_chunk_size",
    "attn_logit_softcapping",
    "n_inner",
)
LAYERS = 4
FAR = 8  # tokens; longer windows and chunks of a tiny model would not be seen
MOST_PARAMETERS = 8_000_000  # of a tiny model

# Sizes that a family needs in a probe, where those above do not fit together.
SIZES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"global_head_dim": 32},
    "falcon_h1": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "longcat_flash": {"head_dim": 8},
    "llama4_vision_model": {
        "intermediate_size": 128,  # of hidden states whose pixels are shuffled
        "vision_output_dim": 48,
        "projector_input_dim": 48,
        "projector_output_dim": 48,
    },
    "aria": {"projector_patch_to_query_dict": {16: 6}},
    "lfm2_vl": {"downsample_factor": 2},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    # Layers between the first and the last run in loops. Its scales are divided by the range.
    "dory": {"n_input_layers": 1, "n_recurrent_layers": None, "n_output_layers": 1}
    | {"initializer_range": 1.0},
}
TEXT_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")


# What a saved configuration has that its class does not take, or that a small model does not have.
_NO_OPTIONS = (
    *("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path"),
    *("dtype", "torch_dtype", "quantization_config", "attn_implementation"),
    "per_layer_config",  # derived from the kinds of layers, by the number of a layer
)


def plain_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a saved configuration that its class takes as options."""
    return {name: value for name, value in values.items() if name not in _NO_OPTIONS}


def small_config(kind: type[PreTrainedModel], options: dict[str, Any]) -> PreTrainedConfig:
    """Return a configuration of a few narrow layers, of the kinds that `options` describe.

    options: arguments of the configuration's class, such as
            `plain_options(config.to_diff_dict())`.
    """
    cls = kind.config_class
    return cls(**_small_options(cls, options))


def _small_options(
    cls: type[PreTrainedConfig], options: dict[str, Any], *, is_tower: bool = False
) -> dict[str, Any]:
    """Return options of a small configuration, of the towers beside a decoder as well."""
    fields = {field.name for field in dataclasses.fields(cls)}
    base = cls(**options)
    has_towers = base.get_text_config() is not base
    small = dict(options)
    for name, value in (SMALL | SMALL_TOWER if is_tower or has_towers else SMALL).items():
        if name in fields or name in options:
            small[name] = _as_many(value, vars(base).get(name))

    # 1. what a family does not have it does not get
    for name in OPTIONAL:
        if vars(base).get(name) is None and vars(base).get(f"_{name}") is None:
            small.pop(name, None)
            if name in options:
                small[name] = None
    for name in fields:
        if name.endswith("token_id"):
            value = vars(base).get(name)
            small[name] = None if value is None or name == "eos_token_id" else 1
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and name != "token_dropout":
            small[name] = 0.0
    if has_towers:
        small |= _tokens_of_parts(base, fields)
    if "kv_lora_rank" in fields:
        small["num_key_value_heads"] = SMALL["num_attention_heads"]

    # 2. a few layers, one of each kind at least
    small |= _few_layers(base, fields)
    if getattr(base, "num_kv_shared_layers", 0):
        small["num_kv_shared_layers"] = 2
    if getattr(base, "rope_parameters", None):
        heads = SMALL["num_attention_heads"]
        head_dim = small.get("head_dim") or SMALL["hidden_size"] // heads
        rope = base.rope_parameters
        if "mrope_section" in (getattr(cls, "ignore_keys_at_rope_validation", None) or ()):
            # The model's own default is for large heads. Some have parameters by kind of layer.
            if all(isinstance(of_kind, dict) for of_kind in rope.values()):
                rope = {kind: {"mrope_section": None, **of_kind} for kind, of_kind in rope.items()}
            else:
                rope = {"mrope_section": None, **rope}
        small["rope_parameters"] = _short_rope(rope, head_dim)
        if "original_max_position_embeddings" in fields:
            small["original_max_position_embeddings"] = 16

    # 3. the parts of a model of several
    for name in getattr(cls, "sub_configs", None) or ():
        part = getattr(base, name, None)
        if isinstance(part, PreTrainedConfig):
            given = options.get(name)
            given = plain_options(given) if isinstance(given, dict) else {}
            of_tower = is_tower or part is not base.get_text_config()
            small[name] = _small_options(type(part), given, is_tower=of_tower)
            small[name]["model_type"] = part.model_type
    return small | SIZES.get(cls.model_type, {})


def _as_many(value: Any, base: Any) -> Any:
    """Return a size as often as the option has numbers, such as a patch's height and width."""
    if isinstance(base, (list, tuple)) and base and isinstance(value, int):
        return [value] * len(base)
    return value


def _tokens_of_parts(base: PreTrainedConfig, fields: Collection[str]) -> dict[str, int]:
    """Return the tokens around and instead of images, videos and sounds, each another one, from
    the end of the vocabulary."""
    tokens: dict[str, int] = {}
    known: dict[str, int] = {}  # by what two options may call by one name each
    for name in sorted(fields):
        is_token = name.endswith(("_token_id", "_token_index", "_start_id", "_end_id"))
        is_token = is_token or name.endswith("newline_id")
        if is_token and name not in TEXT_TOKENS and isinstance(vars(base).get(name), int):
            what = name.removesuffix("_index").removesuffix("_id")
            tokens[name] = known.setdefault(what, SMALL["vocab_size"] - 1 - len(known))
    return tokens


def small_model(kind: type[PreTrainedModel], options: dict[str, Any]) -> PreTrainedModel:
    """Return a model of `small_config`, with experts that transformers computes one by one.

    Raises ValueError if it is not small, or if layers reach further than short sequences.
    """
    config = small_config(kind, options)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"with narrow layers it still has {parameters:,} parameters")
    far = [tokens for tokens in _reaches(config) if tokens > FAR]
    if far:
        raise ValueError(f"it keeps windows or chunks of {far} tokens")
    torch.manual_seed(0)
    return kind._from_config(config, experts_implementation="eager")


def _reaches(config: PreTrainedConfig) -> list[int]:
    """Return the sizes of windows and chunks that a model has."""
    sizes = []
    for kind in attention_layers(config.get_text_config()).values():
        sizes += [size for size in (kind.reach.window, kind.reach.chunk) if size is not None]
    return sizes


def _few_layers(base: PreTrainedConfig, fields: Collection[str]) -> dict[str, Any]:
    """Return the number of layers, and every list that has an entry for each of them."""
    layers = getattr(base, "num_hidden_layers", None)
    if layers is None:
        return {}
    types = getattr(base, "layer_types", None) or [None] * layers
    kept: list[int] = []
    for kind in dict.fromkeys(types):
        kept.append(types.index(kind))
    for index in range(layers):
        if len(kept) < LAYERS and index not in kept:
            kept.append(index)
    kept.sort()
    if getattr(base, "num_kv_shared_layers", 0):
        full = types.index("full_attention")
        kept = [0, full, 0, full]  # the last two read the keys of the first two
    few: dict[str, Any] = {}
    for name in fields:
        value = vars(base).get(name)
        if isinstance(value, list) and len(value) == layers:
            few[name] = [value[index] for index in kept]
    few["num_hidden_layers" if "num_hidden_layers" in fields else "n_layer"] = len(kept)
    return few


def _short_rope(parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return rotary parameters for small heads, with an original length that short sequences
    exceed."""
    short = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = _short_rope(value, head_dim)
        elif name == "original_max_position_embeddings":
            value = 16
        elif name in ("short_factor", "long_factor"):
            size = int(SMALL["head_dim"] * parameters.get("partial_rotary_factor", 1.0)) // 2
            value = [1.0 if name == "short_factor" else 2.0] * size
        elif name == "mrope_section":
            half = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
            value = [half - 2 * (half // 3), half // 3, half // 3]
        short[name] = value
    return short
