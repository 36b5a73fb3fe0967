"""Constants of the cost model from timed micro-batches, by non-negative least squares in plain
numpy.

1. Attention, linear layers and constants, from micro-batches that every rank runs alone, with k
   layers each, and from the attention kernel alone, which may be far longer than a whole model
   could be:

       seconds(model)  = k a1 S2 + k a2 S1 + k c + head S1 + b        S2, S1: sums of squared
                                                                      lengths and of lengths
       seconds(kernel) =   a1 S2 + k1 S1 + k0                         k1, k0: the kernel's share of
                           a2 and c

   so that models too large to be run whole are measured with two depths and priced at any other.
2. Bandwidth of each degree, from a layer's all-to-alls alone: bytes / v + latency; and what a
   ring's bytes are worth at that bandwidth, from a layer's ring transfers alone. How much of them
   attention hides is measured by itself.

Every equation is divided by its measured seconds: relative errors count, and a short run as much
as a long one. The best of all subsets of unknowns is taken, the others being zero: there are few,
so this is exact and obvious. Rejected: iterating over active sets (Lawson and Hanson), which pays
from dozens of unknowns on; and taking transfers from what whole micro-batches in groups take
beyond their arithmetic: a small difference of two large, noisy numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import CostModel

Floats = NDArray[np.float64]

# of the longest transfer: what else it waits for must not pass for all of it
LEAST_BYTE_SHARE = 0.5
# how much slower than an all-to-all a ring can be believed to move a byte
RING_FACTORS = (0.1, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A timed run in which every working rank does the same.

    strategy: `local`, a model on each rank; `kernel`, one layer's attention on each; `ulysses` or
    `zigzag`, the bare transfers of one layer in groups of `degree` ranks. layers: of the model,
    else 1. lengths: tokens of each sequence of one group. seconds: of forward and backward.
    """

    strategy: str
    degree: int
    layers: int
    lengths: tuple[int, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def squares(self) -> int:
        return sum(length * length for length in self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Seconds of a micro-batch that one rank runs alone.

    attention_s, linear_s, layer_s: of a layer, per squared token, per token, and whatever is in
    it. head_s: per token, outside of the layers. base_s: of a model without layers or tokens.
    """

    attention_s: float
    linear_s: float
    layer_s: float
    head_s: float
    base_s: float

    def fill(self, model: CostModel, layers: int) -> CostModel:
        """`model` with these constants for a model of `layers` layers."""
        return replace(
            model,
            attention_s=layers * self.attention_s,
            linear_s=layers * self.linear_s + self.head_s,
            micro_batch_s=layers * self.layer_s + self.base_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedLinks:
    """Transfers between ranks.

    bandwidths: (degree, bytes/s). latencies_s: (degree, seconds) of one layer's all-to-alls
    whatever they move. ring_factor: how much longer a byte takes in a ring. overlap: as
    `ring_overlap` in `CostModel`.
    """

    bandwidths: tuple[tuple[int, float], ...]
    latencies_s: tuple[tuple[int, float], ...]
    ring_factor: float
    overlap: float

    def fill(self, model: CostModel, layers: int) -> CostModel:
        """`model`, of `layers` layers, with these transfers; ring bytes count as many as they are
        worth at an all-to-all's pace, and latencies by their mean."""
        return replace(
            model,
            bandwidths=self.bandwidths,
            group_s=layers * float(np.mean([seconds for _, seconds in self.latencies_s] or [0.0])),
            ring_bytes=None if model.ring_bytes is None else model.ring_bytes * self.ring_factor,
            query_bytes=model.query_bytes * self.ring_factor,
            ring_overlap=self.overlap,
            all_to_all_overlap=self.overlap,
        )


def nnls(rows: Floats, seconds: Floats) -> Floats:
    """The x >= 0 that minimises ||rows x - seconds||. rows: [equations, unknowns], some ten
    unknowns at most."""
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(np.float64).tiny)
    best, least = np.zeros(rows.shape[1]), float(seconds @ seconds)
    for count in range(1, rows.shape[1] + 1):
        for subset in combinations(range(rows.shape[1]), count):
            columns = list(subset)
            found = np.linalg.lstsq(rows[:, columns] / scale[columns], seconds, rcond=None)[0]
            error = float(np.square(rows[:, columns] / scale[columns] @ found - seconds).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(rows.shape[1]), error
                best[columns] = found / scale[columns]
    return best


def fit_compute(samples: Sequence[Sample]) -> Compute:
    """Step 1, from the samples of degree 1. Raises ValueError when there is none of the model or
    of the kernel."""
    alone = [sample for sample in samples if sample.degree == 1]
    if {sample.strategy for sample in alone} != {"kernel", "local"}:
        raise ValueError(
            "a fit needs timings of the attention kernel and of the model on one rank"
        )
    found = nnls(
        *_relative(
            [_compute_row(sample) for sample in alone], [sample.seconds for sample in alone]
        )
    )
    attention_s, linear_s, layer_s, head_s, base_s = found[:5].tolist()
    return Compute(
        attention_s=attention_s, linear_s=linear_s, layer_s=layer_s, head_s=head_s, base_s=base_s
    )


def _compute_row(sample: Sample) -> list[float]:
    k, squares, tokens = sample.layers, sample.squares, sample.tokens
    if sample.strategy == "kernel":
        return [squares, 0, 0, 0, 0, tokens, 1]
    return [k * squares, k * tokens, k, tokens, 1, 0, 0]


def _relative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[Floats, Floats]:
    wanted = np.array(seconds)
    return np.array(rows, dtype=np.float64) / wanted[:, None], np.ones_like(wanted)


def fit_links(
    samples: Sequence[Sample], estimate: CostModel, *, layers: int, overlap: float
) -> FittedLinks:
    """Step 2. estimate: the model, with `layers` layers, whose bytes are right. overlap: measured
    by itself.

    Without groups of two ranks and more the estimate's own transfers are kept.
    """
    degrees = sorted({sample.degree for sample in samples if sample.strategy == "ulysses"})
    if not degrees:
        kept = estimate.bandwidths
        return FittedLinks(
            bandwidths=kept, latencies_s=(), ring_factor=1.0, overlap=estimate.ring_overlap
        )
    found = [
        (degree, *_fit_transfers(samples, "ulysses", degree, estimate.all_to_all_bytes / layers))
        for degree in degrees
    ]
    factors = [1.0]
    if estimate.ring_bytes is not None:
        ring_bytes = estimate.ring_bytes / layers
        rings = [
            _fit_transfers(samples, "zigzag", degree, ring_bytes * (degree - 1))
            for degree in degrees
        ]
        factors = [
            ring[0] / per_byte_s for ring, (_, per_byte_s, _) in zip(rings, found, strict=True)
        ]
    return FittedLinks(
        bandwidths=tuple((degree, 1 / per_byte_s) for degree, per_byte_s, _ in found),
        latencies_s=tuple((degree, latency_s) for degree, _, latency_s in found),
        ring_factor=float(np.clip(np.mean(factors), *RING_FACTORS)),
        overlap=overlap,
    )


def _fit_transfers(
    samples: Sequence[Sample], strategy: str, degree: int, token_bytes: float
) -> tuple[float, float]:
    """Seconds per byte, and whatever is moved. token_bytes: that a group moves for each of its
    tokens."""
    mine = [sample for sample in samples if (sample.strategy, sample.degree) == (strategy, degree)]
    moved = [token_bytes * sample.tokens / degree for sample in mine]
    rows, seconds = [[nbytes, 1] for nbytes in moved], [sample.seconds for sample in mine]
    per_byte_s, latency_s = nnls(*_relative(rows, seconds)).tolist()
    most, longest = max(zip(moved, seconds, strict=True))
    return max(per_byte_s, LEAST_BYTE_SHARE * longest / most), latency_s
