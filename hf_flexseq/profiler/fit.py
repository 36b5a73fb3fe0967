"""Constants of the cost model from timed micro-batches, by non-negative least squares in plain numpy.

1. Attention, linear layers and constants, from micro-batches that every rank runs alone, with k layers each, and from
   the attention kernel alone, which may be far longer than a whole model could be:

       seconds(model)  = k a1 S2 + k a2 S1 + k c + head S1 + b        S2, S1: sums of squared lengths and of lengths
       seconds(kernel) =   a1 S2 + k1 S1 + k0                         k1, k0: the kernel's share of a2 and c

   so that models too large to be run whole are measured with two depths and priced at any other.
2. Bandwidth of each degree, from what Ulysses groups take beyond their share of (1): bytes / v + latency.
3. What a ring's bytes are worth at those bandwidths, from zigzag groups; its overlap is measured by itself.

Every equation is divided by its measured seconds: relative errors count, and a short run as much as a long one. The
best of all subsets of unknowns is taken, the others being zero: there are few, so this is exact and obvious.
Rejected: iterating over active sets (Lawson and Hanson), which pays from dozens of unknowns on; and fitting bandwidths
from bare transfers, which leave out the copies around them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import CostModel

Floats = NDArray[np.float64]

FASTEST = 1e13  # bytes/s that stand for transfers too fast to be measured
RING_FACTORS = np.geomspace(0.02, 50, 300)  # how much slower than an all-to-all a ring may move a byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A timed run in which every working rank does the same.

    strategy: of its groups; `kernel` for one call of the attention kernel. degree: ranks of a group. layers: of the
    model that ran. lengths: tokens of each sequence of one group. seconds: of forward and backward.
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

    attention_s, linear_s, layer_s: of a layer, per squared token, per token, and whatever is in it. head_s: per token,
    outside of the layers. base_s: of a model without layers or tokens.
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
class Links:
    """Transfers between ranks. bandwidths: (degree, bytes/s). latencies_s: (degree, seconds) of a group of one layer,
    whatever it moves. ring_factor: how much longer a byte takes in a ring. ring_overlap: as in `CostModel`."""

    bandwidths: tuple[tuple[int, float], ...]
    latencies_s: tuple[tuple[int, float], ...]
    ring_factor: float
    ring_overlap: float

    def fill(self, model: CostModel) -> CostModel:
        """`model` with these transfers; ring bytes count as many as they are worth at an all-to-all's pace."""
        ring_bytes = None if model.ring_bytes is None else model.ring_bytes * self.ring_factor
        return replace(model, bandwidths=self.bandwidths, ring_bytes=ring_bytes, ring_overlap=self.ring_overlap)


def nnls(rows: Floats, seconds: Floats) -> Floats:
    """The x >= 0 that minimises ||rows x - seconds||. rows: [equations, unknowns], some ten unknowns at most."""
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
    """Step 1, from the samples of degree 1. Raises ValueError when there is none of the model or of the kernel."""
    alone = [sample for sample in samples if sample.degree == 1]
    if {sample.strategy for sample in alone} != {"kernel", "local"}:
        raise ValueError("a fit needs timings of the attention kernel and of the model on one rank")
    found = nnls(*_relative([_compute_row(sample) for sample in alone], [sample.seconds for sample in alone]))
    attention_s, linear_s, layer_s, head_s, base_s = found[:5].tolist()
    return Compute(attention_s=attention_s, linear_s=linear_s, layer_s=layer_s, head_s=head_s, base_s=base_s)


def _compute_row(sample: Sample) -> list[float]:
    k, squares, tokens = sample.layers, sample.squares, sample.tokens
    if sample.strategy == "kernel":
        return [squares, 0, 0, 0, 0, tokens, 1]
    return [k * squares, k * tokens, k, tokens, 1, 0, 0]


