"""Long-tailed images and videos, and how evenly their placements share out the tower's work.

Of sequences a tenth has no image; the others have min(20, floor of a Pareto variable with exponent
1.3): 59 % have one, 2 % have twenty. Patches of an image are log-normal, median 1,200 and sigma 1,
cut to 256 and 16,384.

Of sequences with videos a tenth has none, and the others have one. Its frames are log-normal,
median 16 and sigma 1.2, with at least two. The patches of a frame are log-normal, median 600 and
sigma 0.5, cut to 128 and 1,536; a video has 98,304 patches at most, as with Qwen3-VL's processor.
Videos are placed whole, and in the parts that a step divides them into.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from common import spread
from hf_flexseq.cost.tower import TowerCost, TowerShape
from hf_flexseq.plan.images import IMAGE, VIDEO, ImageSize, frames_of_parts

MOST, TAIL, WITHOUT = 20, 1.3, 0.1  # images of a sequence
SIGMA = 1.0  # of the logarithm of an image's patches
FRAMES, FRAMES_SIGMA = 16, 1.2  # of a video
FRAME_PATCHES, FRAME_SIGMA = 600, 0.5
MOST_PATCHES = 98_304  # of a video
STEPS = 100  # drawn
MERGED = 4  # patches of a token

# Of Qwen3-VL-8B, by the defaults of transformers' configuration; any speed gives these placements.
TOWER = TowerCost.of(
    TowerShape(
        layers=27,
        hidden=1152,
        intermediate=4304,
        patches_per_token=float(MERGED),
        row_numbers=4 * 4096,
    ),
    flops=4e14,
    dtype_bytes=2,
    checkpointing=False,
)

COLUMNS = (
    *("case", "ranks", "sequences", "images", "imbalance", "of all steps", "over the least"),
    *("steps whose largest image exceeds the mean", "as drawn", "placing them"),
)


# ---- what is drawn


def images_of_sequence(rng: random.Random) -> int:
    """Return how many images a sequence has."""
    if rng.random() < WITHOUT:
        return 0
    return min(MOST, int(rng.paretovariate(TAIL)))


def sides_of_image(rng: random.Random, scale: int) -> tuple[int, int]:
    """Return height and width of an image in patches, both even, nearly equal. scale: what its
    patches are divided by."""
    patches = min(max(rng.lognormvariate(7.09, SIGMA), 256), 16384) / scale  # e^7.09 = 1,200
    height = max(2, 2 * round(patches**0.5 / 2))
    return height, max(2, 2 * round(patches / height / 2))


# ---- placements


def placements_page() -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Place the images of drawn steps; return rows of a table with COLUMNS, and raw figures."""
    lines = []
    figures = []
    for case, (per_rank, drawn_step) in CASES.items():
        for ranks in (8, 64):
            line, figure = placed_steps(drawn_step, ranks, ranks * per_rank)
            lines.append([case, *line])
            figures.append({"case": case, **figure})
    return lines, figures


def placed_steps(
    drawn_step: Callable[[random.Random, int], list[ImageSize]], ranks: int, sequences: int
) -> tuple[list[str], dict[str, Any]]:
    """Place the images of drawn steps; return a row of the table, and raw figures."""
    planned, least, drawn, seconds, counts = [], [], [], [], []
    largest = mean = 0.0
    for seed in range(STEPS):
        images = drawn_step(random.Random(seed), sequences)
        began = time.perf_counter()
        placement = TOWER.placed(images, ranks)
        seconds.append(time.perf_counter() - began)
        of_rank = sum(placement.loads) / ranks
        planned.append(placement.imbalance)
        least.append(max(1.0, max(TOWER.image_ns(image) for image in images) / of_rank))
        largest += max(placement.loads)
        mean += of_rank
        drawn.append(imbalance_as_drawn(images, ranks))
        counts.append(len(images))
    line = [
        str(ranks),
        str(sequences),
        f"{statistics.median(counts):.0f}",
        spread(planned, 4),
        f"{largest / mean:.4f}",
        spread((a / b for a, b in zip(planned, least, strict=True)), 4),
        f"{sum(value > 1 for value in least)}",
        spread(drawn, 2),
        f"{1e3 * statistics.median(seconds):.2f} ms",
    ]
    return line, {"ranks": ranks, "planned": planned, "least": least, "as_drawn": drawn}


def drawn_images(rng: random.Random, sequences: int) -> list[ImageSize]:
    """Return the images of a step."""
    images = []
    for sequence in range(sequences):
        for _ in range(images_of_sequence(rng)):
            height, width = sides_of_image(rng, scale=1)
            images.append(size_of(sequence, 1, height * width))
    return images


def whole_videos(rng: random.Random, sequences: int) -> list[ImageSize]:
    """Return the videos of a step."""
    return [size_of(*video) for video in drawn_videos(rng, sequences)]


def divided_videos(rng: random.Random, sequences: int) -> list[ImageSize]:
    """Return the parts of the same videos."""
    parts = []
    for sequence, frames, patches in drawn_videos(rng, sequences):
        parts += [size_of(sequence, count, patches) for count in frames_of_parts(frames, patches)]
    return parts


def drawn_videos(rng: random.Random, sequences: int) -> Iterator[tuple[int, int, int]]:
    """Yield the sequence of each video of a step, its frames, and the patches of each frame."""
    for sequence in range(sequences):
        if rng.random() < WITHOUT:
            continue
        drawn = rng.lognormvariate(math.log(FRAME_PATCHES), FRAME_SIGMA)
        patches = MERGED * round(min(max(drawn, 128), 1536) / MERGED)
        frames = max(2, round(rng.lognormvariate(math.log(FRAMES), FRAMES_SIGMA)))
        yield sequence, min(frames, MOST_PATCHES // patches), patches


def size_of(sequence: int, frames: int, frame_patches: int) -> ImageSize:
    """Return an image, or a video or a part of one, that has a frame or several."""
    return ImageSize(
        sequence=sequence,
        modality=IMAGE if frames == 1 else VIDEO,
        tokens=frames * frame_patches // MERGED,
        patches=frames * frame_patches,
        pairs=frames * frame_patches**2,
        data_bytes=0,
    )


# sequences of a rank and a step, and what draws the images of all
CASES = {
    "images": (8, drawn_images),
    "videos, whole": (2, whole_videos),
    "videos, divided": (2, divided_videos),
}


def imbalance_as_drawn(images: list[ImageSize], ranks: int) -> float:
    """Return the imbalance where every rank encodes the images of its own sequences."""
    loads = [0] * ranks
    for image in images:
        loads[image.sequence % ranks] += TOWER.image_ns(image)
    return max(loads) * ranks / sum(loads)
