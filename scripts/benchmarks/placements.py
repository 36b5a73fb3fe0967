"""Long-tailed images, and how evenly their placements share out the tower's work.

Of sequences a tenth has no image; the others have min(20, floor of a Pareto variable with exponent
1.3): 59 % have one, 2 % have twenty. Patches of an image are log-normal, median 1,200 and sigma 1,
cut to 256 and 16,384.
"""

import random
import statistics
import time
from typing import Any

from common import spread
from hf_flexseq.cost.tower import TowerCost, TowerShape
from hf_flexseq.plan.images import IMAGE, ImageSize

MOST, TAIL, WITHOUT = 20, 1.3, 0.1  # images of a sequence
SIGMA = 1.0  # of the logarithm of an image's patches
STEPS = 100  # drawn
PER_RANK = 8  # sequences of a rank and a step
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
    *("ranks", "sequences", "images", "imbalance", "of all steps", "over the least"),
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
    for ranks in (8, 64):
        planned, least, drawn, seconds, counts = [], [], [], [], []
        largest = mean = 0.0
        for seed in range(STEPS):
            images = drawn_step(random.Random(seed), ranks * PER_RANK)
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
        lines.append(
            [
                str(ranks),
                str(ranks * PER_RANK),
                f"{statistics.median(counts):.0f}",
                spread(planned, 4),
                f"{largest / mean:.4f}",
                spread((a / b for a, b in zip(planned, least, strict=True)), 4),
                f"{sum(value > 1 for value in least)}",
                spread(drawn, 2),
                f"{1e3 * statistics.median(seconds):.2f} ms",
            ]
        )
        figures.append({"ranks": ranks, "planned": planned, "least": least, "as_drawn": drawn})
    return lines, figures


def drawn_step(rng: random.Random, sequences: int) -> list[ImageSize]:
    """Return the images of a step."""
    images = []
    for sequence in range(sequences):
        for _ in range(images_of_sequence(rng)):
            height, width = sides_of_image(rng, scale=1)
            patches = height * width
            images.append(
                ImageSize(
                    sequence=sequence,
                    modality=IMAGE,
                    tokens=patches // MERGED,
                    patches=patches,
                    pairs=patches**2,
                    data_bytes=0,
                )
            )
    return images


def imbalance_as_drawn(images: list[ImageSize], ranks: int) -> float:
    """Return the imbalance where every rank encodes the images of its own sequences."""
    loads = [0] * ranks
    for image in images:
        loads[image.sequence % ranks] += TOWER.image_ns(image)
    return max(loads) * ranks / sum(loads)
