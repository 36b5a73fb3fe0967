"""Long-tailed lengths for the benchmarks of plans: real distributions, and two models of them.

`data/` holds quantile tables of two published length traces; each file names its source. The other
two are log-normal: one fitted to CommonCrawl, one like the batches that pipelines are planned for.
All draws depend on a seed alone.
"""

import json
import math
import random
from bisect import bisect_left
from collections.abc import Callable

from common import HERE

K = 1024  # tokens
Draw = Callable[[random.Random], int]


def quantile_table(name: str) -> Draw:
    """Return a function that draws lengths from the (probability, length) pairs of a file.

    Between two pairs the logarithm of the length is linear in the probability.
    """
    record = json.loads((HERE / "data" / f"{name}.json").read_text())
    probabilities = [probability for probability, _ in record["quantiles"]]
    lengths = [length for _, length in record["quantiles"]]

    def draw(rng: random.Random) -> int:
        p = rng.random()
        index = max(1, bisect_left(probabilities, p))
        low, high = probabilities[index - 1], probabilities[index]
        share = (p - low) / (high - low) if high > low else 1.0
        growth = lengths[index] / lengths[index - 1]
        return max(1, round(lengths[index - 1] * growth**share))

    return draw


WIKIPEDIA = quantile_table("wikipedia")
DOCUMENTS = quantile_table("documents")


def common_crawl_like(rng: random.Random) -> int:
    """Return one length of the log-normal fitted to CommonCrawl: median 950, sigma 1.75."""
    return max(1, int(rng.lognormvariate(math.log(950), 1.75)))


def batch(draw: Draw, context: int, count: int, seed: int) -> list[int]:
    """Return `count` lengths of at most `context` tokens; longer ones are drawn again."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while len(lengths) < count:
        length = draw(rng)
        if length <= context:
            lengths.append(length)
    return lengths
