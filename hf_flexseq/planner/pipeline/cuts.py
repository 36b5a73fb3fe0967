"""Where to cut a sequence into k chunks.

    even           equal tokens
    computation    equal forward operations: Seq1F1B's computation-wise partition (arXiv
                   2406.03488, section 3.3)
    time           equal forward and backward time by the cost model, all stages together, the LM
                   head included

All three are a t + c t^2 for the first t tokens, so the j-th cut solves a quadratic. The paper
cuts greedily from the end and solves once per run for one length; forward operations leave out
that attention's backward takes 2.5 forwards and a linear layer's 2.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from hf_flexseq.cost import ATTENTION_BACKWARD
from hf_flexseq.cost.stages import PipelineCost

CUTS = ("even", "computation", "time")


@dataclass(frozen=True, kw_only=True, slots=True)
class CutWork:
    """Work of the first t tokens of a sequence: linear t + square t^2."""

    linear: float
    square: float

    @classmethod
    def of(cls, cost: PipelineCost, cuts: str) -> "CutWork":
        """What `cuts` makes equal, in nanoseconds of a mean stage; of `even`, in tokens."""
        if cuts not in CUTS:
            raise ValueError(f"cuts={cuts!r} is none of {', '.join(CUTS)}")
        if cuts == "even":
            return cls(linear=1.0, square=0.0)
        stages = len(cost.stages)
        linear = sum(stage.linear_ns + stage.head_ns for stage in cost.stages) / stages
        square = sum(stage.attention_ns for stage in cost.stages) / 2 / stages
        passes, attention_passes = (3, 1 + ATTENTION_BACKWARD) if cuts == "time" else (1, 1)
        return cls(linear=passes * linear, square=attention_passes * square)

    def between(self, start: int, stop: int) -> float:
        """Work of tokens [start, stop)."""
        return self.linear * (stop - start) + self.square * (stop * stop - start * start)

    def reach(self, work: float) -> float:
        """How many first tokens make up this much work."""
        if not self.square:
            return work / self.linear
        root = math.sqrt(self.linear * self.linear + 4 * self.square * work)
        return 2 * work / (self.linear + root)


def cut(length: int, count: int, work: CutWork, most_tokens: int | None = None) -> list[int]:
    """Cuts 0 = c_0 < c_1 < ... = length into `count` parts of equal work, into more where a part
    would exceed `most_tokens`, and into no more than there are tokens."""
    most = most_tokens or length
    count = min(length, max(count, -(-length // most)))
    while True:
        total = work.between(0, length)
        cuts = [0, *(round(work.reach(total * part / count)) for part in range(1, count)), length]
        for place in range(1, count):
            cuts[place] = min(max(cuts[place], cuts[place - 1] + 1), length - count + place)
        if max(b - a for a, b in pairwise(cuts)) <= most:
            return cuts
        count += 1
