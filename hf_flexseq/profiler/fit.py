"""Fit the constants of the cost model to timed runs: one linear system, for all of them.

Every run is an equation. Its row has the amount of each *term*, its solution the seconds of one:

    copy of a model    linear       tokens x layers           head         tokens
                       layer        layers                    micro-batch  1
                       a reach      squared tokens, or two pairs of a window or chunk
                       scan, again  tokens of a kind of recurrent layers, with chunks filled up;
                                    again where ranks share a sequence
    its groups, and    launch, post, message   as `cost/launches.py` counts them, layers x
    bare transfers     group        exchanging layers
                       (strategy, degree)      bytes that a rank moves
    experts of a       experts      tokens that the busiest rank computes
    layer over ranks,  dispatch     tokens of the fullest rank
    and exchanges      expert layer 1
    alone              expert bytes that such a rank sends to others, or receives
                       exchange     exchanges without experts
    a tower alone      patch, pair, image, tower call: see `tower_runs.py`

Each rank of an expert group does something for its own tokens, which it sends to experts and gets
back (dispatch), and computes tokens of all of them with its experts. Dispatch is a part of linear
layers in the cost model, and the wait for each other in every layer a part of the constant of a
micro-batch. Copies that are timed for the fit leave out experts over ranks.

A model of any depth is priced by the same terms, so that models too large to be run whole are
measured with a few layers. Every equation is divided by its seconds: relative errors count, and a
short run as much as a long one.

On one processor for host and device, such as a CPU, a post holds the latency of the link, too:
nothing else goes on meanwhile. Whether launches hide under attention is not measured: it is the
estimate's. How much of a transfer attention hides is measured separately.

Rejected: SciPy's `nnls`, which does the same and would be a dependency for these thirty lines.
Rejected: clipping of plain least squares, whose other unknowns then compensate for what was
clipped.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.kinds import NearLayers, busiest_pairs, halos
from hf_flexseq.cost.launches import EXCHANGES, LayerWork, halo_work, layer_work, segments_work
from hf_flexseq.cost.recurrent import RecurrentLayers, filled, scan_chunk
from hf_flexseq.cost.rings import RING_PASSES
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.profiler.design import (
    ExpertsShape,
    Layers,
    LayerType,
    ProbeLayout,
    ProbeShape,
    RunShape,
)
from hf_flexseq.profiler.tower_runs import PATCH, ImagesShape, images_row, with_tower

Floats = NDArray[np.float64]
Term = Hashable
Row = dict[Term, float]  # the amount of each term in a run

# A latency explains at most the other half of the longest transfer. Without this bound, timings
# that hardly grow with the bytes would fit a latency and no bytes at all, an endless bandwidth.
LEAST_BYTE_SHARE = 0.5
# How much slower than an all-to-all a ring can be believed to move a byte.
RING_FACTORS = (0.1, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A timed run."""

    shape: RunShape
    seconds: float
    """Seconds of forward and backward together."""


# ---- rows

