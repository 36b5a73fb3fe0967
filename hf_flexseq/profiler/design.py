"""Decide which runs are timed: some to fit the constants, others to test the fit.

1. Depths. A small model is copied whole. A larger one is copied with one and with three layers,
   which tells the cost of a layer from the cost of everything around the layers. A copy has one
   layer of each kind, as far as it has layers, and then more of those that the model has most of.
2. Sizes. All runs scale with two sizes: the most tokens that a rank gets in a whole micro-batch,
   and the longest sequence that the attention kernel gets by itself. The second is far longer,
   since kernels are slower per squared token where sequences are short. Each size is the largest
   power of two for which the *estimated* seconds stay below half of a budget. Work is counted and
   not timed, so sizes do not depend on how busy the machine is.
3. Shapes for the fit. Whole micro-batches run on every rank alone; the kernel runs alone, with
   every reach; so do the convolution and the scan of every kind of recurrent layer, and the
   second pass of such a scan; and the transfers of one layer run bare, with so many tokens that
   bursts and buffers do not matter.
4. Mixes to test the fit. Whole micro-batches with groups of every measured degree in turn, which
   show what the separate parts leave out.

Nothing here needs torch: a design is plain data, the same on every rank.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.analytic import Mixers, ModelShape
from hf_flexseq.cost.kinds import doubled_pairs
from hf_flexseq.cost.launches import EXCHANGES
from hf_flexseq.layers import FULL, Reach
from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.topology import Topology

MOST_TOKENS = 16384  # tokens of a rank in the largest whole micro-batch
LONGEST = 65536  # tokens of the longest sequence that the kernel gets by itself
SHORT = 2048  # tokens of that sequence for a model without attention
FEWEST_TOKENS = 64  # both sizes stop here, however small the budget is

SMALL = 50_000_000  # parameters up to which a model is copied whole: such a copy costs nothing
DEPTHS = (1, 3)  # layers of the two copies of a larger model

# Attention takes as long as its arithmetic from this head size on. With smaller heads it takes as
# long as with this one, because exponentials are most of the work.
EFFICIENT_HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Amount of measuring, which trades seconds for accuracy."""

    budget_s: float = 8.0
    """Estimated seconds of all runs that are made for the fit."""
    rounds: int = 3
    """Timings of each run that count; one more comes first and does not count."""
    held_out: int = 4
    """Micro-batches of mixed lengths that are timed to test the fit."""


