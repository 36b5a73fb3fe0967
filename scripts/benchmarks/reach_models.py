"""The causal language models of the installed transformers, as configurations that can be built.

    families()            one for each class of AutoModelForCausalLM's mapping
    default_config        as transformers makes it
    expert_rules          how transformers spreads a family's experts over ranks
    checkpoint_config     with the layer kinds of a published checkpoint

Encoders and encoder-decoders that the mapping has as well are no families: transformers lists
their types as masked or sequence-to-sequence models, too.

`data/checkpoints.json` has a row for each checkpoint: the options of its configuration that say
what kinds of layers it has, and the address where that can be read. Options that it leaves out are
transformers' defaults.
"""

import json
import sys
from inspect import getsource
from pathlib import Path
from re import search
from typing import Any, NamedTuple

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_flexseq.hf.model.facts import expert_counts

CHECKPOINTS = Path(__file__).with_name("data") / "checkpoints.json"
HUB = "https://huggingface.co/"

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


def expert_rules(family: Family) -> list[str] | None:
    """Return the rules by which transformers spreads the experts of a family over ranks, [] if it
    has none; None for a family without experts by default."""
    try:
        config = default_config(family).get_text_config()
    except (TypeError, ValueError, StrictDataclassError):
        return None  # no configuration without arguments
    experts, _ = expert_counts(config)
    rules = getattr(config, "base_model_ep_plan", None) or {}
    return list(rules.values()) if experts or rules else None


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
