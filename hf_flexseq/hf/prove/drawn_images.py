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

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_flexseq.hf.model.towers import patch_size

Tensors = dict[str, torch.Tensor]

MOST_PATCHES = 4096
"""Patches of the largest image that is drawn."""
_TILES = 5  # that an image of any size is cut into, with a small copy of it


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageForm:
    """How a model takes an image."""

    patches: tuple[int, ...]
    """Patches of the square images that can be drawn, ascending: four times as many again and
    again, or one number alone."""
    tensors_of: Callable[[int], Tensors]
    """Draws the tensors of one image with so many patches along each side."""

    def draw(self, patches: int) -> Tensors:
        """Return the tensors of a square image."""
        return self.tensors_of(math.isqrt(patches))


def image_forms(config: PreTrainedConfig, names: Collection[str]) -> Iterator[ImageForm]:
    """Yield the possible forms of a model's images, none if its tensors are of another
    kind. names: of the tensors that it takes for images."""
    vision: Any = getattr(config, "vision_config", None)
    if vision is None or "pixel_values" not in names:
        return
    size = patch_size(config)
    grid = next((name for name in names if name.endswith(("grid_thw", "grid_hw"))), None)
    if grid is not None:
        yield from _grids(vision, grid, "image_merge_sizes" in names, size)
        return
    drawn: dict[str, Callable[[int, int, int], Tensors]] = {
        "image_position_ids": _with_places,
        "spatial_shapes": _with_shape,
        "target_sizes": _in_a_strip,
        "image_sizes": _with_size,
    }
    for name, draw in drawn.items():
        if name in names:
            tensors_of = partial(draw, _channels(vision), size)
            yield ImageForm(patches=_any_size(vision), tensors_of=tensors_of)
    yield from _pixels(vision, names, size)


def _channels(vision: Any) -> int:
    for name in ("in_channels", "in_chans", "num_channels"):
        value = getattr(vision, name, None)
        if isinstance(value, int):
            return value
    return 3


def _any_size(vision: Any) -> tuple[int, ...]:
    """Return the patches of images of a model that takes any size: from two tokens along a side
    on, which are two patches wide if that is not known."""
    found = [getattr(vision, name, None) for name in ("spatial_merge_size", "pooling_kernel_size")]
    merged = next((one for one in found if isinstance(one, int)), 2)
    patches = [(2 * merged) ** 2]
    while 4 * patches[-1] <= MOST_PATCHES:
        patches.append(4 * patches[-1])
    return tuple(patches)


def _grids(vision: Any, grid: str, has_merge: bool, size: int) -> Iterator[ImageForm]:
    """Yield forms with a row for each patch. size: of a patch in pixels. has_merge: True if images
    say how many patches become a token."""
    channels = _channels(vision)
    frames = getattr(vision, "temporal_patch_size", None) or 2
    shapes = (
        (channels * frames * size**2,),
        (channels * size**2,),
        (channels, size, size),
    )
    for shape in shapes:

        def tensors_of(side: int, shape: tuple[int, ...] = shape) -> Tensors:
            sizes = [side, side] if grid.endswith("grid_hw") else [1, side, side]
            tensors = {"pixel_values": torch.rand(side**2, *shape), grid: torch.tensor([sizes])}
            if has_merge:
                tensors["image_merge_sizes"] = torch.tensor([2])
            return tensors

        yield ImageForm(patches=_any_size(vision), tensors_of=tensors_of)


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


def _pixels(vision: Any, names: Collection[str], size: int) -> Iterator[ImageForm]:
    """Yield forms of images of one size."""
    given = getattr(vision, "image_size", None)
    sizes = set(given) if isinstance(given, (list, tuple)) else {given}
    pixels = sizes.pop()
    if sizes or not isinstance(pixels, int) or pixels < size:
        return
    leadings: list[tuple[int, ...]] = [(1,), (1, 1)]
    for leading in [*leadings, (1, _TILES)] if "image_sizes" in names else leadings:
        has_size = len(leading) > 1 and leading[1] == _TILES

        def tensors_of(
            side: int, leading: tuple[int, ...] = leading, has_size: bool = has_size
        ) -> Tensors:
            tensors = {"pixel_values": torch.rand(*leading, _channels(vision), pixels, pixels)}
            for name in names:
                if name.endswith("mask"):
                    tensors[name] = torch.ones(*leading, pixels, pixels, dtype=torch.bool)
            if has_size:
                tensors["image_sizes"] = torch.tensor([[pixels, pixels]])
            return tensors

        patches = leading[-1] * (pixels**2 // size**2)
        yield ImageForm(patches=(patches,), tensors_of=tensors_of)
