"""Which rank runs the vision tower on which image of a step.

A plan of groups says where the tokens of an image are; where its pixels are encoded is independent
of it. The images of all ranks are placed by the tower's work for them: the most expensive first,
each on the rank with the least work so far (longest processing time first; Graham, "Bounds on
multiprocessing timing anomalies", 1969). Every rank computes the same placement from sizes that
all ranks know, so nothing is sent for it.

A video whose frames the model encodes independently is divided into parts, each a separate image
(`frames_of_parts`), and so several ranks can share a long video.

A rank without an image encodes the cheapest one, too, as a *stand-in* whose features nobody reads:
the parameters of a sharded tower are gathered by all ranks together, and DDP waits for gradients
of all of them.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_flexseq.base.records import Amount, Constants, Seconds, Whole

IMAGE, VIDEO = "image", "video"
MODALITIES = (IMAGE, VIDEO)

PART_PATCHES = 512
"""Fewest patches of a part of a video: each part costs a few digests and messages more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSize:
    """The facts that all ranks have of an image, a video or a part of one, in a step."""

    sequence: int
    """Id of the sequence that it belongs to."""
    modality: str
    """IMAGE or VIDEO."""
    tokens: int
    """Tokens that stand for it in its sequence."""
    patches: int
    """Patches that the tower encodes, before it merges them."""
    pairs: int
    """Pairs of patches that attend to each other."""
    data_bytes: int
    """Bytes of its pixels as they travel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePlan:
    """How the images of a step are encoded."""

    owners: tuple[int, ...]
    """The rank of each image."""
    loads: tuple[int, ...]
    """Nanoseconds of each rank, without stand-ins."""
    cheapest: int
    """Index of the image that a rank without images encodes."""
    keeps_graph: bool = True
    """False if the graph of a trained tower is not kept from forward to backward: each image then
    runs forward once more."""
    held_bytes: float = 0.0
    """Bytes that the rank which holds most for images holds during the step."""

    @property
    def imbalance(self) -> float:
        """The largest load over the mean."""
        return max(self.loads) * len(self.loads) / max(1, sum(self.loads))

    @property
    def seconds(self) -> float:
        """Seconds of the rank with the largest load."""
        return max(self.loads) / 1e9

    def by_rank(self) -> list[list[int]]:
        """Return the indices of the images that each rank encodes, ascending; a rank without any
        encodes the cheapest one, too."""
        found: list[list[int]] = [[] for _ in self.loads]
        for index, owner in enumerate(self.owners):
            found[owner].append(index)
        return [own or [self.cheapest] for own in found]

    def held_tokens(self, token_bytes: float) -> int:
        """Return the tokens of text whose memory `held_bytes` are. token_bytes: of one."""
        return math.ceil(self.held_bytes / token_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerLoad(Constants):
    """The tower's work in a step that has images, in numbers."""

    what: ClassVar[str] = "a tower's load"

    images: Whole
    """Images and videos of the step, a divided one as many as its parts."""
    seconds: Seconds
    """Predicted seconds of the rank with the most work."""
    imbalance: Amount
    """The most work of a rank over the mean."""
    forwards: Whole = 1
    """How often each image runs forward: 2 where the tower's graph is not kept."""

    @classmethod
    def of(cls, plan: ImagePlan) -> "TowerLoad":
        """Return a plan in numbers."""
        return cls(
            images=len(plan.owners),
            seconds=plan.seconds,
            imbalance=plan.imbalance,
            forwards=1 if plan.keeps_graph else 2,
        )


def frames_of_parts(frames: int, frame_patches: int) -> list[int]:
    """Return the frames of each part of a video that may be divided between any two frames: as
    many parts, nearly equal, as have PART_PATCHES each. frame_patches: of each frame."""
    fewest = -(-PART_PATCHES // max(1, frame_patches))
    parts = max(1, frames // fewest)
    each, more = divmod(frames, parts)
    return [each + (part < more) for part in range(parts)]


def place_images(costs: Sequence[int], world_size: int) -> ImagePlan:
    """Place the images of a step, at least one, on ranks. costs: nanoseconds of each."""
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    least = [(0, rank) for rank in range(world_size)]  # (load, rank): a heap
    owners = [0] * len(costs)
    for index in order:
        load, rank = heapq.heappop(least)
        owners[index] = rank
        heapq.heappush(least, (load + costs[index], rank))
    loads = [load for load, _ in sorted(least, key=lambda one: one[1])]
    return ImagePlan(owners=tuple(owners), loads=tuple(loads), cheapest=order[-1])
