"""The models of the installed transformers, and what hf_flexseq says of each: the tables of the
page on models.

    python -m tests.hf.model_families    writes scripts/pages/families.csv and image_families.csv

Causal language models: one for each class of AutoModelForCausalLM's mapping. Encoders and
encoder-decoders that the mapping has as well are left out: transformers lists their types as
masked or sequence-to-sequence models, too. A family is asked with the configuration that
transformers makes by default, and with the kinds of layers of its published checkpoints.
`checkpoints.json` has these: the options of a configuration that say what kinds of layers it has,
and the address where they can be read; options that it leaves out are transformers' defaults.

Models with images: one for each class of AutoModelForImageTextToText's mapping.

To ask is to call what every trainer calls before it starts, `check_model` and for images
`VisionModel`, with the whole model on the meta device.
"""

import csv
import json
import sys
import warnings
from inspect import getsource
from pathlib import Path
from re import search
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.facts import expert_counts
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.steps.images import UnsupportedImages
from tests.hf.vision_families import FAMILIES as TINY_WITH_IMAGES

PAGES = Path(__file__).parents[2] / "scripts/pages"
CHECKPOINTS = Path(__file__).with_name("checkpoints.json")
HUB = "https://huggingface.co/"
COLUMNS = ("family", "default configuration", "published checkpoints", "experts over ranks")
IMAGE_COLUMNS = ("family", "class", "images")

TAKEN, SETTING, REFUSED, NOT_BUILT = "taken", "after a setting", "refused", "not built"
# Rules of a plan for experts: that tokens travel to them, and that each rank holds some of them.
DISPATCHED, HELD = "ep_dispatch_experts", "grouped_gemm"

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

# Options of training that a refusal names, and the value with which a model is asked again.
SETTINGS = {
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "output_router_logits": False,
    "z_loss_coefficient": 0.0,
}

# What transformers raises for default configurations that no model can be built from.
BUILDING_FAILS = (
    *(ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError),
    StrictDataclassError,
)


class Family(NamedTuple):
    """A class of models."""

    name: str
    """The model type of its configuration."""
    kind: type[PreTrainedModel]


class Checkpoint(NamedTuple):
    """A published checkpoint of a family, and the kinds of its layers."""

    family: str
    checkpoint: str
    options: dict[str, Any]
    source: str


