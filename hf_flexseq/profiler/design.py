"""Decide which runs are timed: most to fit the constants, others to test the fit.

1. Copies. A small model is copied whole; a larger one with one layer of each type, or with three
   layers of its only type. For each type there is a copy with one layer of it, too. Differences
   between copies separate layers from what surrounds them, and attention and scans from linear
   layers.
2. Sizes. All runs scale with two sizes: the most tokens of the deepest copy, and the longest
   sequence of a copy of one layer, since kernels are slower per pair where sequences are short.
   Each size is the largest power of two whose *estimated* seconds stay below its share of a
   budget. Work is counted and not timed, so sizes do not depend on how busy the machine is.
3. Shapes for the fit. Every rank alone: long sequences determine attention, short ones linear
   layers, and next to no tokens the constants. Groups on next to no tokens: launches, posts and
   messages. Transfers alone, with many bytes and with none: bandwidths and latency. With recurrent
   layers a group on many tokens: their second pass. Copies leave out experts over ranks, and those
   of one layer run alone: on as many tokens of every rank, on those of one rank, on one rank, and
   on next to none; and their exchanges alone. A vision tower runs alone, too, whole, on images of
   several sizes (`tower_runs.py`).
4. Mixes to test the fit: micro-batches with groups of every measured degree in turn, and images of
   other sizes.

A design is plain data, the same on every rank.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hf_flexseq.base.layers import Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.profiler.tower_runs import (
    ImagesShape,
    held_out_images,
    images_s,
    images_shapes,
    most_patches,
)

MOST_TOKENS = 16384  # tokens of a rank in a micro-batch of the deepest copy
LONGEST = 32768  # tokens of the longest sequence of a copy of one layer
FEWEST_TOKENS = 64  # both sizes stop here, however small the budget is
FEW_TOKENS = 16  # tokens of a rank that take no time; a zigzag has some for both of its chunks

# Shares of the budget by size; the mixes take about the rest.
DEEP_SHARE = 1 / 3
LONG_SHARE = 1 / 2
TOWER_SHARE = 1 / 4  # beside these,
MOST_OF_TOWER = 10  # and at most so many budgets for the smallest images; else no runs of a tower

SMALL = 50_000_000  # parameters up to which a model is copied whole
DEEP = 3  # layers of the deepest copy of a larger model, if all its layers are of one type


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Amount of measuring, which trades seconds for accuracy."""

    budget_s: float = 8.0
    """Estimated seconds of all runs."""
    rounds: int = 3
    """Timings of each run that count; one more comes first and does not count."""
    held_out: int = 4
    """Micro-batches of mixed lengths that are timed to test the fit."""


THOROUGH = Effort(budget_s=40.0, rounds=5, held_out=16)


class LayerType(NamedTuple):
    """Attention and recurrence of a layer."""

    reach: Reach | None
    """Keys that its queries read; None without attention."""
    recurrent: str | None
    """Its kind of recurrence; None without one."""


