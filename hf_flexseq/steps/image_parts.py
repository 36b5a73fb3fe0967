"""The tensors of images: those of one example divided by image, and images that a tower takes
together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_flexseq.steps.images import Image


def grid_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the grids of images, [images, 2 or 3] patches; None for images without them."""
    for name, value in tensors.items():
        if name.endswith(("grid_thw", "grid_hw")):
            return value
    return None


def parts_of(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Return the tensors of each image of an example, and numbers that the counts of their tokens
    are proportional to; all in one where it is not known how to divide them."""
    whole = [dict(tensors)]
    grid = grid_of(tensors)
    if grid is not None:
        weights = grid.prod(dim=-1).tolist()
        parts: list[dict[str, torch.Tensor]] = [{} for _ in weights]
        for name, value in tensors.items():
            if value.shape[0] == len(weights):
                pieces = value.split(1)
            elif value.shape[0] == sum(weights):
                pieces = value.split(weights)
            else:
                return whole, [1]
            for part, piece in zip(parts, pieces, strict=True):
                part[name] = piece
        return parts, weights
    counts = {value.shape[0] for value in tensors.values() if value.dim()}
    if len(counts) != 1:
        return whole, [1]
    (count,) = counts
    for name, value in tensors.items():
        # sizes, masks and the like: images of different sizes have different numbers of tokens
        if not name.startswith("pixel_values") and (value != value[:1]).any():
            return whole, [1]
    parts = []
    for index in range(count):
        parts.append({name: value[index : index + 1] for name, value in tensors.items()})
    return parts, [1] * count


def batches_of(images: Sequence[Image]) -> list[list[int]]:
    """Return the indices of images that one call of the tower takes together: those with grids,
    whose patches are rows, and those of equal shapes."""
    together: dict[Any, list[int]] = {}
    for index, image in enumerate(images):
        key: Any
        if grid_of(image.arguments) is not None:
            key = (image.modality,)
        else:
            shapes = tuple((name, value.shape) for name, value in image.arguments.items())
            key = (image.modality, shapes)
        together.setdefault(key, []).append(index)
    return list(together.values())
