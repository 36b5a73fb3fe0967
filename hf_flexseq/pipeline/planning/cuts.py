"""Where to cut a sequence into k chunks: at equal forward and backward time by the cost model, all
stages together, the LM head included.

The first t tokens are a t + c t^2 of work, so the j-th cut solves a quadratic.

Kernels work on tiles of tokens, and long chunks of whole tiles take less time than others. So cuts
may be moved to the next tile (`on_tiles`) where parts stay nearly equal.

Seq1F1B (arXiv 2406.03488, section 3.3) differs: it cuts greedily from the end, solves once per run
for one length, and makes forward operations equal, although attention's backward takes 2.5
forwards and a linear layer's 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hf_flexseq.cost.model import ATTENTION_BACKWARD, LINEAR_PASSES
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost

# Tokens of a tile, the largest of torch's CPU attention. Of four chunks of 4,096 tokens on tiles
# forwards and backwards take 1 to 3 % less of a processor.
TILE = 256
UNEVEN = 1 / 8  # share of its work that a part may have more for being on tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class CutWork:
    """Work of t first tokens, linear t + square t^2: nanoseconds of a mean stage."""

    linear: float
    """Work per token."""
    square: float
    """Work per squared token: t tokens have t^2 / 2 causal pairs."""

    @classmethod
    def of(cls, cost: PipelineCost) -> "CutWork":
        """Return the forward and backward work by a cost model."""
        stages = len(cost.stages)
        linear_ns = sum(stage.linear_ns + stage.head_ns for stage in cost.stages) / stages
        square_ns = sum(stage.attention_ns for stage in cost.stages) / 2 / stages
        # A linear layer's backward takes two forwards: one for its input, one for its weight.
        attention_passes = 1 + ATTENTION_BACKWARD
        return cls(linear=LINEAR_PASSES * linear_ns, square=attention_passes * square_ns)

    def between(self, start: int, stop: int) -> float:
        """Return the work of tokens [start, stop)."""
        linear = self.linear * (stop - start)
        square = self.square * (stop * stop - start * start)
        return linear + square

    def reach(self, work: float) -> float:
        """Return t, the number of first tokens with square t^2 + linear t = work."""
        if not self.square:
            return work / self.linear
        root = math.sqrt(self.linear * self.linear + 4 * self.square * work)
        return 2 * work / (self.linear + root)


def cut(length: int, count: int, work: CutWork, most_tokens: int | None = None) -> list[int]:
    """Return cuts 0 = c_0 < c_1 < ... = length into `count` parts of equal work.

    There are more parts where a part would exceed `most_tokens`, and never more than tokens.
    """
    most = most_tokens or length
    count = max(count, -(-length // most))  # rounded up
    count = min(count, length)
    while True:
        cuts = _equal_cuts(length, count, work)
        if max(stop - start for start, stop in pairwise(cuts)) <= most:
            return cuts
        count += 1


def _equal_cuts(length: int, count: int, work: CutWork) -> list[int]:
    """Return cuts into `count` parts of equal work, each of a token at least; count <= length."""
    total = work.between(0, length)
    cuts = [0]
    for part in range(1, count):
        equal = round(work.reach(total * part / count))
        least = cuts[-1] + 1
        most = length - count + part  # leaves a token for each later part
        cuts.append(min(max(equal, least), most))
    cuts.append(length)
    return cuts


def on_tiles(cuts: Sequence[int], work: CutWork, most_tokens: int | None = None) -> list[int]:
    """Return equal cuts moved to multiples of TILE, or as they are if parts become too uneven."""
    length = cuts[-1]
    moved = [TILE * round(place / TILE) for place in cuts[:-1]]
    moved.append(length)
    most_work = work.between(0, length) / (len(cuts) - 1) * (1 + UNEVEN)
    for start, stop in pairwise(moved):
        too_long = most_tokens is not None and stop - start > most_tokens
        if stop <= start or too_long or work.between(start, stop) > most_work:
            return list(cuts)
    return moved
