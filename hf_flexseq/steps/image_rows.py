"""Which images of a padded batch belong to which of its rows.

A processor of transformers joins the images of all that it is given: patches of one image after
the other with a row of a grid for each, or images, or tiles of images. Tokens tell where one ends:
their number is proportional to an image's patches, or equal for images and tiles of one size.
Other images are told apart if every row that has any has one.
"""

from collections.abc import Mapping, Sequence

import torch

from hf_flexseq.plan.images import MODALITIES
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.image_parts import parts_of

KINDS = "mm_token_type_ids"
"""The column of types that tells images and videos apart."""
NUMBERS = {name: number for number, name in enumerate(MODALITIES, start=1)}
"""Their numbers in it."""

_SECONDS, _GRIDS_OF_VIDEOS = "second_per_grid_ts", "video_grid_thw"
"""One of each for every video; positions of Qwen2.5-VL's tokens take the seconds, its tower does
not."""


def images_of_rows(
    call: ModelCall, placeholders: Mapping[str, int], arguments: Mapping[str, Sequence[str]]
) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of the images of each row of a padded batch. placeholders: the token of
    each modality. arguments: names of the tensors that the model takes for it.

    Raises ValueError where it is not known which images belong to which row, and for types that
    contradict the tokens.
    """
    own: list[dict[str, torch.Tensor]] = [{} for _ in call.lengths]
    left = dict(call.images)
    types = call.types.get(KINDS)
    for modality, placeholder in placeholders.items():
        tensors = {name: left.pop(name) for name in arguments[modality] if name in left}
        if not tensors:
            continue  # tokens without images are found in each row
        is_image = (call.ids == placeholder) & call.mask  # [B, S]
        if types is not None and (types[is_image] != NUMBERS[modality]).any():
            raise ValueError(
                f"{KINDS} of a batch are not {NUMBERS[modality]} at all of its tokens "
                f"{placeholder}, which stand for {modality}s: prompts and types are padded on "
                "different sides; set the tokenizer's padding_side='left'"
            )
        tokens = is_image.sum(dim=1).tolist()
        for row, part in zip(own, parts_of_rows(tensors, tokens), strict=True):
            row.update(part)
    if _SECONDS in left:
        counts = [len(row.get(_GRIDS_OF_VIDEOS, ())) for row in own]
        if sum(counts) == len(left[_SECONDS]):
            for row, seconds in zip(own, left.pop(_SECONDS).split(counts), strict=True):
                row.update({_SECONDS: seconds} if len(seconds) else {})
    if left:
        raise ValueError(
            f"a batch has {', '.join(left)}, and the model does not say to which of its rows they "
            "belong: leave them out"
        )
    return own


def parts_of_rows(
    tensors: Mapping[str, torch.Tensor], tokens: Sequence[int]
) -> list[dict[str, torch.Tensor]]:
    """Return each row's part of the tensors of a batch's images, which are in the order of the
    rows; {} for a row without images.

    tokens: image tokens of each row. Raises ValueError where they do not tell which images belong
    to which row.
    """
    parts, weights = parts_of(tensors)
    rows: list[list[dict[str, torch.Tensor]]] = [[] for _ in tokens]
    with_images = [row for row, count in enumerate(tokens) if count]
    if len(parts) == len(with_images) and (len(parts) == 1 or weights is None):
        # As many images as rows that have any: one each, whatever their numbers of tokens are.
        for row, part in zip(with_images, parts, strict=True):
            rows[row] = [part]
        return [_joined(of_row) for of_row in rows]
    if len(parts) == 1 or weights is None:
        raise _unknown_rows(tensors, tokens)
    total, left = sum(weights), list(tokens)
    row = 0
    for part, weight in zip(parts, weights, strict=True):
        while row < len(left) and not left[row]:
            row += 1
        count, rest = divmod(sum(tokens) * weight, total)
        if rest or row == len(left) or count > left[row]:
            raise _unknown_rows(tensors, tokens)
        rows[row].append(part)
        left[row] -= count
    return [_joined(of_row) for of_row in rows]


def _unknown_rows(tensors: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> ValueError:
    return ValueError(
        f"the rows of a batch have {list(tokens)} tokens of images, which do not tell which of "
        f"its {', '.join(tensors)} belong to which row: give batches of one row, or a processor "
        "whose images have as many tokens as they have patches"
    )


def _joined(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the joined tensors of several images."""
    if not parts:
        return {}
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
