"""Seconds and bytes of a vision tower, by image.

A patch goes through every layer of the tower once, and attends to the patches of its image, or of
its frame: `patch_s` a patch, and `pair_s` a pair. Forward and backward where the tower is trained,
forward alone where it is frozen. Between the two the tower's graph is held, `patch_bytes` a patch.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from hf_flexseq.base.records import Amount, Bounds, Constants, Seconds
from hf_flexseq.plan.images import ImagePlan, ImageSize, place_images

# Fewest patches of a token, so that the tokens of any image can be counted.
LEAST_PATCHES = 1e-3

# A backward takes as much as two forwards; checkpointed layers run forward once more.
TRAINED_PASSES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShape:
    """A vision tower in numbers."""

    layers: int
    hidden: int
    """Width of the hidden states."""
    intermediate: int
    """Width inside the MLP."""
    patches_per_token: float
    """Patches that are merged into one token of the text model."""
    row_numbers: int
    """Numbers of a token's features, with those for single layers of the text model."""
    is_trained: bool = True
    """True if any of its parameters gets gradients."""

    @property
    def forward_flops(self) -> tuple[int, int]:
        """FLOPs of a forward: of a patch, and of a pair of patches."""
        weights = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        return 2 * self.layers * weights, 4 * self.layers * self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerCost(Constants):
    """Constants of one tower on one device."""

    what: ClassVar[str] = "the tower of a cost model"

    patch_s: Seconds
    """Seconds per patch, all layers, and backward where the tower is trained."""
    pair_s: Seconds
    """Seconds per pair of patches that attend to each other."""
    patch_bytes: Amount
    """Bytes that are held of a patch from forward to backward; 0 for a frozen tower."""
    token_bytes: Amount
    """Bytes that a rank holds of the features of one token, with their gradients."""
    patches_per_token: Annotated[float, Bounds(least=LEAST_PATCHES)]
    """Patches that are merged into one token of the text model."""
    is_sharded: bool = False
    """True if its parameters are gathered in every micro-batch, as under FSDP2 and ZeRO-3: its
    graph cannot be kept for longer."""

    @classmethod
    def of(
        cls,
        shape: TowerShape,
        *,
        flops: float,
        dtype_bytes: int,
        checkpointing: bool,
        is_sharded: bool = False,
    ) -> "TowerCost":
        """Return the estimated cost of a tower on a device that achieves so many FLOP/s."""
        passes = 1
        if shape.is_trained:
            passes = TRAINED_PASSES + checkpointing
        of_patch, of_pair = shape.forward_flops
        # as for text (`analytic_model.py`): a layer's inputs, or all that its parts read again
        numbers = shape.layers * (9 * shape.hidden + 4 * shape.intermediate)
        if checkpointing:
            numbers = shape.layers * shape.hidden + 9 * shape.hidden + 4 * shape.intermediate
        return cls(
            patch_s=passes * of_patch / flops,
            pair_s=passes * of_pair / flops,
            patch_bytes=float(numbers * dtype_bytes * shape.is_trained),
            token_bytes=float(shape.row_numbers * dtype_bytes * (2 if shape.is_trained else 1)),
            patches_per_token=shape.patches_per_token,
            is_sharded=is_sharded,
        )

    def run_again(self) -> "TowerCost":
        """Return the cost of a trained tower whose graph is not kept: it runs forward once more
        before its backward, and holds nothing but features between the two."""
        share = (TRAINED_PASSES + 1) / TRAINED_PASSES
        return replace(
            self, patch_s=self.patch_s * share, pair_s=self.pair_s * share, patch_bytes=0.0
        )

    # ---- images

    def tokens(self, patches: int) -> int:
        """Return the tokens of an image of so many patches, at least 1."""
        return math.ceil(patches / self.patches_per_token)

    def image_ns(self, image: ImageSize) -> int:
        """Return the nanoseconds of one image, at least 1."""
        seconds = image.patches * self.patch_s + image.pairs * self.pair_s
        return max(1, round(1e9 * seconds))

    def sequences_ns(self, images: Sequence[ImageSize]) -> Mapping[int, int]:
        """Return the nanoseconds of all images of each sequence that has one, by its id."""
        nanoseconds: Counter[int] = Counter()
        for image in images:
            nanoseconds[image.sequence] += self.image_ns(image)
        return nanoseconds

    def placed(self, images: Sequence[ImageSize], world_size: int) -> ImagePlan:
        """Return on which rank each of a step's images, at least one, is encoded. A rank holds the
        graph of those that it encodes, and an even share of all features."""
        plan = place_images([self.image_ns(image) for image in images], world_size)
        patches = [0] * world_size
        for image, owner in zip(images, plan.owners, strict=True):
            patches[owner] += image.patches
        tokens = sum(image.tokens for image in images) / world_size
        held_bytes = max(patches) * self.patch_bytes + tokens * self.token_bytes
        return replace(plan, held_bytes=held_bytes)
