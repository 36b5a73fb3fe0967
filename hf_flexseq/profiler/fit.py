"""Fit the constants of the cost model to timed runs, by non-negative least squares in plain numpy.

1. Attention, linear layers and constants, from micro-batches that every rank runs alone, with k
   layers each, and from the attention kernel alone, which may be far longer than a whole model
   could be:

       seconds(model)  = k a1 S2 + k a2 S1 + k c + head S1 + b        S2, S1: sums of squared
                                                                      lengths and of lengths
       seconds(kernel) =   a1 S2 + k1 S1 + k0                         k1, k0: the kernel's share of
                                                                      a2 and c

   Of a model whose layers do not all read all keys, k a1 S2 is a sum over reaches: with k_r layers
   of reach r, a1 of its own and the pairs P_r that it leaves of a sequence, k_r a_r 2 P_r.
   Recurrent layers add k_r t_r S1 for each kind, of which

       seconds(scan)   =   t_r S1 + a constant                        convolution and scan alone
       seconds(again)  =   t'_r S1 + a constant                       the second pass alone

   so that models too large to be run whole are measured with two depths and priced at any other.
2. Bandwidth of each degree, from the all-to-alls of one layer alone: bytes / v + latency; and what
   a ring's bytes are worth at that bandwidth, from the ring transfers of one layer alone. What of
   the latencies is no work of the host (`host.py`) is a group's own. How much of the transfers
   attention hides is measured separately.

Every equation is divided by its measured seconds: relative errors count, and a short run as much
as a long one. The best of all subsets of unknowns is taken, the others being zero: there are few,
so this is exact and obvious.

Rejected: iterating over active sets (Lawson and Hanson), which pays from dozens of unknowns on;
and taking transfers from what whole micro-batches in groups take beyond their arithmetic, which is
a small difference of two large, noisy numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.analytic import NO_MIXERS, Mixers
from hf_flexseq.cost.kinds import NearLayers
from hf_flexseq.cost.recurrent import RecurrentLayers, scan_chunk
from hf_flexseq.layers import FULL, Reach
from hf_flexseq.profiler.design import LayersOfReach, ProbeLayout
from hf_flexseq.topology import Topology

Floats = NDArray[np.float64]

# A latency explains at most the other half of the longest transfer. Without this bound, timings
# that hardly grow with the bytes would fit a latency and no bytes at all, an endless bandwidth.
LEAST_BYTE_SHARE = 0.5
# How much slower than an all-to-all a ring can be believed to move a byte.
RING_FACTORS = (0.1, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A timed run in which every working rank does the same."""

    strategy: str
    """`local`: a model on each rank. `kernel`: the attention of one layer on each rank. `scan`:
    convolution and scan of one recurrent layer, and `again` the second pass of that. `ulysses` or
    `zigzag`: the bare transfers of one layer in groups of `degree` ranks. In host.py: the
    attention of one layer by that strategy, or one of its names for bare transfers."""
    degree: int
    """Ranks of a group."""
    layers: int
    """Layers of the model for `local`, else 1."""
    lengths: tuple[int, ...]
    """Tokens of each sequence of one group."""
    seconds: float
    """Seconds of forward and backward together."""
    reaches: LayersOfReach = ()
    """The layers that do not read all keys."""
    mixers: Mixers = NO_MIXERS
    """The recurrent layers, and those without attention."""

    @property
    def tokens(self) -> int:
        """Sum of the lengths."""
        return sum(self.lengths)

    @property
    def squares(self) -> int:
        """Sum of the squared lengths."""
        return sum(length * length for length in self.lengths)

    def pairs(self, reach: Reach) -> int:
        """Return twice the (query, key) pairs of all layers of a reach; of full ones the squared
        tokens."""
        if reach == FULL:
            full_layers = self.layers - self.mixers.without_attention
            full_layers -= sum(layers for layers, _ in self.reaches)
            return full_layers * self.squares
        layers = {one: count for count, one in self.reaches}.get(reach, 0)
        return 2 * layers * sum(reach.pairs(length) for length in self.lengths)

    def scanned(self, kind: str) -> int:
        """Return the tokens of all recurrent layers of a kind, with chunks filled up."""
        layers = {one: count for count, one in self.mixers.recurrent}.get(kind, 0)
        chunk = scan_chunk(kind)
        return layers * sum(-(-length // chunk) * chunk for length in self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Seconds of a micro-batch that one rank runs alone, in the constants of step 1."""

    attention_s: float
    """Seconds of a full layer per squared token (a1)."""
    linear_s: float
    """Seconds of a layer per token (a2)."""
    layer_s: float
    """Seconds of a layer whatever tokens it has (c)."""
    head_s: float
    """Seconds per token outside of the layers (head)."""
    base_s: float
    """Seconds of a model without layers or tokens (b)."""
    near_s: tuple[tuple[Reach, float], ...] = ()
    """(reach, seconds of a layer per two pairs) of layers that do not read all keys."""
    recurrent: tuple[RecurrentLayers, ...] = ()
    """One recurrent layer of each kind."""

    def fill(
        self,
        model: CostModel,
        layers: int,
        reaches: LayersOfReach = (),
        mixers: Mixers = NO_MIXERS,
    ) -> CostModel:
        """Return `model` with these constants for a model of `layers` layers, some of which do not
        read all keys, are recurrent, or have no attention. Raises ValueError for a model whose
        tokens take no time."""
        if not layers * self.linear_s + self.head_s > 0:
            raise ValueError(
                "more tokens take no more time: something else has used this machine meanwhile; "
                "measure when it is idle, or take cost_model='estimate'"
            )
        seconds = dict(self.near_s)
        full_layers = with_attention = layers - mixers.without_attention
        kinds = []
        for count, reach in reaches:
            full_layers -= count
            kinds.append(
                NearLayers(
                    reach=reach, share=count / with_attention, attention_s=count * seconds[reach]
                )
            )
        one_layer = {one.kind: one for one in self.recurrent}
        recurrent = [one_layer[kind].of_layers(count, layers) for count, kind in mixers.recurrent]
        return replace(
            model,
            kinds=tuple(kinds),
            recurrent=tuple(recurrent),
            attention_share=with_attention / layers,
            attention_s=full_layers * self.attention_s,
            linear_s=layers * self.linear_s + self.head_s,
            micro_batch_s=layers * self.layer_s + self.base_s,
        )


class HostTransfers(Protocol):
    """What the host takes for transfers: `HostSeconds` in host.py."""

    def transfers_s(self, strategy: str, degree: int) -> float:
        """Return the seconds of the host for one layer's transfers of a group."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedLinks:
    """Transfers between ranks, in the constants of step 2."""

    bandwidths: tuple[tuple[int, float], ...]
    """(degree, bytes/s that a rank moves), ascending by degree."""
    latencies_s: tuple[tuple[int, float], ...]
    """(degree, seconds that the all-to-alls of one layer take whatever bytes they move)."""
    ring_latencies_s: tuple[tuple[int, float], ...]
    """(degree, the same of a layer's transfers in a ring)."""
    ring_factor: float
    """How many times as long a byte takes in a ring as in an all-to-all."""
    overlap: float
    """Share of a transfer that attention hides, 0 to 1; `ring_overlap` in `CostModel`."""

    def fill(self, model: CostModel, layers: int, host: HostTransfers) -> CostModel:
        """Return `model`, which has `layers` layers, with these transfers.

        Bytes of rings count as many as they are worth at the pace of an all-to-all. Latencies
        count by the mean, over strategies and degrees, of what they have beyond the host's work.
        """
        beyond = []
        for strategy, latencies_s in (
            ("ulysses", self.latencies_s),
            ("zigzag", self.ring_latencies_s),
        ):
            for degree, seconds in latencies_s:
                beyond.append(max(0.0, seconds - host.transfers_s(strategy, degree)))
        latency_s = float(np.mean(beyond)) if beyond else 0.0
        ring_bytes = model.ring_bytes
        if ring_bytes is not None:
            ring_bytes = ring_bytes * self.ring_factor
        return replace(
            model,
            bandwidths=self.bandwidths,
            group_s=layers * _exchanging_share(model) * latency_s,
            ring_bytes=ring_bytes,
            query_bytes=model.query_bytes * self.ring_factor,
            ring_overlap=self.overlap,
            all_to_all_overlap=self.overlap,
        )


def _exchanging_share(model: CostModel) -> float:
    """Return how often a layer exchanges something, on average: attention and scan both do."""
    return model.attention_share + sum(kind.share for kind in model.recurrent)


# ---- least squares


def nnls(rows: Floats, seconds: Floats) -> Floats:
    """Return the x >= 0, [unknowns], that minimises ||rows x - seconds||.

    rows: [equations, unknowns], some ten unknowns at most. seconds: [equations].
    """
    unknowns = rows.shape[1]
    # Columns differ by many orders of magnitude (a constant, a squared length): scaled to 1.
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(np.float64).tiny)  # [unknowns]
    best = np.zeros(unknowns)
    least = float(seconds @ seconds)  # squared error of x = 0
    for count in range(1, unknowns + 1):
        for subset in combinations(range(unknowns), count):
            columns = list(subset)
            scaled = rows[:, columns] / scale[columns]  # [equations, count]
            solution = np.linalg.lstsq(scaled, seconds, rcond=None)[0]  # [count]
            error = float(np.square(scaled @ solution - seconds).sum())
            if (solution >= 0).all() and error < least:
                least = error
                best = np.zeros(unknowns)
                best[columns] = solution / scale[columns]
    return best


def relative_nnls(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Solve `nnls` with each equation divided by its seconds, so that relative errors count."""
    measured = np.array(seconds)  # [equations]
    relative_rows = np.array(rows, dtype=np.float64) / measured[:, None]  # [equations, unknowns]
    ones = np.ones_like(measured)  # the seconds, divided by themselves
    solution: list[float] = nnls(relative_rows, ones).tolist()
    return solution


# ---- step 1


def fit_compute(samples: Sequence[Sample], recurrent: Sequence[RecurrentLayers] = ()) -> Compute:
    """Fit the constants of step 1 to the samples of degree 1.

    recurrent: one layer of each kind, whose bytes are right.
    Raises ValueError when no sample is of the model or none of the kernel.
    """
    alone = [sample for sample in samples if sample.degree == 1 and sample.strategy != "again"]
    if {sample.strategy for sample in alone} - {"scan"} != {"kernel", "local"}:
        raise ValueError(
            "a fit needs timings of the attention kernel and of the model on one rank"
        )
    one_layer = {one.kind: one for one in recurrent}
    near = list(dict.fromkeys(reach for sample in alone for _, reach in sample.reaches))
    kinds = list(dict.fromkeys(kind for sample in alone for _, kind in sample.mixers.recurrent))
    rows = [_compute_row(sample, near, kinds) for sample in alone]
    seconds = [sample.seconds for sample in alone]
    # The last two unknowns are the kernel's own, k1 and k0: parts of the linear and the constant
    # term that the model's equations count already.
    found = relative_nnls(rows, seconds)
    attention_s, linear_s, layer_s, head_s, base_s = found[:5]
    near_s = found[7 : 7 + len(near)]
    scans_s = found[7 + len(near) : 7 + len(near) + len(kinds)]
    recurrent = []
    for kind, token_s in zip(kinds, scans_s, strict=True):
        recurrent.append(
            replace(one_layer[kind], token_s=token_s, again_s=_fit_again(samples, kind))
        )
    return Compute(
        attention_s=attention_s,
        linear_s=linear_s,
        layer_s=layer_s,
        head_s=head_s,
        base_s=base_s,
        near_s=tuple(zip(near, near_s, strict=True)),
        recurrent=tuple(recurrent),
    )


def _fit_again(samples: Sequence[Sample], kind: str) -> float:
    """Return the seconds per token of a layer's second pass; 0 for a kind without one."""
    again = [one for one in samples if one.strategy == "again" and one.scanned(kind)]
    if not again:
        return 0.0
    rows = [[float(one.scanned(kind)), 1.0] for one in again]
    return relative_nnls(rows, [one.seconds for one in again])[0]


def _compute_row(sample: Sample, near: Sequence[Reach], kinds: Sequence[str]) -> list[float]:
    """Return the factors of (a1, a2, c, head, b, k1, k0) in the sample's equation, those of a_r
    for every reach of `near`, and those of t_r and of the constant of a run for every kind of
    recurrent layer."""
    k = sample.layers
    s1 = sample.tokens
    squares = sample.pairs(FULL)
    pairs = [sample.pairs(reach) for reach in near]
    scans = [sample.scanned(kind) for kind in kinds]
    is_run = [sample.strategy == "scan" and bool(tokens) for tokens in scans]
    own = [*pairs, *scans, *map(int, is_run)]
    if sample.strategy == "kernel":
        return [squares, 0, 0, 0, 0, s1, 1, *own]
    if sample.strategy == "scan":
        return [0, 0, 0, 0, 0, 0, 0, *own]
    return [squares, k * s1, k, s1, 1, 0, 0, *own]


# ---- step 2


def fit_links(
    samples: Sequence[Sample],
    estimate: CostModel,
    *,
    moved: tuple[float, float],
    overlap: float,
) -> FittedLinks:
    """Fit the constants of step 2 to the samples of bare transfers.

    estimate: cost model of the model. moved: bytes that the samples of Ulysses, and of rings of
    two, move for each token of a group. overlap: share of a transfer that attention hides,
    measured separately. Without groups of two ranks and more the transfers of `estimate` are kept.
    """
    degrees = sorted({sample.degree for sample in samples if sample.strategy == "ulysses"})
    if not degrees:
        return FittedLinks(
            bandwidths=estimate.bandwidths,
            latencies_s=(),
            ring_latencies_s=(),
            ring_factor=1.0,
            overlap=estimate.ring_overlap,
        )

    exchanged, passed_on = moved
    bandwidths = []
    latencies_s = []
    ring_latencies_s = []
    ring_factors = []  # a degree's seconds per byte in a ring over those in an all-to-all
    for degree in degrees:
        byte_s, latency_s = _fit_transfers(samples, "ulysses", degree, exchanged)
        bandwidths.append((degree, 1 / byte_s))
        latencies_s.append((degree, latency_s))
        if estimate.ring_bytes is None:
            ring_factors.append(1.0)
        else:
            ring_byte_s, ring_latency_s = _fit_transfers(
                samples, "zigzag", degree, passed_on * (degree - 1)
            )
            ring_latencies_s.append((degree, ring_latency_s))
            ring_factors.append(ring_byte_s / byte_s)
    return FittedLinks(
        bandwidths=tuple(bandwidths),
        latencies_s=tuple(latencies_s),
        ring_latencies_s=tuple(ring_latencies_s),
        ring_factor=float(np.clip(np.mean(ring_factors), *RING_FACTORS)),
        overlap=overlap,
    )


def _fit_transfers(
    samples: Sequence[Sample], strategy: str, degree: int, token_bytes: float
) -> tuple[float, float]:
    """Fit seconds per byte, and seconds whatever is moved, of transfers of one kind and degree.

    token_bytes: bytes that a group moves in one layer for each of its tokens.
    """
    rank_bytes = []  # bytes that a rank moves in each sample
    seconds = []
    for sample in samples:
        if sample.strategy == strategy and sample.degree == degree:
            rank_bytes.append(token_bytes * sample.tokens / degree)
            seconds.append(sample.seconds)
    rows = [[nbytes, 1.0] for nbytes in rank_bytes]
    byte_s, latency_s = relative_nnls(rows, seconds)
    most_bytes, longest_s = max(zip(rank_bytes, seconds, strict=True))
    return max(byte_s, LEAST_BYTE_SHARE * longest_s / most_bytes), latency_s


# ---- how well the fit holds


def of_depth(
    estimate: CostModel, layers: int, depth: int, *, without_attention: int = 0
) -> CostModel:
    """Return `estimate` with the bytes that attention moves in a copy of `depth` of its `layers`
    layers, and with what the host does there.

    without_attention: layers of the copy that have none.
    """
    share = depth / layers
    moving = share
    if estimate.attention_share:
        moving = (depth - without_attention) / (layers * estimate.attention_share)
    ring_bytes = estimate.ring_bytes
    if ring_bytes is not None:
        ring_bytes = ring_bytes * moving
    return replace(
        estimate,
        all_to_all_bytes=estimate.all_to_all_bytes * moving,
        ring_bytes=ring_bytes,
        query_bytes=estimate.query_bytes * moving,
        launch_s=estimate.launch_s * share,
        post_s=estimate.post_s * share,
        message_s=estimate.message_s * share,
    )


def relative_errors(
    cost: CostModel,
    mixes: Sequence[ProbeLayout],
    seconds: Sequence[Sequence[float]],
    topology: Topology,
) -> tuple[float, ...]:
    """Return |predicted - measured| / measured of each mix.

    seconds: [mix][rank]; the slowest rank's count.
    """
    errors = []
    for mix, by_rank in zip(mixes, seconds, strict=True):
        (predicted_ns,) = lockstep_ns(cost, [mix.micro_batch], mix.lengths, topology)
        measured_s = max(by_rank)
        errors.append(abs(predicted_ns / 1e9 - measured_s) / measured_s)
    return tuple(errors)