EXPERT_BYTES = "expert bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTerms:
    """Counts the terms of experts that lie on the ranks of an expert group."""

    ranks: int
    """Ranks of an expert group."""
    layer_bytes: float
    """Bytes per token that go to the experts of one layer and back, forward and backward."""
    layers_of: Callable[[Layers], int]
    """Counts the layers of a copy that have experts."""

    def row(self, shape: ExpertsShape) -> Row:
        """Return the terms of the experts of one layer, or of its exchanges alone."""
        held = max(shape.tokens)
        moved = self.layer_bytes * (self.ranks - 1) / self.ranks * max(shape.computed, held)
        if not shape.computes:
            return {EXPERT_BYTES: moved, "exchange": EXCHANGES}
        return {
            "experts": shape.computed,
            "dispatch": held,
            "expert layer": 1,
            EXPERT_BYTES: moved,
        }

    def bytes_moved(self, shape: ExpertsShape) -> int:
        """Return the bytes that a rank moves in the exchanges of a layer, to itself, too."""
        return int(self.layer_bytes * max(shape.tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Counts the terms of runs."""

    exchanged: float
    """Bytes that Ulysses moves in a layer for each token of a group."""
    passed_on: float
    """Bytes that a ring of two moves in a layer for each token of a group."""
    estimate: CostModel
    """The model's estimate, whose heads stretch attention under Ulysses."""
    experts: ExpertTerms | None = None
    """Terms of experts; None where every rank computes its own."""
    one_image_size: bool = False
    """True if the images of all runs have one size."""

    @classmethod
    def of(
        cls,
        estimate: CostModel,
        shape: ModelShape,
        experts: ExpertTerms | None = None,
        *,
        one_image_size: bool = False,
    ) -> "Terms":
        """Return a model's terms; without attention a layer moves its hidden states."""
        hidden = float(EXCHANGES * shape.hidden * shape.dtype_bytes)
        layers = max(1, shape.attention_count)
        return cls(
            exchanged=estimate.all_to_all_bytes / layers or hidden,
            passed_on=(estimate.ring_bytes or 0.0) / layers or hidden,
            estimate=estimate,
            experts=experts,
            one_image_size=one_image_size,
        )

    def row(self, shape: RunShape) -> Row:
        """Return the amount of each term of a run."""
        if isinstance(shape, ImagesShape):
            return images_row(shape, of_one_size=self.one_image_size)
        if isinstance(shape, ExpertsShape):
            assert self.experts is not None, "only experts over ranks are run alone"
            return self.experts.row(shape)
        if not shape.layers:
            return self._transfers(shape)
        tokens = sum(shape.lengths) / shape.degree
        depth = sum(shape.layers.values())
        row: Row = {"linear": depth * tokens, "head": tokens, "layer": depth, "micro-batch": 1}
        for kind, count in shape.layers.items():
            for term, amount in self._layer(kind, shape):
                row[term] = row.get(term, 0.0) + count * amount
        return row

    def _layer(self, kind: LayerType, shape: ProbeShape) -> Iterator[tuple[Term, float]]:
        """Yield what one layer of a type adds to a run."""
        degree, strategy = shape.degree, shape.strategy
        s = np.array(shape.lengths, dtype=np.float64)  # [sequences]
        if kind.reach is not None:
            yield kind.reach, self._pairs(kind.reach, s, degree, strategy)
            if degree > 1:
                is_near = not kind.reach.is_full and strategy == "zigzag"
                work = halo_work if is_near else layer_work
                yield from _host(work(strategy, degree))
                moved: float = self.bytes_moved(shape)
                if is_near:
                    moved = self.passed_on * float(halos(kind.reach, s, degree, strategy).sum())
                yield (strategy, degree), moved
        if kind.recurrent is not None:
            scanned = float(filled(s, scan_chunk(kind.recurrent), degree, strategy).sum())
            yield ("scan", kind.recurrent), scanned
            if degree > 1:
                yield from _host(segments_work(kind.recurrent, strategy, degree))
                if kind.recurrent != "convolution":
                    yield ("again", kind.recurrent), scanned

    def _pairs(self, reach: Reach, s: Floats, degree: int, strategy: str) -> float:
        """Return twice the busiest rank's pairs; squared tokens if full. s: [sequences] tokens."""
        stretch = self.estimate.head_stretch(degree) if strategy == "ulysses" else 1.0
        if reach == FULL:
            return float((s * s).sum()) / degree * stretch
        slices = 1 if strategy == "ulysses" else degree
        pairs = busiest_pairs(reach, s, slices, strategy)
        return float(pairs.sum()) * slices / degree * stretch

    def bytes_moved(self, shape: ProbeShape) -> int:
        """Return the bytes that a rank of a group moves in one layer."""
        tokens = sum(shape.lengths) / shape.degree
        if shape.strategy == "ulysses":
            return int(self.exchanged * tokens)
        return int(self.passed_on * tokens) * (shape.degree - 1)

    def _transfers(self, shape: ProbeShape) -> Row:
        """Return the terms of one layer's transfers alone, as transfers.py makes them."""
        posts, messages_of_post = EXCHANGES, 2 * (shape.degree - 1)
        if shape.strategy == "zigzag":
            posts, messages_of_post = RING_PASSES * (shape.degree - 1), 2
        work = LayerWork(calls=0, launches=0, posts=posts, messages=posts * messages_of_post)
        return {(shape.strategy, shape.degree): self.bytes_moved(shape), **dict(_host(work))}


def _host(work: LayerWork) -> Iterator[tuple[Term, float]]:
    """Yield the terms of one exchange of a layer besides its bytes."""
    yield "launch", work.launches
    yield "post", work.posts
    yield "message", work.messages
    yield "group", 1


# ---- least squares


def nnls(rows: Floats, seconds: Floats) -> Floats:
    """Return the x >= 0, [unknowns], that minimises ||rows x - seconds||, by Lawson and Hanson.

    rows: [equations, unknowns]. seconds: [equations].
    """
    # Columns differ by many orders of magnitude (a constant, a squared length): scaled to 1.
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(np.float64).tiny)  # [unknowns]
    scaled = rows / scale
    x = np.zeros(rows.shape[1])
    free = np.zeros(rows.shape[1], dtype=bool)  # which unknowns may be positive
    for _ in range(10 * len(x)):
        slope = scaled.T @ (seconds - scaled @ x)  # of the squared error, downwards
        slope[free] = 0.0
        if slope.max() <= 1e-10 * np.abs(seconds).max():
            break
        free[slope.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(scaled[:, free], seconds, rcond=None)[0]
            negative = free & (wanted < 0)
            if not negative.any():
                break
            # Go towards `wanted` until the first unknown is 0, and leave that one there.
            step = (x[negative] / (x[negative] - wanted[negative])).min(initial=1.0)
            x = x + step * (wanted - x)
            free &= ~(negative & (x <= 1e-14 * x.max()))
            x[~free] = 0.0
        x = wanted
    found: Floats = x / scale
    return found


def fit(samples: Sequence[Sample], terms: Terms) -> dict[Term, float]:
    """Return the seconds of one of each term, 0 for terms that take no time."""
    rows = [terms.row(sample.shape) for sample in samples]
    names = list(dict.fromkeys(name for row in rows for name in row))
    measured = np.array([sample.seconds for sample in samples])  # [equations]
    amounts = np.array([[row.get(name, 0.0) for name in names] for row in rows], dtype=np.float64)
    # Divided by the seconds, so that relative errors count.
    solution = nnls(amounts / measured[:, None], np.ones_like(measured))
    found = dict(zip(names, solution.tolist(), strict=True))
    for sample, row in zip(samples, rows, strict=True):
        link = _link_of(sample.shape)
        if link is not None and row[link]:  # with bytes
            found[link] = max(found[link], LEAST_BYTE_SHARE * sample.seconds / row[link])
    return found


def _link_of(shape: RunShape) -> Term | None:
    """Return the term of the bytes of a run that is nothing but transfers; None for others."""
    if isinstance(shape, ImagesShape):
        return None
    if isinstance(shape, ExpertsShape):
        return None if shape.computes else EXPERT_BYTES
    return None if shape.layers else (shape.strategy, shape.degree)


# ---- the cost model


def price(
    seconds: Mapping[Term, float],
    estimate: CostModel,
    model: Layers,
    layers: Layers,
    experts: ExpertTerms | None = None,
) -> CostModel:
    """Return the cost model of a copy, or of the whole model, with the fitted constants.

    seconds: as `fit` returns them. estimate: of the whole model; bytes and memory stay its own.
    model: layers of the whole model. layers: of the copy. experts: their terms, if they lie on
    several ranks. Raises ValueError for a model whose tokens take no time.
    """
    depth = sum(layers.values())
    linear_s = depth * seconds["linear"] + seconds["head"]
    if not linear_s > 0:
        raise ValueError(
            "more tokens take no more time: something else has used this machine meanwhile; "
            "measure when it is idle, or take cost_model='estimate'"
        )
    attention = with_attention(layers)
    share = attention / max(1, with_attention(model))  # of the bytes that the whole model moves
    full = sum(count for kind, count in layers.items() if kind.reach == FULL)
    cost = replace(
        estimate,
        attention_s=full * seconds.get(FULL, 0.0),
        linear_s=linear_s,
        micro_batch_s=depth * seconds["layer"] + seconds["micro-batch"],
        all_to_all_bytes=share * estimate.all_to_all_bytes,
        query_bytes=share * estimate.query_bytes,
        ring_bytes=None if estimate.ring_bytes is None else share * estimate.ring_bytes,
        kinds=_near(seconds, estimate, layers),
        recurrent=_recurrent(seconds, estimate, model, layers),
        attention_share=attention / depth,
    )
    if experts is not None:
        cost = _with_experts(cost, seconds, experts, experts.layers_of(layers))
    if PATCH in seconds:
        cost = with_tower(cost, seconds)
    if "post" not in seconds:  # one rank, which shares nothing
        return cost
    return _with_groups(cost, seconds, depth)


def _with_experts(
    cost: CostModel, seconds: Mapping[Term, float], terms: ExpertTerms, layers: int
) -> CostModel:
    """Return `cost` with what so many layers of experts take."""
    assert cost.experts is not None, "only experts over ranks have terms"
    experts = replace(
        cost.experts,
        token_s=layers * seconds["experts"],
        exchanged_bytes=layers * terms.layer_bytes,
        rate=1 / seconds[EXPERT_BYTES],
    )
    return replace(
        cost,
        linear_s=cost.linear_s + layers * seconds["dispatch"],
        micro_batch_s=cost.micro_batch_s + layers * seconds["expert layer"],
        experts=experts,
    )


def _near(
    seconds: Mapping[Term, float], estimate: CostModel, layers: Layers
) -> tuple[NearLayers, ...]:
    """Return the layers of a copy that read a window or a chunk."""
    near = []
    for one in estimate.kinds:
        count = sum(count for kind, count in layers.items() if kind.reach == one.reach)
        if count:
            share = count / with_attention(layers)
            near.append(replace(one, share=share, attention_s=count * seconds[one.reach]))
    return tuple(near)


def _recurrent(
    seconds: Mapping[Term, float], estimate: CostModel, model: Layers, layers: Layers
) -> tuple[RecurrentLayers, ...]:
    """Return the recurrent layers of a copy."""
    recurrent = []
    for one in estimate.recurrent:
        count = sum(count for kind, count in layers.items() if kind.recurrent == one.kind)
        if not count:
            continue
        part = count / (one.share * sum(model.values()))  # of the model's layers of this kind
        recurrent.append(
            replace(
                one,
                share=count / sum(layers.values()),
                token_s=count * seconds["scan", one.kind],
                again_s=count * seconds.get(("again", one.kind), 0.0),
                summary_bytes=part * one.summary_bytes,
                halo_bytes=part * one.halo_bytes,
                row_bytes=part * one.row_bytes,
            )
        )
    return tuple(recurrent)


def _with_groups(cost: CostModel, seconds: Mapping[Term, float], depth: int) -> CostModel:
    """Return `cost`, of `depth` layers, with what groups take besides the work of their
    sequences. Bytes of rings count as many as they are worth at the speed of an all-to-all."""
    degrees = sorted(
        term[1] for term in seconds if isinstance(term, tuple) and term[0] == "ulysses"
    )
    ratios = []
    for degree in degrees:
        ring_byte_s = seconds.get(("zigzag", degree))
        if ring_byte_s is not None:
            ratios.append(ring_byte_s / seconds["ulysses", degree])
    factor = float(np.clip(np.mean(ratios), *RING_FACTORS)) if ratios else 1.0
    exchanging = cost.attention_share + sum(kind.share for kind in cost.recurrent)
    return replace(
        cost,
        bandwidths=tuple((degree, 1 / seconds["ulysses", degree]) for degree in degrees),
        ring_bytes=None if cost.ring_bytes is None else factor * cost.ring_bytes,
        query_bytes=factor * cost.query_bytes,
        group_s=depth * exchanging * seconds["group"],
        launch_s=depth * seconds["launch"],
        post_s=depth * seconds["post"],
        message_s=depth * seconds["message"],
    )


def with_attention(layers: Layers) -> int:
    """Count the layers that have attention."""
    return sum(count for kind, count in layers.items() if kind.reach is not None)


def relative_errors(
    cost: CostModel,
    mixes: Sequence[ProbeLayout],
    seconds: Sequence[Sequence[float]],
    topology: Topology,
) -> tuple[float, ...]:
    """Return |predicted - measured| / measured of each mix, by its slowest rank."""
    errors = []
    for mix, by_rank in zip(mixes, seconds, strict=True):
        (predicted_ns,) = lockstep_ns(cost, [mix.micro_batch], mix.lengths, topology)
        measured_s = max(by_rank)
        errors.append(abs(predicted_ns / 1e9 - measured_s) / measured_s)
    return tuple(errors)