def families() -> dict[str, Family]:
    """Return the causal language models by name, in its order."""
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    not_decoders = {
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    kinds = _classes({name: cls for name, cls in names.items() if name not in not_decoders})
    found = [Family(kind.config_class.model_type, kind) for kind in kinds.values()]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def image_families() -> dict[str, Family]:
    """Return the models with images by name, in its order."""
    kinds = _classes(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return {name: Family(name, kind) for name, kind in sorted(kinds.items())}


def _classes(mapping: dict[str, Any]) -> dict[str, type[PreTrainedModel]]:
    """Return each class of a mapping of transformers once, by the first of its names."""
    found: dict[str, str] = {}  # name by class
    for name, classes in mapping.items():
        found.setdefault(classes if isinstance(classes, str) else classes[0], name)
    return {name: getattr(transformers, cls) for cls, name in found.items()}


# ---- configurations


def checkpoints() -> dict[str, list[Checkpoint]]:
    """Return the published checkpoints by family."""
    rows: dict[str, list[Checkpoint]] = {}
    for row in json.loads(CHECKPOINTS.read_text())["checkpoints"]:
        rows.setdefault(row["family"], []).append(Checkpoint(**row))
    return rows


def options_of(family: Family, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Return options of a configuration: what a model needs, and those of a checkpoint. Lists by
    layer are written out: {"times": 2, "of": ["a", "b"]} is ["a", "b", "a", "b"]."""
    found = dict(NEEDED.get(family.name, {}))
    for name, value in (checkpoint.options if checkpoint else {}).items():
        if isinstance(value, dict) and value.keys() == {"times", "of"}:
            value = value["of"] * value["times"]
        found[name] = value
    return found


def config_of(family: Family, checkpoint: Checkpoint | None = None) -> PreTrainedConfig:
    """Return the configuration of a family, or that with a checkpoint's kinds of layers."""
    return family.kind.config_class(**options_of(family, checkpoint))


def expert_rules(family: Family) -> list[str] | None:
    """Return the rules by which transformers spreads the experts of a family over ranks, [] if it
    has none; None for a family without experts by default."""
    try:
        config = config_of(family).get_text_config()
    except BUILDING_FAILS:
        return None  # no configuration without arguments
    experts, _ = expert_counts(config)
    rules = getattr(config, "base_model_ep_plan", None) or {}
    return list(rules.values()) if experts or rules else None


# ---- rows of the tables


def family_row(family: Family) -> list[str]:
    """Return the cells of a causal language model, under COLUMNS."""
    given = ", ".join(NEEDED.get(family.name, ()))
    default = verdict_on(family) + (f" (given {given})" if given else "")
    published = [
        f"[{one.checkpoint}]({one.source}): {verdict_on(family, one)}"
        for one in checkpoints().get(family.name, ())
    ]
    if not published:
        source = getsource(sys.modules[family.kind.config_class.__module__])
        named = search(r'checkpoint="([^"]+)"', source)
        beside = f"; transformers names [{named[1]}]({HUB}{named[1]})" if named else ""
        published = [f"default only{beside}"]
    return [f"`{family.name}`", default, "<br>".join(published), _spread(family)]


def _spread(family: Family) -> str:
    """Return whether a family's experts can be spread over ranks; nothing for one without any."""
    rules = expert_rules(family)
    if rules is None:
        return ""
    if DISPATCHED not in rules:
        return "no"
    return "no: its plan cuts dense layers, too" if set(rules) - {DISPATCHED, HELD} else "yes"


def verdict_on(family: Family, checkpoint: Checkpoint | None = None) -> str:
    """Return one of the verdicts, and the reason or the settings."""
    try:
        config = config_of(family, checkpoint)
        model = _empty(family, config)
    except BUILDING_FAILS as error:
        return f"{NOT_BUILT}: {type(error).__name__}: {one_line(error)}"
    changed: list[str] = []
    while reasons := refusals_of(model):
        options = [reason.split("=")[0] for reason in reasons]
        known = [option for option in options if option in SETTINGS and option not in changed]
        if not known:
            return f"{REFUSED}: {'; '.join(reasons)}".replace("|", "\\|")
        for option in known:
            setattr(config.get_text_config(), option, SETTINGS[option])
        changed += known
        model = _empty(family, config)
    if changed:
        return f"{SETTING}: " + ", ".join(f"{option}={SETTINGS[option]}" for option in changed)
    return TAKEN


def _empty(family: Family, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return family.kind(config)


def refusals_of(model: PreTrainedModel) -> list[str]:
    """Return the reasons why a model is not taken; [] if it is."""
    name = f"{type(model).__name__}: "
    try:
        check_model(model)
    except (NotImplementedError, ValueError) as error:
        return [line.partition(name)[2] for line in str(error).splitlines() if name in line]
    return []


def one_line(error: BaseException) -> str:
    """Return the message of an exception without line breaks."""
    return " ".join(str(error).split())


# ---- models with images

_GLM_ROPE = {**_ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
_TOKENS = {"image_token_id": 57, "video_token_id": 58}
_LETTERS = "ABCDEFGHIJ"  # Chameleon's digits

# What default configurations lack so that a model could be built of them, or take images.
GIVEN: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "chameleon": {
        "vocabulary_map": {"<image>": 57, **{f"IMGIMG{x}Z": i for i, x in enumerate(_LETTERS)}}
    },
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {
                "full_attention": {**_ROPE, "mrope_section": [24, 20, 20]},
                "sliding_attention": {**_ROPE, "mrope_section": [24, 20, 20]},
            }
        }
    },
    "deepseek_ocr2": {
        "text_config": {
            "num_hidden_layers": 2,
            "num_experts_per_tok": 6,
            "mlp_layer_types": ["dense", "sparse"],
        }
    },
    "emu3": {
        "text_config": {"attention_dropout": 0.0},
        "vocabulary_map": {"<image>": 57, "<|extra_200|>": 58},
    },
    "glm46v": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glm4v": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glm4v_moe": {"text_config": {"head_dim": 128, "rope_parameters": _GLM_ROPE}},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]]},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {**_ROPE, "mrope_section": [16, 16, 16, 16]},
        }
    },
    "minicpm_ocr": _TOKENS,
    "minicpmv4_6": _TOKENS,
    "minicpmv4_7": _TOKENS,
    "nemotron_h_omni": {**_TOKENS, "audio_token_id": 59},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 56, "vision_end_token_id": 57},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}, "vision_start_token_id": 56},
    "step3p7": {"text_config": {"sliding_window": 512}},
}


def image_row(family: Family) -> list[str]:
    """Return the cells of a model with images, under IMAGE_COLUMNS."""
    said = _images_of(family)
    name = f"`{family.name}`"
    if family.name in GIVEN and not said.startswith((REFUSED, NOT_BUILT)):
        name += f" (given {', '.join(GIVEN[family.name])})"
    return [name, f"`{family.kind.__name__}`", said]


def _images_of(family: Family) -> str:
    """Return the modalities that a family takes and whether tests train a tiny model of it, or the
    reason against."""
    try:
        model = _empty(family, family.kind.config_class(**GIVEN.get(family.name, {})))
    except BUILDING_FAILS as error:
        return f"{NOT_BUILT}: {type(error).__name__}: {one_line(error)}".replace("|", "\\|")
    if of_text := "; ".join(refusals_of(model)):
        return f"{REFUSED}: {of_text}".replace("|", "\\|")
    try:
        modalities = VisionModel(model).modalities
    except UnsupportedImages as reason:
        return f"{REFUSED}: {one_line(reason)}; taken on text".replace("|", "\\|")
    said = ", ".join(f"{name}s" for name in modalities)
    tiny = TINY_WITH_IMAGES.get(family.name)
    if tiny is None:
        return f"{said}; not probed: there is no tiny model of it here"
    has_untried_videos = "video" in modalities and tiny.video is None
    return f"{said}; probed" + (" with images" if has_untried_videos else "")


# ---- the files


def rows_of(name: str) -> list[list[str]]:
    """Return the rows of a file of the tables, without its columns."""
    with (PAGES / name).open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


def main() -> None:
    """Write both files. Asking all families takes minutes."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for name, columns, asked, row in (
        ("families.csv", COLUMNS, families(), family_row),
        ("image_families.csv", IMAGE_COLUMNS, image_families(), image_row),
    ):
        with (PAGES / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(map(row, asked.values()))


if __name__ == "__main__":
    main()
