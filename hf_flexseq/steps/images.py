"""Images of a step: from the ranks that drew them to the ranks that encode them.

    Image           one image or video of a sequence, as the model's tower takes it
    RowImages       the images of the sequences that this rank drew
    send_images     brings pixels to the ranks of an `ImagePlan` (`plan/images.py`)
    image_rows      numbers the tokens that stand for images, as one more column of tokens

All ranks number the rows of features alike: first the rows of the step's first image, one per
token, then the second image's, and so on. Images with the same pixels are one image
(`same_images.py`). A token that stands for a part of an image has the number of its row in the
column IMAGE_ROWS, and -1 otherwise; so the rank that gets the token can tell which row of features
it needs (`features.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan.blocks import Blocks
from hf_flexseq.plan.images import ImagePlan, ImageSize
from hf_flexseq.steps.digests import bytes_of, mark_of

Ints = NDArray[np.int64]

IMAGE_ROWS = "image_rows"
"""Column of tokens: the row of features that a token stands for, or NO_ROW."""
NO_ROW = -1
GRID_POSITIONS = "grid_positions"
"""Column of tokens, [tokens, axes]: positions in time, height and width, or on other axes, instead
of one."""

TYPES = ("token_type_ids", "mm_token_type_ids")
"""Columns with the modality of every token: 0 is text."""


class UnsupportedImages(NotImplementedError):
    """A model does not take images here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An image or a video of a sequence, on the CPU."""

    size: ImageSize
    """Its sequence is counted in the row of the rank that drew it."""
    arguments: Mapping[str, torch.Tensor]
    """Arguments of the model's method for features, for this image alone, by name."""

    @property
    def mark(self) -> int:
        """Number that images with the same pixels have in common; see `same_images.py`."""
        return mark_of(self.arguments)


def data_bytes_of(arguments: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of an image's tensors as they travel."""
    return len(_head(arguments)) + sum(value.nbytes for value in arguments.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RowImages:
    """The images of a rank's row."""

    images: tuple[Image, ...] = ()
    """By sequence, then by modality, then in the order of their tokens."""
    placeholders: Mapping[str, int]
    """Token that stands for a part of an image, by modality."""
    axes: int = 0
    """Numbers of a token's position, such as 3 for time, height and width; 0 for models that have
    one number, `position_ids`."""
    positions_dtype: torch.dtype = torch.int64
    """Of such a position, alike on all ranks."""
    blocks: Blocks = field(default_factory=dict)
    """By index of a sequence the tokens that see both ways (`plan/blocks.py`)."""
    positions: torch.Tensor | None = None
    """[tokens, axes] These positions; None for a model without, and for a row without images."""


NO_IMAGES = RowImages(placeholders={})
"""Of a row for a model that takes none."""


def row_starts(images: Sequence[ImageSize]) -> Ints:
    """Return the number of each image's first row of features, and that after the last one:
    [images + 1]."""
    return np.cumsum([0, *(image.tokens for image in images)], dtype=np.int64)


def image_rows(
    ids: torch.Tensor, own: RowImages, numbers: Sequence[int], images: Sequence[ImageSize]
) -> torch.Tensor:
    """Return the column IMAGE_ROWS of a rank's row, [tokens] of int64.

    ids: of this rank's row, [tokens]. own: its images. numbers: of each of these, which of
    `images` it is. images: of all ranks, each once.
    """
    rows = torch.full_like(ids, NO_ROW, dtype=torch.int64)
    starts = row_starts(images)
    for modality, placeholder in own.placeholders.items():
        numbered = [np.arange(0)]
        for image, index in zip(own.images, numbers, strict=True):
            if image.size.modality == modality:
                numbered.append(np.arange(starts[index], starts[index + 1]))
        # Sequences, and the images of each, stand in the order of their tokens.
        found = np.concatenate(numbered)
        is_part = ids == placeholder
        if not len(found):
            continue  # such tokens, if there are any, are text
        if len(found) != is_part.sum():
            raise ValueError(
                f"of {int(is_part.sum())} tokens {placeholder} of a row {len(found)} stand for "
                f"{modality}s, and the others for text: leave those out"
            )
        rows[is_part] = torch.from_numpy(found)
    return rows


# ---- pixels


def send_images(
    own: RowImages,
    numbers: Sequence[int],
    images: Sequence[ImageSize],
    plan: ImagePlan,
    sources: Sequence[int],
    communicator: Communicator,
) -> list[Image]:
    """Return the images that this rank encodes (`plan.by_rank`). Collective over the world.
    own, numbers, images: see `image_rows`. sources: the rank that drew each sequence, which
    sends its images."""
    rank = communicator.rank
    packed: dict[int, torch.Tensor] = {}
    for image, i in zip(own.images, numbers, strict=True):
        if i not in packed and sources[images[i].sequence] == rank:
            packed[i] = _packed(image)
    sent: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)]
    sent_counts = []
    received_counts = [0] * communicator.world_size
    by_rank = plan.by_rank()
    for of_target in by_rank:
        parts = [packed[i] for i in of_target if i in packed]
        sent += parts
        sent_counts.append(sum(len(part) for part in parts))
    wanted = sorted(by_rank[rank], key=lambda i: (sources[images[i].sequence], i))
    for i in wanted:
        received_counts[sources[images[i].sequence]] += images[i].data_bytes
    received = communicator.cpu_group.exchange_rows(
        torch.cat(sent).unsqueeze(1), sent_counts, received_counts
    ).squeeze(1)  # [bytes]
    found = {}
    parts = received.split([images[i].data_bytes for i in wanted])
    for i, data in zip(wanted, parts, strict=True):
        found[i] = _unpacked(data, images[i])
    return [found[i] for i in sorted(found)]


def _packed(image: Image) -> torch.Tensor:
    """Return the tensors of an image as bytes: the head, then the values."""
    head = np.frombuffer(_head(image.arguments), dtype=np.uint8).copy()
    values = [bytes_of(value) for value in image.arguments.values()]
    return torch.cat([torch.from_numpy(head), *values])


def _head(arguments: Mapping[str, torch.Tensor]) -> bytes:
    """Return the size of a header and the header, which has the tensors' names, dtypes and
    shapes."""
    header = {}
    for name, value in arguments.items():
        header[name] = [str(value.dtype).removeprefix("torch."), list(value.shape)]
    text = json.dumps(header).encode()
    return np.array([len(text)], dtype=np.int64).tobytes() + text


def _unpacked(data: torch.Tensor, size: ImageSize) -> Image:
    """Return the image whose `_packed` is `data`."""
    start = np.dtype(np.int64).itemsize
    stop = start + int(data[:start].numpy().view(np.int64)[0])
    header = json.loads(data[start:stop].numpy().tobytes())
    arguments = {}
    for name, (dtype, shape) in header.items():
        kind = getattr(torch, dtype)
        start, stop = stop, stop + kind.itemsize * int(np.prod(shape))
        # a copy: bytes behind a header need not be aligned for the dtype
        arguments[name] = data[start:stop].clone().view(kind).reshape(shape)
    return Image(size=size, arguments=arguments)