# How many layers of each type a model, or a copy of it, has.
Layers = Mapping[LayerType, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeLayout:
    """A micro-batch to run, with the lengths of its sequences."""

    micro_batch: MicroBatch
    lengths: tuple[int, ...]
    """Tokens of each sequence, by sequence id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeShape:
    """A run in groups of one degree, which share no rank and do the same."""

    strategy: str
    """Strategy of the groups."""
    degree: int
    """Ranks of a group."""
    lengths: tuple[int, ...]
    """Tokens of each sequence of one group."""
    layers: Layers = field(default_factory=dict)
    """Layers of the copy that runs; empty for the transfers of one layer alone."""

    @property
    def has_few_tokens(self) -> bool:
        """True if tokens take next to no time."""
        return sum(self.lengths) <= self.degree * FEW_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsShape:
    """A run of the experts of one layer alone, in all expert groups, which do the same."""

    tokens: tuple[int, ...]
    """Tokens of each rank of an expert group."""
    to_first: bool = False
    """True if all go to the experts of the first rank, instead of to all alike."""
    computes: bool = True
    """False for the exchanges alone."""

    @property
    def computed(self) -> float:
        """Tokens that the busiest rank computes with its experts, each token's share counted."""
        return sum(self.tokens) / (1 if self.to_first else len(self.tokens))

    @property
    def has_few_tokens(self) -> bool:
        """True if tokens take next to no time."""
        return max(self.tokens) <= FEW_TOKENS


RunShape = ProbeShape | ExpertsShape | ImagesShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """Everything that a calibration runs."""

    copies: tuple[Layers, ...]
    """Layers of each copy of the model, the deepest first."""
    shapes: tuple[RunShape, ...]
    """Runs for the fit."""
    mixes: tuple[ProbeLayout, ...]
    """Micro-batches to test the fit, run by the deepest copy."""
    images: tuple[ImagesShape, ...]
    """Runs of the tower to test the fit; none if it is not run."""
    tokens: int
    """Tokens of a rank in the largest micro-batch of the deepest copy."""
    sequence: int
    """Tokens of the longest sequence of a copy of one layer."""

    @property
    def degrees(self) -> list[int]:
        """Degrees of the groups whose transfers are timed alone, ascending."""
        bare = {
            one.degree for one in self.shapes if isinstance(one, ProbeShape) and not one.layers
        }
        return sorted(bare)


def make_design(
    layers: Layers,
    shape: ModelShape,
    estimate: CostModel,
    topology: Topology,
    effort: Effort,
    *,
    image_sizes: Sequence[int] = (),
) -> Design:
    """Decide the runs that calibrate a model.

    layers, shape: of the whole model. estimate: counts the work. Rings are timed if it knows what
    a ring moves, and experts alone if it has some on several ranks. image_sizes: patches of the
    images that its tower can be run on, ascending; none without a tower, or without such images.
    """
    copies = copies_of(layers, shape.params)
    rings = ("ulysses", "zigzag") if estimate.ring_bytes is not None else ("ulysses",)
    expert_ranks = 1 if estimate.experts is None else estimate.experts.ranks

    def seconds_of(
        make: Callable[[int], Sequence[RunShape]],
    ) -> Callable[[int], float]:
        def seconds(size: int) -> float:
            once = sum(estimated_s(one, shape.layers, estimate, topology) for one in make(size))
            return (effort.rounds + 1) * once

        return seconds

    def deep_shapes(tokens: int) -> list[ProbeShape | ExpertsShape]:
        deep = _deep_shapes(copies, tokens, topology, rings)
        return [*deep, *experts_shapes(tokens, expert_ranks)]

    def long_shapes(sequence: int) -> list[ProbeShape]:
        return _long_shapes(copies, sequence, topology, rings)

    def tower_shapes(patches: int) -> list[ImagesShape]:
        return images_shapes(patches, image_sizes)

    # Half of a rank's memory; a token takes less in a copy.
    held = int(estimate.budget_bytes / 2 / estimate.token_bytes)
    tokens = _largest(seconds_of(deep_shapes), MOST_TOKENS, DEEP_SHARE * effort.budget_s)
    longest = max(tokens, min(LONGEST, 1 << held.bit_length() >> 1))
    sequence = _largest(seconds_of(long_shapes), longest, LONG_SHARE * effort.budget_s)
    of_tower: list[ImagesShape] = []
    if image_sizes:
        patches = most_patches(image_sizes)
        if estimate.tower is not None and estimate.tower.patch_bytes:
            patches = min(patches, int(estimate.budget_bytes / 2 / estimate.tower.patch_bytes))
        patches = _largest(seconds_of(tower_shapes), patches, TOWER_SHARE * effort.budget_s)
        if seconds_of(tower_shapes)(patches) <= MOST_OF_TOWER * effort.budget_s:
            of_tower = tower_shapes(patches)
    return Design(
        copies=copies,
        shapes=(*deep_shapes(tokens), *long_shapes(sequence), *of_tower),
        images=tuple(held_out_images(of_tower)),
        mixes=hold_out_layouts(tokens, topology, rings, effort.held_out),
        tokens=tokens,
        sequence=sequence,
    )


def _largest(seconds_of: Callable[[int], float], most: int, budget_s: float) -> int:
    """Halve `most` until its estimated seconds are within the budget, and return that size."""
    size = most
    while size > FEWEST_TOKENS and seconds_of(size) > budget_s:
        size //= 2
    return size


def estimated_s(
    shape: RunShape, model_layers: int, estimate: CostModel, topology: Topology
) -> float:
    """Estimate the seconds of a run. estimate: of a model of `model_layers` layers."""
    if isinstance(shape, ImagesShape):
        assert estimate.tower is not None, "only towers are run on images"
        return images_s(estimate.tower, shape)
    if isinstance(shape, ExpertsShape):
        assert estimate.experts is not None, "only experts over ranks are run alone"
        (experts_ns,) = estimate.experts.groups_ns(shape.tokens)
        return float(experts_ns) / 1e9 / model_layers
    layout = in_groups(shape, topology)
    own = replace(estimate, experts=None)
    (whole_ns,) = lockstep_ns(own, [layout.micro_batch], layout.lengths, topology)
    if shape.layers:
        return whole_ns / 1e9 * sum(shape.layers.values()) / model_layers
    passes = 1 if shape.strategy == "ulysses" else shape.degree - 1
    moved = estimate.all_to_all_bytes if shape.strategy == "ulysses" else estimate.ring_bytes
    rank_bytes = (moved or 0.0) / model_layers * passes * sum(shape.lengths) / shape.degree
    return rank_bytes / estimate.bandwidth(shape.degree, shape.degree > topology.ranks_per_node)


# ---- 1. copies


def copies_of(layers: Layers, params: int) -> tuple[Layers, ...]:
    """Choose the layers of each copy of a model, the deepest copy first."""
    deepest = dict(layers)
    if params > SMALL:
        most_of_each = DEEP if len(layers) == 1 else 1
        deepest = {kind: min(most_of_each, count) for kind, count in layers.items()}
    singles = [{kind: 1} for kind in layers]
    return (deepest, *(one for one in singles if one != deepest))


# ---- 3. shapes for the fit


def _deep_shapes(
    copies: Sequence[Layers], tokens: int, topology: Topology, strategies: Sequence[str]
) -> list[ProbeShape]:
    """List runs by tokens of a rank: of the deepest copy, and short sequences of the others."""
    deepest = copies[0]
    packs = ((tokens,), (tokens // 8,) * 4, (tokens // 64,) * 16, (FEW_TOKENS,))
    shapes = [_alone(lengths, deepest) for lengths in packs]
    for copy in copies[1:]:
        shapes += [_alone(lengths, copy) for lengths in packs[1::2]]

    per_node = topology.ranks_per_node
    for degree in measured_degrees(topology):
        if degree <= per_node or per_node == 1:
            for strategy in strategies:
                shapes.append(_group(strategy, degree, FEW_TOKENS, deepest))
    if any(kind.recurrent for kind in deepest):
        for degree in measured_degrees(topology)[:1]:
            shapes.append(_group("ulysses", degree, tokens, deepest))
    return shapes


def _long_shapes(
    copies: Sequence[Layers], sequence: int, topology: Topology, strategies: Sequence[str]
) -> list[ProbeShape]:
    """List runs by the longest sequence: attention in copies of one layer, and bare transfers."""
    shapes = []
    for copy in copies[-len(copies[0]) :]:
        (kind,) = copy
        if kind.reach is not None:
            shapes += [_alone((length,), copy) for length in (sequence, sequence // 4)]
    for degree in measured_degrees(topology):
        for strategy in strategies:
            shapes += [_group(strategy, degree, tokens, {}) for tokens in (sequence // 2, 0)]
    return shapes


def experts_shapes(tokens: int, expert_ranks: int) -> list[ExpertsShape]:
    """List runs of experts alone, by the most tokens of a rank; none where every rank computes its
    own. What ranks do for their own tokens and what they compute for all are told apart by a rank
    that has all tokens, and by one whose experts get all."""
    if expert_ranks == 1:
        return []
    others = expert_ranks - 1
    part = -(-tokens // expert_ranks)
    return [
        ExpertsShape(tokens=(tokens,) * expert_ranks),
        ExpertsShape(tokens=(tokens, *(1,) * others)),
        ExpertsShape(tokens=(part,) * expert_ranks, to_first=True),
        ExpertsShape(tokens=(FEW_TOKENS,) * expert_ranks),
        ExpertsShape(tokens=(tokens,) * expert_ranks, computes=False),
        ExpertsShape(tokens=(0,) * expert_ranks, computes=False),
    ]


def _alone(lengths: tuple[int, ...], layers: Layers) -> ProbeShape:
    """Make a run of every rank alone."""
    return ProbeShape(strategy="local", degree=1, lengths=lengths, layers=layers)


def _group(strategy: str, degree: int, tokens_per_rank: int, layers: Layers) -> ProbeShape:
    """Make a run of groups with one sequence each."""
    lengths = (degree * tokens_per_rank,)
    return ProbeShape(strategy=strategy, degree=degree, lengths=lengths, layers=layers)


def measured_degrees(topology: Topology) -> tuple[int, ...]:
    """List the degrees of process groups, ascending; others are priced as the next of these."""
    degrees = {stop - start for start, stop in topology.aligned_blocks()}
    return tuple(sorted(degrees))


def disjoint_blocks(topology: Topology, degree: int) -> list[range]:
    """List groups of `degree` ranks that share no rank."""
    if degree == 1:
        return [range(rank, rank + 1) for rank in range(topology.world_size)]
    blocks: list[range] = []
    for start, stop in topology.aligned_blocks():
        if stop - start == degree and (not blocks or start >= blocks[-1].stop):
            blocks.append(range(start, stop))
    return blocks


def in_groups(shape: ProbeShape, topology: Topology) -> ProbeLayout:
    """Give sequences of the shape's lengths to each of its groups."""
    return _layout([(shape.strategy, shape.degree, lambda: shape.lengths)], topology)


# ---- 4. mixes to test the fit


def hold_out_layouts(
    tokens: int, topology: Topology, strategies: Sequence[str], count: int
) -> tuple[ProbeLayout, ...]:
    """Draw `count` micro-batches of mixed lengths, the same on every machine.

    In the first one all ranks work alone. Groups of each measured degree follow in turn, besides
    which the ranks work alone, too. tokens: of a rank in the largest micro-batch; a mix gives a
    rank about half of that.
    """
    rng = random.Random(0)
    wide: list[list[tuple[str, int]]] = [[]]  # (strategy, degree) of groups besides those alone
    for degree in measured_degrees(topology):
        wide += [[(strategy, degree)] for strategy in strategies]

    def mixed(degree: int) -> Callable[[], tuple[int, ...]]:
        return lambda: tuple(_mixed_lengths(degree * tokens // 4, rng))

    layouts = []
    for index in range(count):
        kinds = [*wide[index % len(wide)], ("local", 1)]
        parts = [(strategy, degree, mixed(degree)) for strategy, degree in kinds]
        layouts.append(_layout(parts, topology))
    return tuple(layouts)


def _layout(
    parts: Sequence[tuple[str, int, Callable[[], tuple[int, ...]]]], topology: Topology
) -> ProbeLayout:
    """Return a micro-batch with groups on all ranks for each part: (strategy, degree, a function
    that returns the lengths of one group's sequences)."""
    lengths: list[int] = []
    groups: list[Group] = []
    for strategy, degree, lengths_of_group in parts:
        for ranks in disjoint_blocks(topology, degree):
            first_id = len(lengths)
            lengths.extend(lengths_of_group())
            sequences = tuple(range(first_id, len(lengths)))
            groups.append(Group(ranks=tuple(ranks), sequences=sequences, strategy=strategy))
    return ProbeLayout(micro_batch=MicroBatch(groups=widest_first(groups)), lengths=tuple(lengths))


def _mixed_lengths(total: int, rng: random.Random) -> Iterator[int]:
    """Draw lengths that add up to `total`, most of them short."""
    while total:
        drawn = int(rng.lognormvariate(0, 1) * total / 6)
        length = min(total, max(1, drawn))
        yield length
        total -= length
