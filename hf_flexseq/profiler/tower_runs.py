"""Runs of a vision tower alone, for the fit and to test it, and their rows in the linear system.

    patch     patches of all images
    pair      pairs of patches of one image
    image     images
    call      1

One image and several smaller ones with as many patches together differ in pairs and in images,
and an image of fewer patches in patches. Which of an image's pairs attend to each other is the
tower's matter: one whose layers read windows has fewer, and a pair takes fewer seconds. Where all
images have one size, patches stand for all of it.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.tower import TowerCost

MOST_IMAGES = 8  # of a run whose images have one size

PATCH, PAIR, PER_IMAGE, CALL = "patch", "pair", "image", "tower call"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesShape:
    """A run of the tower on equal images, in one call: forward, and backward if it is trained."""

    images: int
    patches: int
    """Patches of each image."""
    has_few_tokens: bool = False
    """True if patches take next to no time."""

    @property
    def all_patches(self) -> int:
        """Patches of all images."""
        return self.images * self.patches

    @property
    def pairs(self) -> int:
        """Pairs of patches of all images."""
        return self.images * self.patches**2


def most_patches(sizes: Sequence[int]) -> int:
    """Return the most patches of a run. sizes: see `images_shapes`."""
    return sizes[-1] if len(sizes) > 1 else MOST_IMAGES * sizes[0]


def images_shapes(most: int, sizes: Sequence[int]) -> list[ImagesShape]:
    """List the runs for the fit.

    most: patches of a run at most, if the tower takes so few. sizes: patches of the images that it
    takes, ascending, each four times those before; none for a tower that is not run.
    """
    if not sizes:
        return []
    least = sizes[0]
    few = ImagesShape(images=1, patches=least, has_few_tokens=True)
    if len(sizes) == 1:
        several = max(2, most // least)
        return [ImagesShape(images=several, patches=least), few]
    able = [size for size in sizes[2:] if size <= most]
    largest = able[-1] if able else sizes[min(2, len(sizes) - 1)]
    return [
        ImagesShape(images=1, patches=largest),
        ImagesShape(images=4, patches=largest // 4),
        ImagesShape(images=16, patches=largest // 16),
        ImagesShape(images=1, patches=largest // 4),
        few,
    ]


def held_out_images(shapes: Sequence[ImagesShape]) -> list[ImagesShape]:
    """List the runs that test the fit, of images between those of `shapes` in size; fewer images
    where all have one size."""
    if not shapes:
        return []
    largest = shapes[0]
    if len({shape.patches for shape in shapes}) == 1:
        return [replace(largest, images=max(1, 3 * largest.images // 4))]
    three_quarters = largest.patches * 9 // 16  # in each direction
    return [
        ImagesShape(images=1, patches=three_quarters),
        ImagesShape(images=4, patches=three_quarters // 4),
    ]


def images_s(tower: TowerCost, shape: ImagesShape) -> float:
    """Return the seconds of a run by the cost of a tower."""
    image_s = tower.image_s + shape.patches * tower.patch_s + shape.patches**2 * tower.pair_s
    return tower.call_s + shape.images * image_s


def images_row(shape: ImagesShape, *, of_one_size: bool) -> dict[Hashable, float]:
    """Return the terms of a run. of_one_size: True if all images have one."""
    row: dict[Hashable, float] = {PATCH: shape.all_patches, CALL: 1}
    if not of_one_size:
        row |= {PAIR: shape.pairs, PER_IMAGE: shape.images}
    return row


def with_tower(cost: CostModel, seconds: Mapping[Hashable, float]) -> CostModel:
    """Return `cost` with what was fitted for its tower. seconds: of one of each term."""
    assert cost.tower is not None, "only towers are run on images"
    tower = replace(
        cost.tower,
        patch_s=seconds[PATCH],
        pair_s=seconds.get(PAIR, 0.0),
        image_s=seconds.get(PER_IMAGE, 0.0),
        call_s=seconds[CALL],
    )
    return replace(cost, tower=tower)


def tower_errors(
    cost: CostModel, shapes: Sequence[ImagesShape], seconds: Sequence[float]
) -> tuple[float, ...]:
    """Return |predicted - measured| / measured of each run."""
    errors = []
    for shape, measured_s in zip(shapes, seconds, strict=True):
        assert cost.tower is not None, "only towers are run on images"
        errors.append(abs(images_s(cost.tower, shape) - measured_s) / measured_s)
    return tuple(errors)
