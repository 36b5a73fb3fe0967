"""The causal language models of the installed transformers, as configurations that can be built.

    families()            one for each class of AutoModelForCausalLM's mapping
    with_towers()         those of AutoModelForImageTextToText's that are not among them
    default_config        as transformers makes it
    checkpoint_config     with the layer kinds of a published checkpoint
    tiny_config           a few layers of the same kinds, of sizes for a probe

Encoders and encoder-decoders that the mapping has as well are no families: transformers lists
their types as masked or sequence-to-sequence models, too.

`data/checkpoints.json` has a row for each checkpoint: the options of its configuration that say
what kinds of layers it has, and the address where that can be read. Options that it leaves out are
transformers' defaults.
"""

import copy
import dataclasses
import json
import sys
from collections.abc import Collection
from inspect import getsource
from pathlib import Path
from re import search
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_flexseq.hf.model.layer_kinds import layer_kinds

CHECKPOINTS = Path(__file__).with_name("data") / "checkpoints.json"
HUB = "https://huggingface.co/"

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
NEEDS_FULL = ("olmo_hybrid",)  # whose configuration must have a layer of full attention
FAR = 8  # tokens; longer windows and chunks of a tiny model would not be seen
MOST_PARAMETERS = 8_000_000  # of a tiny model

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# What default configurations lack so that a model could be built of them.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
}
# Sizes that a family needs in a probe, where those above do not fit together.
TINY: dict[str, dict[str, Any]] = {
    "gemma4_text": {"global_head_dim": 32},
    "falcon_h1": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "longcat_flash": {"head_dim": 8},
}


class Family(NamedTuple):
    """A class of causal language models."""

    name: str
    """The model type of its configuration."""
    kind: type[PreTrainedModel]
    named: str | None
    """The checkpoint that transformers names beside the defaults."""


class Checkpoint(NamedTuple):
    """A published checkpoint of a family, and the kinds of its layers."""

    family: str
    checkpoint: str
    options: dict[str, Any]
    source: str


def families() -> list[Family]:
    """Return the families, in the order of their names."""
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    not_decoders = {
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    found: dict[str, Family] = {}  # by class
    for name, classes in names.items():
        cls = classes if isinstance(classes, str) else classes[0]
        if name not in not_decoders and cls not in found:
            kind = getattr(transformers, cls)
            found[cls] = Family(kind.config_class.model_type, kind, _named_checkpoint(kind))
    return sorted(found.values(), key=lambda family: family.name)


def with_towers() -> list[Family]:
    """Return the classes of models with a tower for images that are no family of `families`, in
    the order of their names."""
    names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    known = {family.kind for family in families()}
    found = set()
    for classes in names.values():
        kind = getattr(transformers, classes if isinstance(classes, str) else classes[0])
        if kind not in known:
            found.add(Family(kind.config_class.model_type, kind, None))
    return sorted(found, key=lambda family: family.kind.__name__)


def text_class(family: Family) -> str | None:
    """Return the name of the causal language model of the text alone of a model with towers whose
    default configuration can be made; None where transformers has none."""
    name = default_config(family).get_text_config().model_type
    classes = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name)
    return classes if classes is None or isinstance(classes, str) else classes[0]


def _named_checkpoint(kind: type[PreTrainedModel]) -> str | None:
    """Return the checkpoint that the source of a model's configuration names."""
    source = getsource(sys.modules[kind.config_class.__module__])
    match = search(r'checkpoint="([^"]+)"', source)
    return match.group(1) if match else None


def checkpoints() -> dict[str, list[Checkpoint]]:
    """Return the published checkpoints by family."""
    rows: dict[str, list[Checkpoint]] = {}
    for row in json.loads(CHECKPOINTS.read_text())["checkpoints"]:
        rows.setdefault(row["family"], []).append(Checkpoint(**row))
    return rows


# ---- configurations


def default_config(family: Family) -> PreTrainedConfig:
    """Return the configuration that transformers makes of a family without being told more than
    it needs."""
    return family.kind.config_class(**NEEDED.get(family.name, {}))


