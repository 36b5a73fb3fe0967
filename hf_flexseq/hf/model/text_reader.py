"""Refuse rows with tokens that stand for images, video or audio, where a model takes text alone.

Models with towers train on text, where their layers are those of a text model. Which of them take
images is found out in `vision.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from hf_flexseq.steps.images import TYPES, RowImages
from hf_flexseq.steps.source_row import DrawnStep, SourceRow

# Options of a configuration that name the token instead of an image, or of a part of one.
_PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)


@dataclass(frozen=True, slots=True)
class TextReader:
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

    @property
    def draws_noise(self) -> bool:
        """Return False: there are no features."""
        return False

    def planned(self, step: DrawnStep) -> DrawnStep:
        """Return a step, which has no images."""
        return step


def reader_of_text(config: PreTrainedConfig, why: str) -> TextReader | None:
    """Return what refuses rows with other tokens than text; None for a model of text."""
    return None if config.get_text_config() is config else TextReader(config, why)


def placeholders_of(config: PreTrainedConfig) -> dict[str, int]:
    """Return the tokens that stand for parts of images, video or audio, by option."""
    tokens = {option: getattr(config, option, None) for option in _PLACEHOLDERS}
    return {option: token for option, token in tokens.items() if token is not None}


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
