"""Images that are drawn to run a vision tower on, without the model's processor.

Models take images in a few forms, which the names of their tensors tell apart:

    grids       a row of values for each patch, with the numbers of patches
    places      the same, with the place of each patch
    shapes      the same, with a mask
    strips      pixels of all patches side by side, with the numbers of patches
    sizes       pixels, with the height and the width of an image
    pixels      pixels of the one size that the configuration names, with a mask or without

Which values a row has, and which dimensions pixels, is not the same everywhere. So several forms
may come into question, of which the first one that the tower takes is the model's.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from hf_flexseq.hf.model.towers import patch_size

Tensors = dict[str, torch.Tensor]

_TILES = 5  # that an image of any size is cut into, with a small copy of it


class ImageForm(NamedTuple):
    """How a model takes an image."""

    sides: tuple[int, ...]
    """Patches along each side of the square images that can be drawn."""
    draw: Callable[[int], Tensors]
    """Draws the tensors of one image with so many patches along each side."""


def image_forms(config: PreTrainedConfig, names: Collection[str]) -> Iterator[ImageForm]:
    """Yield the possible forms of a model's images, none if its tensors are of another
    kind. names: of the tensors that it takes for images."""
    vision: Any = getattr(config, "vision_config", None)
    if vision is None or "pixel_values" not in names:
        return
    size = patch_size(config)
    channels = _first(vision, ("in_channels", "in_chans", "num_channels"), 3)
    # An image of any size has two tokens along a side, or four; a token is two patches wide if
    # that is not known.
    side = 2 * _first(vision, ("spatial_merge_size", "pooling_kernel_size"), 2)
    sides = (side, 2 * side)
    grid = next((name for name in names if name.endswith(("grid_thw", "grid_hw"))), None)
    if grid is not None:
        frames = _first(vision, ("temporal_patch_size",), 2)
        rows = channels * size**2
        for shape in ((frames * rows,), (rows,), (channels, size, size)):
            yield ImageForm(sides, partial(_with_grid, shape, grid, "image_merge_sizes" in names))
        return
    drawn = {
        "image_position_ids": _with_places,
        "spatial_shapes": _with_shape,
        "target_sizes": _in_a_strip,
        "image_sizes": _with_size,
    }
    for name, draw in drawn.items():
        if name in names:
            yield ImageForm(sides, partial(draw, channels, size))
    yield from _pixels(vision, names, channels, size)


def _first(vision: Any, names: Collection[str], otherwise: int) -> int:
    """Return the first of some options that is a number."""
    found = [getattr(vision, name, None) for name in names]
    return next((one for one in found if isinstance(one, int)), otherwise)


def _with_grid(shape: tuple[int, ...], grid: str, has_merge: bool, side: int) -> Tensors:
    """shape: of a patch. has_merge: True if images say how many patches become a token."""
    sizes = [side, side] if grid.endswith("grid_hw") else [1, side, side]
    tensors = {"pixel_values": torch.rand(side**2, *shape), grid: torch.tensor([sizes])}
    if has_merge:
        tensors["image_merge_sizes"] = torch.tensor([2])
    return tensors


def _with_places(channels: int, size: int, side: int) -> Tensors:
    numbers = torch.arange(side)
    rows, columns = torch.meshgrid(numbers, numbers, indexing="ij")
    return {
        "pixel_values": torch.rand(1, side**2, channels * size**2),
        "image_position_ids": torch.stack([columns.flatten(), rows.flatten()], dim=1)[None],
    }


def _with_shape(channels: int, size: int, side: int) -> Tensors:
    return {
        "pixel_values": torch.rand(1, side**2, channels * size**2),
        "spatial_shapes": torch.tensor([[side, side]]),
        "pixel_attention_mask": torch.ones(1, side**2, dtype=torch.int64),
    }


def _in_a_strip(channels: int, size: int, side: int) -> Tensors:
    return {
        "pixel_values": torch.rand(1, channels, size, side**2 * size),
        "target_sizes": torch.tensor([[side, side]], dtype=torch.int32),
    }


def _with_size(channels: int, size: int, side: int) -> Tensors:
    pixels = side * size
    return {
        "pixel_values": torch.rand(1, channels, pixels, pixels),
        "image_sizes": torch.tensor([[pixels, pixels]]),
    }


def _pixels(vision: Any, names: Collection[str], channels: int, size: int) -> Iterator[ImageForm]:
    """Yield forms of images of one size, a single one or several tiles."""
    given = getattr(vision, "image_size", None)
    sizes = set(given) if isinstance(given, (list, tuple)) else {given}
    pixels = sizes.pop()
    if sizes or not isinstance(pixels, int) or pixels < size:
        return
    masks = [name for name in names if name.endswith("mask")]
    leadings: list[tuple[int, ...]] = [(1,), (1, 1)]
    if "image_sizes" in names:
        leadings.append((1, _TILES))
    for leading in leadings:

        def draw(side: int, leading: tuple[int, ...] = leading) -> Tensors:
            tensors = {"pixel_values": torch.rand(*leading, channels, pixels, pixels)}
            for name in masks:
                tensors[name] = torch.ones(*leading, pixels, pixels, dtype=torch.bool)
            if leading[-1] == _TILES:
                tensors["image_sizes"] = torch.tensor([[pixels, pixels]])
            return tensors

        yield ImageForm((pixels // size,), draw)