def checkpoint_config(family: Family, checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the configuration with a checkpoint's options, all others at their defaults."""
    options = NEEDED.get(family.name, {}) | unrolled(checkpoint.options)
    return family.kind.config_class(**options)


def unrolled(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with lists by layer written out: [["a", 5], ["b", 1]] times 2 stands in the
    file as {"times": 2, "of": ["a", "a", "a", "a", "a", "b"]}."""
    found = {}
    for name, value in options.items():
        if isinstance(value, dict) and value.keys() == {"times", "of"}:
            value = value["of"] * value["times"]
        found[name] = value
    return found


def tiny_config(
    family: Family, options: dict[str, Any], *, near: bool = False
) -> PreTrainedConfig:
    """Return a configuration of a few layers, of the kinds that `options` have, for a probe.

    near: leave out the layers of full attention, if there are others.
    """
    cls = family.kind.config_class
    options = {**NEEDED.get(family.name, {}), **options}
    return cls(**{**_tiny_options(cls, options, near=near), **TINY.get(family.name, {})})


def _tiny_options(
    cls: type[PreTrainedConfig], options: dict[str, Any], *, near: bool
) -> dict[str, Any]:
    """Return options of a small configuration, of the towers beside a decoder as well."""
    fields = {field.name for field in dataclasses.fields(cls)}
    base = cls(**options)
    small = dict(options)
    for name, value in SMALL.items():
        if name in fields or name in options:
            small[name] = value

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
        if name.endswith(("dropout", "pdrop", "dropout_prob")):
            small[name] = 0.0
    if "kv_lora_rank" in fields:
        small["num_key_value_heads"] = SMALL["num_attention_heads"]

    # 2. a few layers, one of each kind at least
    small |= _few_layers(base, fields, near=near)
    if getattr(base, "num_kv_shared_layers", 0):
        small["num_kv_shared_layers"] = 2
    if getattr(base, "rope_parameters", None):
        small["rope_parameters"] = _short_rope(base.rope_parameters)
        if "original_max_position_embeddings" in fields:
            small["original_max_position_embeddings"] = 16

    # 3. the parts of a model of several
    for name in getattr(cls, "sub_configs", None) or ():
        part = getattr(base, name, None)
        if isinstance(part, PreTrainedConfig):
            small[name] = _tiny_options(type(part), {}, near=near)
            small[name]["model_type"] = part.model_type
    return small


def tiny_model(family: Family, options: dict[str, Any], *, near: bool = False) -> PreTrainedModel:
    """Return a model of `tiny_config`, with experts that transformers computes one by one.

    Raises ValueError when it is not tiny, or reaches far: then `SMALL` lacks the name of a size.
    """
    config = tiny_config(family, options, near=near)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in family.kind(copy.deepcopy(config)).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"the tiny {family.name} has {parameters:,} parameters")
    far = [tokens for tokens in _reaches(config) if tokens > FAR]
    if far:
        raise ValueError(f"the tiny {family.name} has windows or chunks of {far} tokens")
    torch.manual_seed(0)
    return family.kind._from_config(config, experts_implementation="eager")


def _reaches(config: PreTrainedConfig) -> list[int]:
    """Return the sizes of windows and chunks that a model has."""
    sizes = []
    for kind in layer_kinds(config.get_text_config()):
        sizes += [size for size in (kind.reach.window, kind.reach.chunk) if size is not None]
    return sizes


def _few_layers(base: PreTrainedConfig, fields: Collection[str], *, near: bool) -> dict[str, Any]:
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
    if near and has_near_layers(base):
        kept = [index for index in kept if types[index] != "full_attention"]
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


def has_near_layers(config: PreTrainedConfig) -> bool:
    """Tell whether a model has layers of full attention and others, all with keys of their own."""
    types = set(getattr(config, "layer_types", None) or ())
    shares_keys = getattr(config, "num_kv_shared_layers", 0)
    if config.model_type in NEEDS_FULL:
        return False
    return "full_attention" in types and len(types) > 1 and not shares_keys


def _short_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters whose original length is below that of a probe's sequences."""
    short = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = _short_rope(value)
        elif name == "original_max_position_embeddings":
            value = 16
        elif name in ("short_factor", "long_factor"):
            size = int(SMALL["head_dim"] * parameters.get("partial_rotary_factor", 1.0)) // 2
            value = [1.0 if name == "short_factor" else 2.0] * size
        short[name] = value
    return short