THOROUGH = Effort(budget_s=40.0, rounds=5, held_out=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSizes:
    """The two sizes that all runs scale with."""

    tokens: int
    """Tokens of a rank in the largest whole micro-batch."""
    sequence: int
    """Tokens of the longest sequence that the attention kernel gets by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeLayout:
    """A micro-batch to run, with the lengths of its sequences."""

    micro_batch: MicroBatch
    lengths: tuple[int, ...]
    """Tokens of each sequence, by sequence id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeShape:
    """A run in which every working rank does the same, in groups of one degree."""

    strategy: str
    """`local`, `kernel`, `scan`, `again`, `ulysses` or `zigzag`; `Sample` in fit.py says what each
    one runs. In the runs of host.py: whose attention, or which bare transfers."""
    degree: int
    """Ranks of a group."""
    lengths: tuple[int, ...]
    """Tokens of each sequence of one group."""
    starts: tuple[int, ...]
    """First ranks of the groups, which share no rank and so work at the same time."""
    reach: Reach = FULL
    """Which keys the queries of a `kernel` read."""
    recurrent: str = ""
    """The kind of layer of a `scan`, and of `again`."""


# (layers, reach) of layers that read a window or a chunk, as in `ModelShape`.
LayersOfReach = tuple[tuple[int, Reach], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """Everything that a calibration runs."""

    depths: tuple[int, ...]
    """Layers of each copy of the model."""
    reaches: tuple[LayersOfReach, ...]
    """[copies] The layers of each copy that do not read all keys."""
    mixers: tuple[Mixers, ...]
    """[copies] The recurrent layers of each copy, and those without attention."""
    sizes: ProbeSizes
    shapes: tuple[ProbeShape, ...]
    """Runs for the fit."""
    mixes: tuple[ProbeLayout, ...]
    """Micro-batches to test the fit, run by the deepest copy."""


def timed_bytes(estimate: CostModel, shape: ModelShape) -> tuple[float, float]:
    """Return the bytes that Ulysses, and a ring of two, move in a layer for each token of a group.

    Those of a model's layers on average; of one without attention, as many as hidden states have.
    """
    hidden = float(EXCHANGES * shape.hidden * shape.dtype_bytes)
    return (
        estimate.all_to_all_bytes / shape.layers or hidden,
        (estimate.ring_bytes or 0.0) / shape.layers or hidden,
    )


def make_design(
    shape: ModelShape, estimate: CostModel, topology: Topology, effort: Effort
) -> Design:
    """Decide the runs that calibrate a model of this shape, for which `estimate` counts the work.

    Rings are timed where `estimate` knows what a ring moves.
    """
    rings = estimate.ring_bytes is not None
    depths = probe_depths(shape)
    sizes = choose_sizes(
        _counting(estimate, shape),
        topology,
        layers=shape.layers,
        depths=depths,
        rounds=effort.rounds + 1,  # the first round, which does not count, takes its time, too
        budget_s=effort.budget_s,
        reaches=all_reaches(shape),
    )
    if not shape.attention_count:  # whose kernel has no estimated seconds, and no price
        sizes = replace(sizes, sequence=min(sizes.sequence, SHORT))
    shapes = fitting_shapes(sizes, topology, rings, all_reaches(shape))
    return Design(
        depths=depths,
        reaches=tuple(reaches_of_copy(shape, depth) for depth in depths),
        mixers=tuple(mixers_of_copy(shape, depth) for depth in depths),
        sizes=sizes,
        shapes=shapes + _scan_shapes(sizes.tokens, topology, shape),
        mixes=hold_out_layouts(sizes.tokens, topology, rings, effort.held_out),
    )


# ---- 1. depths


def probe_depths(shape: ModelShape) -> tuple[int, ...]:
    """Choose how many layers each timed copy of a model has."""
    if shape.params <= SMALL or shape.layers <= max(DEPTHS):
        return (shape.layers,)
    return DEPTHS


def all_reaches(shape: ModelShape) -> tuple[Reach, ...]:
    """Return every reach that layers of a model have, the full one first."""
    reaches = tuple(reach for _, reach in shape.reaches)
    if shape.full_layers or not reaches:
        return (FULL, *reaches)
    return reaches


class LayerType(NamedTuple):
    """What a layer has."""

    reach: Reach | None
    """Which keys its queries read; None without attention."""
    recurrent: str | None
    """Its kind of recurrence; None without one."""


def layer_types(shape: ModelShape) -> list[tuple[int, LayerType]]:
    """Return (layers, type) of all layers of a model.

    Recurrent layers are those without attention, as far as there are any, then those with
    attention over all keys, then the others.
    """
    with_attention: list[tuple[int, Reach | None]] = [
        (shape.without_attention, None),
        (shape.full_layers, FULL),
        *shape.reaches,
    ]
    types = []
    kinds = [(layers, sizes.kind) for layers, sizes in shape.recurrent]
    for layers, reach in with_attention:
        left = layers
        while left and kinds:
            count, kind = kinds.pop(0)
            taken = min(count, left)
            types.append((taken, LayerType(reach, kind)))
            left -= taken
            if count > taken:
                kinds.insert(0, (count - taken, kind))
        if left:
            types.append((left, LayerType(reach, None)))
    return types


def types_of_copy(shape: ModelShape, depth: int) -> dict[LayerType, int]:
    """Return how many layers of each type a copy of `depth` layers has."""
    most_first = sorted(layer_types(shape), key=lambda pair: (-pair[0], pair[1].reach == FULL))
    if depth == shape.layers:
        return {kind: layers for layers, kind in most_first}
    counts = {kind: 0 for _, kind in most_first}
    for _ in range(depth):
        # one of each, and then those of which the copy has the smallest share of the model's
        missing = [(layers, kind) for layers, kind in most_first if layers > counts[kind]]
        _, kind = min(missing, key=lambda pair: (counts[pair[1]] > 0, counts[pair[1]] / pair[0]))
        counts[kind] += 1
    return counts


def reaches_of_copy(shape: ModelShape, depth: int) -> LayersOfReach:
    """Return the layers that do not read all keys in a copy of `depth` layers."""
    counts: Counter[Reach] = Counter()
    for kind, layers in types_of_copy(shape, depth).items():
        if kind.reach is not None:
            counts[kind.reach] += layers
    return tuple((counts[reach], reach) for _, reach in shape.reaches if counts[reach])


def mixers_of_copy(shape: ModelShape, depth: int) -> Mixers:
    """Return the recurrent layers, and those without attention, in a copy of `depth` layers."""
    counts: Counter[str] = Counter()
    without_attention = 0
    for kind, layers in types_of_copy(shape, depth).items():
        if kind.recurrent is not None:
            counts[kind.recurrent] += layers
        if kind.reach is None:
            without_attention += layers
    recurrent = tuple((counts[kind], kind) for _, kind in shape.mixers.recurrent if counts[kind])
    return Mixers(recurrent, without_attention)


# ---- 2. sizes


def choose_sizes(
    estimate: CostModel,
    topology: Topology,
    *,
    layers: int,
    depths: tuple[int, ...],
    rounds: int,
    budget_s: float,
    reaches: Sequence[Reach] = (FULL,),
) -> ProbeSizes:
    """Choose the largest sizes for which all runs take about `budget_s` estimated seconds.

    estimate: cost model of the whole model, which has `layers` layers. depths: layers of each
    copy that runs every whole micro-batch. rounds: how often each run is made. reaches: that the
    kernel is timed with.
    """
    rings = estimate.ring_bytes is not None

    def estimated_s(shapes: Sequence[ProbeShape]) -> float:
        once = sum(_estimated_s(shape, estimate, topology, layers, depths) for shape in shapes)
        return rounds * once

    def whole_s(tokens: int) -> float:
        return estimated_s(_whole_shapes(tokens, topology))

    def layer_s(sequence: int) -> float:
        return estimated_s(_layer_shapes(sequence, topology, rings, reaches))

    return ProbeSizes(
        tokens=_largest(whole_s, MOST_TOKENS, budget_s / 2),
        sequence=_largest(layer_s, LONGEST, budget_s / 2),
    )


def _largest(seconds_of: Callable[[int], float], most: int, budget_s: float) -> int:
    """Halve `most` until its estimated seconds are within the budget, and return that size."""
    size = most
    while size > FEWEST_TOKENS and seconds_of(size) > budget_s:
        size //= 2
    return size


def _counting(estimate: CostModel, shape: ModelShape) -> CostModel:
    """Return `estimate` with attention as slow as it is for heads that are small."""
    stretch = max(1.0, EFFICIENT_HEAD_DIM / shape.head_dim)
    kinds = [replace(kind, attention_s=kind.attention_s * stretch) for kind in estimate.kinds]
    return replace(estimate, attention_s=estimate.attention_s * stretch, kinds=tuple(kinds))


def _estimated_s(
    shape: ProbeShape,
    estimate: CostModel,
    topology: Topology,
    layers: int,
    depths: tuple[int, ...],
) -> float:
    """Estimate the seconds of one run of `shape`, by every depth where the whole model runs."""
    if shape.strategy == "kernel":
        share, attention_s = _of_reach(estimate, shape.reach)
        lengths = np.array(shape.lengths, dtype=np.float64)
        pairs = float(doubled_pairs(shape.reach, lengths).sum())
        return attention_s / (share * layers) * pairs

    if shape.strategy == "local":
        layout = alone(shape.lengths, topology)
        (whole_ns,) = lockstep_ns(estimate, [layout.micro_batch], layout.lengths, topology)
        return whole_ns / 1e9 * sum(depths) / layers

    if shape.strategy == "zigzag":
        group_bytes_per_token = (estimate.ring_bytes or 0.0) * (shape.degree - 1)
    else:
        group_bytes_per_token = estimate.all_to_all_bytes
    group_bytes = group_bytes_per_token / layers * shape.lengths[0]
    spans_nodes = shape.degree > topology.ranks_per_node
    return group_bytes / shape.degree / estimate.bandwidth(shape.degree, spans_nodes)


def _of_reach(estimate: CostModel, reach: Reach) -> tuple[float, float]:
    """Return the share of layers that have a reach, and the seconds of their attention per two
    pairs."""
    for kind in estimate.kinds:
        if kind.reach == reach:
            return kind.share, kind.attention_s
    return estimate.full_share, estimate.attention_s


# ---- 3. shapes for the fit


def fitting_shapes(
    sizes: ProbeSizes, topology: Topology, rings: bool, reaches: Sequence[Reach] = (FULL,)
) -> tuple[ProbeShape, ...]:
    """List the runs that are timed for the fit. rings: whether rings are timed, too. reaches: that
    the kernel is timed with."""
    whole = _whole_shapes(sizes.tokens, topology)
    layer = _layer_shapes(sizes.sequence, topology, rings, reaches)
    return whole + layer


def _whole_shapes(tokens: int, topology: Topology) -> tuple[ProbeShape, ...]:
    """List whole micro-batches that every rank runs alone, with at most `tokens` tokens."""
    # Long sequences tell attention's seconds, several short ones those of linear layers, and few
    # tokens the constants.
    packs = (
        (tokens,),
        (tokens // 4,),
        (tokens // 8,) * 4,
        (tokens // 32,) * 8,
        (tokens // 16,),
    )
    return tuple(_shape("local", 1, lengths, topology) for lengths in packs)


def _layer_shapes(
    sequence: int, topology: Topology, rings: bool, reaches: Sequence[Reach]
) -> tuple[ProbeShape, ...]:
    """List runs of one layer: its attention alone, and its bare transfers in each degree."""
    shapes = []
    for reach in reaches:
        for length in _kernel_lengths(sequence, reach):
            shape = _shape("kernel", 1, (length,), topology)
            shapes.append(replace(shape, reach=reach))
    for degree in measured_degrees(topology):
        for tokens_per_rank in (sequence // 8, sequence // 4, sequence // 2):
            lengths = (tokens_per_rank * degree,)
            shapes.append(_shape("ulysses", degree, lengths, topology))
            if rings:
                shapes.append(_shape("zigzag", degree, lengths, topology))
    return tuple(shapes)


def _scan_shapes(tokens: int, topology: Topology, shape: ModelShape) -> tuple[ProbeShape, ...]:
    """List runs of one recurrent layer of each kind: convolution and scan of one sequence, and its
    second pass. tokens: of the longest."""
    shapes = []
    for _, kind in shape.mixers.recurrent:
        for length in (tokens // 8, tokens // 2, tokens):
            for strategy in ("scan",) if kind == "convolution" else ("scan", "again"):
                one = _shape(strategy, 1, (length,), topology)
                shapes.append(replace(one, recurrent=kind))
    return tuple(shapes)


def _kernel_lengths(sequence: int, reach: Reach) -> list[int]:
    """List the lengths with which the kernel is timed, at most `sequence`.

    Far beyond a window pairs grow as tokens do, so that nothing would tell the seconds of either.
    """
    size = reach.window or reach.chunk
    if size is None:
        return [sequence // 8, sequence // 2, sequence]
    wanted = (size // 2, size, 4 * size, sequence)
    return sorted({min(max(length, 1), sequence) for length in wanted})


def _shape(strategy: str, degree: int, lengths: tuple[int, ...], topology: Topology) -> ProbeShape:
    return ProbeShape(
        strategy=strategy,
        degree=degree,
        lengths=lengths,
        starts=disjoint_blocks(topology, degree),
    )


def measured_degrees(topology: Topology) -> tuple[int, ...]:
    """List the degrees of the topology's process groups, ascending; the cost model prices every
    other degree as the next of these."""
    degrees = {stop - start for start, stop in topology.aligned_blocks()}
    return tuple(sorted(degrees))


def disjoint_blocks(topology: Topology, degree: int) -> tuple[int, ...]:
    """List the first ranks of groups of `degree` ranks that share no rank."""
    if degree == 1:
        return tuple(range(topology.world_size))
    starts: list[int] = []
    for start, stop in topology.aligned_blocks():
        fits = stop - start == degree
        if fits and (not starts or start >= starts[-1] + degree):
            starts.append(start)
    return tuple(starts)


def alone(lengths: tuple[int, ...], topology: Topology) -> ProbeLayout:
    """Give sequences of these lengths to each rank, which runs them alone."""
    count = len(lengths)
    groups = []
    for rank in range(topology.world_size):
        sequences = tuple(range(rank * count, (rank + 1) * count))
        groups.append(Group(ranks=(rank,), sequences=sequences, strategy="local"))
    return ProbeLayout(
        micro_batch=MicroBatch(groups=tuple(groups)), lengths=lengths * topology.world_size
    )


def in_groups(shape: ProbeShape) -> ProbeLayout:
    """Give sequences of the shape's lengths to each of its groups."""
    count = len(shape.lengths)
    groups = []
    for index, start in enumerate(shape.starts):
        sequences = tuple(range(index * count, (index + 1) * count))
        ranks = tuple(range(start, start + shape.degree))
        groups.append(Group(ranks=ranks, sequences=sequences, strategy=shape.strategy))
    return ProbeLayout(
        micro_batch=MicroBatch(groups=tuple(groups)), lengths=shape.lengths * len(shape.starts)
    )


# ---- 4. mixes to test the fit


def hold_out_layouts(
    tokens: int, topology: Topology, rings: bool, count: int
) -> tuple[ProbeLayout, ...]:
    """Draw `count` micro-batches of mixed lengths, the same on every machine.

    In the first one all ranks work alone. Where there are several ranks, groups of each measured
    degree follow in turn, under which the ranks work alone, too. tokens: of a rank in the largest
    whole micro-batch; a mix gives a rank about half of that.
    """
    wide_groups: list[tuple[int, str] | None] = [None]  # (degree, strategy); None: ranks alone
    for degree in measured_degrees(topology):
        wide_groups.append((degree, "ulysses"))
        if rings:
            wide_groups.append((degree, "zigzag"))

    rng = random.Random(0)
    layouts = []
    for index in range(count):
        wide = wide_groups[index % len(wide_groups)]
        layouts.append(_mix(tokens, topology, wide, rng))
    return tuple(layouts)


def _mix(
    tokens: int, topology: Topology, wide: tuple[int, str] | None, rng: random.Random
) -> ProbeLayout:
    # 1. the wide groups, and every rank alone: (ranks, strategy, tokens)
    parts: list[tuple[tuple[int, ...], str, int]] = []
    if wide is not None:
        degree, strategy = wide
        for start in disjoint_blocks(topology, degree):
            ranks = tuple(range(start, start + degree))
            parts.append((ranks, strategy, degree * tokens // 4))
    for rank in range(topology.world_size):
        parts.append(((rank,), "local", tokens // 4))

    # 2. sequences for each group, with ids in the order in which they are drawn
    lengths: list[int] = []
    groups: list[Group] = []
    for ranks, strategy, total in parts:
        first_id = len(lengths)
        lengths.extend(_mixed_lengths(total, rng))
        sequences = tuple(range(first_id, len(lengths)))
        groups.append(Group(ranks=ranks, sequences=sequences, strategy=strategy))
    return ProbeLayout(micro_batch=MicroBatch(groups=widest_first(groups)), lengths=tuple(lengths))


def _mixed_lengths(total: int, rng: random.Random) -> Iterator[int]:
    """Draw lengths that add up to `total`, most of them short."""
    while total:
        drawn = int(rng.lognormvariate(0, 1) * total / 6)
        length = min(total, max(1, drawn))
        yield length
        total -= length
