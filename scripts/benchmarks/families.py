"""The causal language models of the installed transformers, as configurations that can be built.

    families()            one for each class of AutoModelForCausalLM's mapping
    default_config        as transformers makes it
    checkpoint_config     with the layer kinds of a published checkpoint
    tiny_config           a few layers of the same kinds, of sizes for a probe

Encoders and encoder-decoders that the mapping has as well are no families: transformers lists
their types as masked or sequence-to-sequence models, too.

`data/checkpoints.json` has a row for each checkpoint: the options of its configuration that say
what kinds of layers it has, and the address where that can be read. Options that it leaves out are
transformers' defaults.
"""

import dataclasses
import json
import sys
from inspect import getsource
from pathlib import Path
from re import search
from typing import Any, NamedTuple

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

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
    # other names for the same
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 24,
    "ffn_dim": 24,
    "word_embed_proj_dim": 32,
    "dff": 24,
    # kinds of layers
    "sliding_window": 6,
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
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "zero_expert_num": 2,
    "moe_topk": 2,
}
LAYERS = 4


class Family(NamedTuple):
    """A class of causal language models."""

    name: str
    """The first model type that has this class."""
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
    not_decoders = {
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    found: dict[str, Family] = {}  # by class
    for name, classes in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        cls = classes if isinstance(classes, str) else classes[0]
        if name not in not_decoders and cls not in found:
            kind = getattr(transformers, cls)
            found[cls] = Family(name.removesuffix("_text"), kind, _named_checkpoint(kind))
    return sorted(found.values(), key=lambda family: family.name)


def _named_checkpoint(kind: type[PreTrainedModel]) -> str | None:
    """Return the checkpoint that the source of a model's configuration names."""
    source = getsource(sys.modules[kind.config_class.__module__])
    match = search(r'@auto_docstring\(\s*checkpoint="([^"]+)"', source)
    return match.group(1) if match else None


def checkpoints() -> dict[str, list[Checkpoint]]:
    """Return the published checkpoints by family."""
    rows: dict[str, list[Checkpoint]] = {}
    for row in json.loads(CHECKPOINTS.read_text())["checkpoints"]:
        rows.setdefault(row["family"], []).append(Checkpoint(**row))
    return rows


# ---- configurations


def default_config(family: Family) -> PreTrainedConfig:
    """Return the configuration that transformers makes of a family without being told more."""
    return family.kind.config_class()


def checkpoint_config(family: Family, checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the configuration with a checkpoint's options, all others at their defaults."""
    return family.kind.config_class(**unrolled(checkpoint.options))


def unrolled(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with lists by layer written out: [["a", 5], ["b", 1]] times 2 stands in the
    file as {"times": 2, "of": ["a", "a", "a", "a", "a", "b"]}."""
    found = {}
    for name, value in options.items():
        if isinstance(value, dict) and value.keys() == {"times", "of"}:
            value = value["of"] * value["times"]
        found[name] = value
    return found


def tiny_config(family: Family, options: dict[str, Any]) -> PreTrainedConfig:
    """Return a configuration of a few layers, of the kinds that `options` have, for a probe."""
    fields = {field.name for field in dataclasses.fields(family.kind.config_class)}
    base = family.kind.config_class(**options)
    small = {name: value for name, value in SMALL.items() if name in fields}
    for name in ("q_lora_rank", "sliding_window", "attention_chunk_size"):
        if getattr(base, name, None) is None:
            small.pop(name, None)
    small |= {name: None for name in fields if name.endswith("token_id")}
    for name in fields:
        if name.endswith(("dropout", "pdrop", "dropout_prob")):
            small[name] = 0.0
    return family.kind.config_class(**{**options, **small})
