"""Which tensors, and how many tokens, each image of an example has, and which images a tower takes
in one call."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_flexseq.steps.images import Image

Tensors = Mapping[str, torch.Tensor]

_OF_ONE_ROW = "target_sizes"  # of images whose patches stand side by side: [1, 3, height, width]


def grid_of(tensors: Tensors) -> torch.Tensor | None:
    """Return the grids of images, [images, 2 or 3] patches; None for images without them."""
    for name, value in tensors.items():
        if name.endswith(("grid_thw", "grid_hw")):
            return value
    return None


def images_in(tensors: Tensors, is_placeholder: torch.Tensor) -> list[tuple[Tensors, int]]:
    """Return the tensors of each image of an example, with the number of its tokens. They are one
    image where it is not known how to divide them. is_placeholder: [tokens], which of the
    example's tokens stand for parts of images."""
    tokens = int(is_placeholder.sum())
    parts, weights = parts_of(tensors)
    runs = _runs(is_placeholder)
    if len(parts) == len(runs):
        return list(zip(parts, runs, strict=True))
    if weights is None:
        return [(tensors, tokens)]
    total = sum(weights)
    if any(tokens * weight % total for weight in weights):
        return [(tensors, tokens)]
    counts = [tokens * weight // total for weight in weights]
    return list(zip(parts, counts, strict=True))


def _runs(is_placeholder: torch.Tensor) -> list[int]:
    """Return the lengths of the runs of placeholders."""
    edges = torch.diff(is_placeholder.int(), prepend=torch.tensor([0]), append=torch.tensor([0]))
    starts = (edges == 1).nonzero().flatten()
    stops = (edges == -1).nonzero().flatten()
    lengths: list[int] = (stops - starts).tolist()
    return lengths


def parts_of(tensors: Tensors) -> tuple[list[dict[str, torch.Tensor]], list[int] | None]:
    """Return the tensors of each image, and numbers that the counts of their tokens are
    proportional to, None where these are unknown; all in one where it is not known how to divide
    them."""
    whole = [dict(tensors)]
    grid = grid_of(tensors)
    if grid is not None:
        weights = grid.prod(dim=-1).tolist()
    else:
        counts = {value.shape[0] for value in tensors.values() if value.dim()}
        if len(counts) != 1:
            return whole, [1]
        weights = [1] * counts.pop()
    parts: list[dict[str, torch.Tensor]] = [{} for _ in weights]
    are_alike = True
    for name, value in tensors.items():
        if value.shape[0] == len(weights):
            # sizes, masks and the like: such images have different numbers of tokens
            is_size = not name.startswith("pixel_values") and value is not grid
            are_alike &= not is_size or bool((value == value[:1]).all())
            pieces = value.split(1)
        elif grid is not None and value.shape[0] == sum(weights):
            pieces = value.split(weights)
        else:
            return whole, [1]
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts, weights if are_alike else None


def values_of_video(video: Tensors) -> tuple[tuple[str, int], ...] | None:
    """Return a video's values besides grid and patches, by name: a whole number each, such as the
    patches per token. None if a value is anything else."""
    grid = grid_of(video)
    values = []
    for name, value in video.items():
        if value is grid or name.startswith("pixel_values"):
            continue
        if value.numel() != 1 or value.is_floating_point():
            return None
        values.append((name, int(value)))
    return tuple(values)


def parts_of_video(video: Tensors, frames: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of consecutive parts of a video with a grid, [1, 3], and the same other
    values. frames: of each part."""
    grid = grid_of(video)
    assert grid is not None, "a video is divided by its grid"
    frame_patches = int(grid[0, 1:].prod())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in frames]
    for name, value in video.items():
        pieces: Sequence[torch.Tensor] = [value] * len(frames)
        if value is grid:
            pieces = [value.new_tensor([[count, *grid[0, 1:].tolist()]]) for count in frames]
        elif name.startswith("pixel_values"):
            pieces = value.split([count * frame_patches for count in frames])
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def batches_of(images: Sequence[Image]) -> list[list[int]]:
    """Return the indices of images that one call of the tower takes together: images with grids,
    whose patches are rows, and images of equal shapes. An image whose patches are side by side in
    one row has a separate call."""
    together: dict[Any, list[int]] = {}
    for index, image in enumerate(images):
        key: Any
        if grid_of(image.arguments) is not None:
            key = (image.size.modality, tuple(image.arguments))
        elif any(name.startswith(_OF_ONE_ROW) for name in image.arguments):
            key = index
        else:
            shapes = tuple((name, value.shape) for name, value in image.arguments.items())
            key = (image.size.modality, shapes)
        together.setdefault(key, []).append(index)
    return list(together.values())
