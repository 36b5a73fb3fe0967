"""The tower of a vision-language model as its cost needs it: its parameters, which of them are
trained, and its sizes. And rows with tokens that stand for images, video or audio, which are
refused where a model takes text alone.

A tower is all of a model that is neither its text model nor embedding or head: the vision model
with its projector, and towers of other modalities. Models with towers train on text, where they
run the layers of a text model. Which of them take images is found out in `vision.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_flexseq.cost.tower import TowerShape
from hf_flexseq.hf.model.noise import has_noise_of_its_own, noisy_option
from hf_flexseq.steps.images import TYPES, RowImages
from hf_flexseq.steps.prefetch import NO_IMAGES, ImageReader
from hf_flexseq.steps.source_row import SourceRow

# Names of sizes in configurations of vision models, and a usual tower where they have none.
_SIZES: dict[str, tuple[tuple[str, ...], int]] = {
    "layers": (("num_hidden_layers", "depth", "num_layers"), 24),
    "hidden": (("hidden_size", "embed_dim", "hidden_dim"), 1024),
    "intermediate": (("intermediate_size", "mlp_dim", "ffn_dim"), 4096),
}


def tower_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the towers of `model`; [] for a model of text."""
    if not isinstance(model, PreTrainedModel) or model.config.get_text_config() is model.config:
        return []
    of_text = {id(one) for part in _text_parts(model) for one in part.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in of_text]


def towers_draw_noise(model: PreTrainedModel) -> bool:
    """Tell if the towers of `model` draw random numbers in training, as for dropout."""
    if any(has_noise_of_its_own(module) for module in modules_outside_text(model)):
        return True
    return noisy_option(model.config, of_text=False) is not None


def modules_outside_text(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules of `model` outside of the text model, the embedding and the head."""
    of_text = {id(module) for part in _text_parts(model) for module in part.modules()}
    yield from (module for module in model.modules() if id(module) not in of_text)


def _text_parts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the text model, the embedding and the head."""
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    return [part for part in parts if part is not None]


def tower_shape(model: nn.Module) -> TowerShape | None:
    """Return the sizes of the vision tower of `model`, by its configuration; None without one.
    The usual size replaces any that a configuration does not have."""
    parameters = tower_parameters(model)
    config: Any = getattr(model, "config", None)
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        has_tower = bool(parameters)
    else:  # the tower may have no configuration of its own, or be a part of the text model
        has_tower = config is not None and placeholder_of(config, "image") is not None
    if not has_tower:
        return None
    sizes = {}
    for size, (names, usual) in _SIZES.items():
        found = [getattr(vision, name, None) for name in names]
        sizes[size] = next((value for value in found if isinstance(value, int)), usual)
    merged = getattr(vision, "spatial_merge_size", None) or 1
    streams = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return TowerShape(
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        intermediate=sizes["intermediate"],
        patches_per_token=float(merged**2),
        row_numbers=streams * config.get_text_config().hidden_size,
        is_trained=any(parameter.requires_grad for parameter in parameters),
    )


def attention_of_tower(config: Any) -> str | None:
    """Return the name of the implementation of attention in the vision tower."""
    vision = getattr(config, "vision_config", None)
    name: str | None = getattr(vision, "_attn_implementation", None)
    return name


def attention_of_text(base: PreTrainedModel, name: str | None = None) -> Any:
    """Return an implementation of attention for the text model alone, and for the configurations
    around it, as `set_attn_implementation` takes it; towers keep their own. name: None for the
    implementations that they have, which may differ from each other."""
    text = base.config.get_text_config()
    chosen: Any = name or text._attn_implementation
    for outer, part in reversed(_path_to(base.config, text)):
        chosen = {"": name or outer._attn_implementation, part: chosen}
    return chosen


def _path_to(config: Any, wanted: Any) -> list[tuple[Any, str]]:
    """Return the way from a configuration to one inside it: each configuration, and the name of
    the next one in it; [] where there is none."""
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is wanted:
            return [(config, name)]
        below = [] if inner is None else _path_to(inner, wanted)
        if below:
            return [(config, name), *below]
    return []


def patch_size(config: Any) -> int:
    """Return the width of a patch in pixels, as a tower's cost needs it."""
    size = getattr(getattr(config, "vision_config", None), "patch_size", 14)
    if isinstance(size, (list, tuple)):
        size = size[-1]
    return int(size or 14)


# ---- models that take text alone


# Options of a configuration that name the token instead of an image, or of a part of one.
_PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)


@dataclass(frozen=True)
class TextReader(ImageReader):
    """Reads rows of a model that could take images elsewhere, and takes none here."""

    config: PreTrainedConfig
    why: str
    """Why it takes none."""

    def read(self, row: SourceRow) -> SourceRow:
        """Return a row of text as it is. Raises NotImplementedError for other tokens."""
        what = _other_than_text(self.config, row.columns, row.names_of_images)
        if what is not None:
            raise NotImplementedError(f"{what}; {self.why}: train on examples of text alone")
        return replace(row, images=RowImages(placeholders={}))


def reader_of_text(config: PreTrainedConfig, why: str) -> ImageReader:
    """Return the reader that refuses rows with other tokens than text."""
    return NO_IMAGES if config.get_text_config() is config else TextReader(config, why)


def placeholders_of(config: PreTrainedConfig) -> dict[str, int]:
    """Return the tokens that stand for parts of images, video or audio, by option."""
    tokens = {option: getattr(config, option, None) for option in _PLACEHOLDERS}
    return {option: token for option, token in tokens.items() if token is not None}


def placeholder_of(config: PreTrainedConfig, modality: str) -> int | None:
    """Return the token that stands for parts of one modality; None without one."""
    tokens = placeholders_of(config).items()
    return next((token for option, token in tokens if option.startswith(modality)), None)


def _other_than_text(
    config: PreTrainedConfig, columns: Mapping[str, torch.Tensor], names: list[str]
) -> str | None:
    """Return where a row has tokens of images; None for text. columns: each [tokens]."""
    if names:
        return f"examples have {', '.join(names)}"
    for name in TYPES:
        if name in columns and columns[name].any():
            return f"{name} marks tokens of images"
    for option, token in placeholders_of(config).items():
        if "input_ids" in columns and (columns["input_ids"] == token).any():
            return f"input_ids have the token {token}, config.{option}, instead of an image"
    return None
