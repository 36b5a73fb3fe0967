"""Refuse steps with tokens that stand for images, video or audio.

Their blocks attend in both directions in some models (Gemma 3 and 4), and what they stand for
comes in tensors that are not per token. Models that could take them train on text, where their
layers are those of a text model.
"""

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from hf_flexseq.distributed.agreement import Attempt
from hf_flexseq.distributed.communicator import Communicator

# Columns that say of every token what it stands for: 0 is text.
_TYPES = ("token_type_ids", "mm_token_type_ids")

# Options of a configuration that name the token instead of an image, or of a part of one.
_PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)


def check_text_alone(
    config: PreTrainedConfig, columns: Mapping[str, torch.Tensor], communicator: Communicator
) -> None:
    """Raise NotImplementedError, on all ranks, if one has drawn tokens other than text. columns:
    each [1, tokens], of this rank's row. Collective over the world unless the model is text."""
    if config.get_text_config() is config:
        return
    with Attempt() as looking:
        _check_columns(config, columns)
    looking.raise_together(communicator.cpu_group.gather_values, "looking for tokens of images")


def _check_columns(config: PreTrainedConfig, columns: Mapping[str, torch.Tensor]) -> None:
    for name in _TYPES:
        if name in columns and columns[name].any():
            raise NotImplementedError(
                f"{name} marks tokens of images, whose blocks attend in both directions; train on "
                "examples of text alone, or leave the column out of them"
            )
    if "input_ids" not in columns:
        return
    for option in _PLACEHOLDERS:
        token = getattr(config, option, None)
        if token is not None and (columns["input_ids"] == token).any():
            raise NotImplementedError(
                f"input_ids have the token {token}, config.{option}, instead of an image; train "
                "on examples of text alone"
            )
