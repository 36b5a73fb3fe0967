"""Masks in which the tokens of an image see each other both ways: in which layers of a model, and
which tokens.

transformers' models make such masks of a column of types: Gemma 3 and 4 show every run of tokens
of an image or a video to itself, PaliGemma the image and the prompt. In a trial (`trial.py`) the
masks of an empty copy show which layers do so; the column of each example says which tokens.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from hf_flexseq.base.patches import Patch
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.hf.model.trial import WHOLE, try_types
from hf_flexseq.plan.blocks import Range
from hf_flexseq.steps.images import UnsupportedImages

# The function of a model's module that numbers runs of tokens of images by their types.
_NUMBERING = "get_block_sequence_ids_for_mask"

_PREFIX = (
    "paligemma",
)  # model types whose tokens of type 0, an image and a prompt, are one block


class MasksOfImages:
    """Which layers of a model show which tokens both ways."""

    def __init__(self, base: PreTrainedModel) -> None:
        """Raises UnsupportedImages for masks of other kinds."""
        trial = try_types(base)
        kind = unsharded_class(base)
        name = kind.__name__
        reason = trial.refusal or trial.fault
        if reason is not None:
            raise UnsupportedImages(f"{name} could not be tried on tokens of images ({reason})")
        showing = [call for call in trial.calls if call.blocks is not None]
        layers = {call.asked.layer: call.module for call in showing}
        if None in layers:
            raise UnsupportedImages(
                f"{layers[None]} shows images both ways, and has no number among the layers"
            )
        self.layers = frozenset(layer for layer in layers if layer is not None)
        """Numbers of these layers; of no layer in a model whose attention is causal."""
        # a mask that shows a whole block goes beyond the window of its layer: that is not computed
        whole = [call.asked.reach.window for call in showing if call.blocks == WHOLE]
        self._longest = min(filter(None, whole), default=None)
        self._column = trial.types[-1] if trial.types else ""
        self._number = getattr(sys.modules[kind.__module__], _NUMBERING, None)
        self._is_prefix = base.config.model_type in _PREFIX
        if self.layers and self._number is None and not self._is_prefix:
            raise UnsupportedImages(
                f"layer {min(self.layers)} of {name} shows tokens of images both ways, by a rule "
                "that is not known"
            )

    def blocks(self, columns: Mapping[str, torch.Tensor], *, has_images: bool) -> list[Range]:
        """Return the tokens of a sequence that see each other both ways, as ranges. columns: of
        the sequence, each [tokens]. Raises ValueError for a block that is too long, and for images
        without the column of types."""
        if not self.layers:
            return []
        types = columns.get(self._column)
        if types is None:
            if not has_images:
                return []
            raise ValueError(
                f"it has no {self._column}, by which the model shows the tokens of an image to "
                "each other: let the model's own processor make the examples"
            )
        if self._number is not None:
            numbers = self._number(types.unsqueeze(0), device=types.device)[0]  # [tokens]
        else:
            numbers = torch.where(types == 0, 0, -1)  # a prefix
        blocks = _runs(numbers)
        for start, stop in blocks:
            if self._longest is not None and stop - start > self._longest:
                raise ValueError(
                    f"its tokens {start} to {stop - 1} are of one image and see each other, but a "
                    f"layer's window has {self._longest} tokens: make the image smaller"
                )
        return blocks


@contextmanager
def layers_told_causal(model: PreTrainedModel) -> Iterator[None]:
    """Call the layers of a model with towers causal inside the block. Some say that they are not
    and rely on a mask, which is causal but for the tokens of images; the trial has seen it."""
    with ExitStack() as told:
        if model.config.get_text_config() is not model.config:
            for module in model.get_decoder().modules():
                if getattr(module, "is_causal", None) is False and hasattr(module, "layer_idx"):
                    told.enter_context(Patch(module, is_causal=True))
        yield


def _runs(numbers: torch.Tensor) -> list[Range]:
    """Return the ranges of tokens of one number, without those below 0. numbers: [tokens]. Raises
    ValueError for a number that is in two places."""
    values, counts = torch.unique_consecutive(numbers, return_counts=True)
    runs: list[Range] = []
    seen: set[int] = set()
    stop = 0
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        start, stop = stop, stop + count
        if value < 0:
            continue
        if value in seen:
            raise ValueError(
                f"its tokens {start} to {stop - 1} see others that are not next to them"
            )
        seen.add(value)
        runs.append((start, stop))
    return runs