def _relative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[Floats, Floats]:
    wanted = np.array(seconds)
    return np.array(rows, dtype=np.float64) / wanted[:, None], np.ones_like(wanted)


def fit_links(
    samples: Sequence[Sample], compute: Compute, estimate: CostModel, *, layers: int, overlap: float
) -> Links:
    """Steps 2 and 3. estimate: the model, with `layers` layers, whose bytes are right. overlap: measured by itself.

    Without groups of two ranks and more the estimate's own transfers are kept.
    """
    degrees = sorted({sample.degree for sample in samples if sample.strategy == "ulysses"})
    if not degrees:
        kept = estimate.bandwidths
        return Links(bandwidths=kept, latencies_s=(), ring_factor=1.0, ring_overlap=estimate.ring_overlap)
    bandwidths, latencies = [], []
    for degree in degrees:
        mine = [sample for sample in samples if sample.strategy == "ulysses" and sample.degree == degree]
        per_byte_s, latency_s = _fit_all_to_all(mine, compute, estimate, layers)
        bandwidths.append((degree, 1 / max(per_byte_s, 1 / FASTEST)))
        latencies.append((degree, latency_s))
    links = Links(bandwidths=tuple(bandwidths), latencies_s=tuple(latencies), ring_factor=1.0, ring_overlap=overlap)
    rings = [sample for sample in samples if sample.strategy == "zigzag"]
    return replace(links, ring_factor=_fit_ring(rings, compute, links.fill(estimate), layers)) if rings else links


def _fit_all_to_all(
    samples: Sequence[Sample], compute: Compute, estimate: CostModel, layers: int
) -> tuple[float, float]:
    """Seconds per byte, and per layer whatever it moves."""
    byte_share = estimate.all_to_all_bytes / layers
    rows = [[sample.layers * byte_share * sample.tokens / sample.degree, sample.layers] for sample in samples]
    beyond = []
    for sample in samples:
        stretch = estimate.head_stretch(sample.degree)
        attention, rest = _shares(sample, compute)
        beyond.append(sample.seconds - attention * stretch - rest)
    measured = np.array([sample.seconds for sample in samples])
    per_byte_s, latency_s = nnls(np.array(rows) / measured[:, None], np.array(beyond) / measured).tolist()
    return per_byte_s, latency_s


def _shares(sample: Sample, compute: Compute) -> tuple[float, float]:
    """Seconds of one rank's attention in a group, and of all else but transfers."""
    attention = sample.layers * compute.attention_s * sample.squares / sample.degree
    linear = (sample.layers * compute.linear_s + compute.head_s) * sample.tokens / sample.degree
    return attention, linear + sample.layers * compute.layer_s + compute.base_s


def _fit_ring(samples: Sequence[Sample], compute: Compute, model: CostModel, layers: int) -> float:
    """The factor on the ring's bytes under which the closed form fits best, with a latency of its own left aside."""
    measured = np.array([sample.seconds for sample in samples])
    attention, rest = np.array([_shares(sample, compute) for sample in samples]).T
    moved = np.array([_ring_s(sample, model, layers) for sample in samples])
    depth = np.array([float(sample.layers) for sample in samples])

    def error(factor: float) -> float:
        hidden = model.ring_overlap * factor * moved
        seconds = np.maximum(attention, hidden) + factor * moved - hidden + rest
        beyond = (measured - seconds) / measured
        latency = nnls((depth / measured)[:, None], beyond)
        return float(np.square(beyond - depth / measured * latency).sum())

    return float(min(RING_FACTORS, key=error))


def _ring_s(sample: Sample, model: CostModel, layers: int) -> float:
    """Seconds of the ring's transfers at the all-to-all's bandwidth."""
    assert model.ring_bytes is not None, "a ring was timed whose bytes are not known"
    moved = model.ring_bytes / layers * sample.layers * sample.tokens * (sample.degree - 1) / sample.degree
    return moved / dict(model.bandwidths)[sample.degree]
