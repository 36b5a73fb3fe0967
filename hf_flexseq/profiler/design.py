"""Which micro-batches are timed: some to fit the constants, others, of mixed lengths, to see how
well the fit holds.

They scale with two sizes: the most tokens that a rank gets in a whole micro-batch, and the longest
sequence that the attention kernel alone gets, far longer, since kernels are slower per square
where sequences are short. Each is the largest power of two for which the estimated seconds stay
below half of a budget: counted work, so that sizes do not depend on how busy the machine is.

Transfers are run bare, one layer's of a group at a time, of so many tokens that bursts and buffers
do not matter. The mixed micro-batches are whole ones, with groups of every measured degree in
turn: they show what the parts leave out.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.topology import Topology

MOST_TOKENS, LONGEST, FEWEST_TOKENS = 16384, 65536, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSizes:
    """tokens: of a rank in the largest whole micro-batch. sequence: tokens of the attention
    kernel's longest one."""

    tokens: int
    sequence: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeLayout:
    """A micro-batch to run, with the lengths of its sequences, by id."""

    micro_batch: MicroBatch
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeShape:
    """What is run at the same time on all ranks, in groups of `degree`. See `Sample`; lengths: of
    each group."""

    strategy: str
    degree: int
    lengths: tuple[int, ...]


def alone(lengths: tuple[int, ...], topology: Topology) -> ProbeLayout:
    """Sequences of these lengths on each rank."""
    count = len(lengths)
    groups = tuple(
        Group(
            ranks=(rank,),
            sequences=tuple(range(rank * count, (rank + 1) * count)),
            strategy="local",
        )
        for rank in range(topology.world_size)
    )
    return ProbeLayout(
        micro_batch=MicroBatch(groups=groups), lengths=lengths * topology.world_size
    )


def measured_degrees(topology: Topology) -> tuple[int, ...]:
    """The degrees of the topology's process groups, ascending: others are priced as the next one
    of them."""
    return tuple(sorted({stop - start for start, stop in topology.aligned_blocks()}))


def disjoint_blocks(topology: Topology, degree: int) -> tuple[int, ...]:
    """Where groups of `degree` ranks start that can work at the same time."""
    if degree == 1:
        return tuple(range(topology.world_size))
    starts: list[int] = []
    for start, stop in topology.aligned_blocks():
        if stop - start == degree and (not starts or start >= starts[-1] + degree):
            starts.append(start)
    return tuple(starts)


def fitting_shapes(sizes: ProbeSizes, topology: Topology, rings: bool) -> tuple[ProbeShape, ...]:
    """What is timed for the fit. rings: whether the model's rings are of interest."""
    return (*_whole_shapes(sizes.tokens), *_layer_shapes(sizes.sequence, topology, rings))


def _whole_shapes(tokens: int) -> tuple[ProbeShape, ...]:
    packs = [(tokens,), (tokens // 4,), (tokens // 8,) * 4, (tokens // 32,) * 8, (tokens // 16,)]
    return tuple(ProbeShape(strategy="local", degree=1, lengths=lengths) for lengths in packs)


def _layer_shapes(sequence: int, topology: Topology, rings: bool) -> tuple[ProbeShape, ...]:
    """One layer's attention, and its transfers."""
    shapes = [
        ProbeShape(strategy="kernel", degree=1, lengths=(sequence // part,)) for part in (8, 2, 1)
    ]
    for degree in measured_degrees(topology):
        for share in (sequence // 8, sequence // 4, sequence // 2):
            shapes.append(ProbeShape(strategy="ulysses", degree=degree, lengths=(share * degree,)))
            if rings:
                shapes.append(
                    ProbeShape(strategy="zigzag", degree=degree, lengths=(share * degree,))
                )
    return tuple(shapes)


def hold_out_layouts(
    tokens: int, topology: Topology, rings: bool, count: int
) -> tuple[ProbeLayout, ...]:
    """`count` micro-batches of mixed lengths, the same on every machine: all ranks alone, and,
    where there are several ranks, also with a group of each measured degree in turn, under which
    the ranks work alone."""
    rng = random.Random(0)
    strategies = ("ulysses", "zigzag") if rings else ("ulysses",)
    wide = [
        None,
        *((degree, strategy) for degree in measured_degrees(topology) for strategy in strategies),
    ]
    return tuple(_mix(tokens, topology, wide[i % len(wide)], rng) for i in range(count))


def _mix(
    tokens: int, topology: Topology, wide: tuple[int, str] | None, rng: random.Random
) -> ProbeLayout:
    lengths: list[int] = []
    groups: list[Group] = []

    def add(start: int, degree: int, strategy: str, total: int) -> None:
        drawn = list(_mixed_lengths(total, rng))
        ids = tuple(range(len(lengths), len(lengths) + len(drawn)))
        lengths.extend(drawn)
        groups.append(
            Group(ranks=tuple(range(start, start + degree)), sequences=ids, strategy=strategy)
        )

    if wide is not None:
        degree, strategy = wide
        for start in disjoint_blocks(topology, degree):
            add(start, degree, strategy, degree * tokens // 4)
    for rank in range(topology.world_size):
        add(rank, 1, "local", tokens // 4)
    return ProbeLayout(micro_batch=MicroBatch(groups=widest_first(groups)), lengths=tuple(lengths))


def _mixed_lengths(total: int, rng: random.Random) -> Iterator[int]:
    """Lengths that add up to `total`, most of them short."""
    while total:
        length = min(total, max(1, int(rng.lognormvariate(0, 1) * total / 6)))
        yield length
        total -= length


def choose_sizes(
    estimate: CostModel,
    topology: Topology,
    *,
    layers: int,
    depths: tuple[int, ...],
    rounds: int,
    budget_s: float,
) -> ProbeSizes:
    """The sizes under which `rounds` of everything, with models of each of `depths` layers, take
    about `budget_s` estimated seconds. estimate: of the whole model, which has `layers` layers."""
    rings = estimate.ring_bytes is not None

    def largest(shapes_of: Callable[[int], Sequence[ProbeShape]], most: int) -> int:
        size = most
        while size > FEWEST_TOKENS:
            once = sum(
                _estimated_s(shape, estimate, topology, layers, depths)
                for shape in shapes_of(size)
            )
            if rounds * once <= budget_s / 2:
                break
            size //= 2
        return size

    return ProbeSizes(
        tokens=largest(_whole_shapes, MOST_TOKENS),
        sequence=largest(lambda size: _layer_shapes(size, topology, rings), LONGEST),
    )


def _estimated_s(
    shape: ProbeShape,
    estimate: CostModel,
    topology: Topology,
    layers: int,
    depths: tuple[int, ...],
) -> float:
    if shape.strategy == "kernel":
        return estimate.attention_s / layers * sum(length * length for length in shape.lengths)
    if shape.strategy == "local":
        layout = alone(shape.lengths, topology)
        return (
            lockstep_ns(estimate, [layout.micro_batch], layout.lengths, topology)[0]
            / 1e9
            * sum(depths)
            / layers
        )
    ring_bytes = (estimate.ring_bytes or 0.0) * (shape.degree - 1)
    moved = (
        (ring_bytes if shape.strategy == "zigzag" else estimate.all_to_all_bytes)
        / layers
        * shape.lengths[0]
    )
    return (
        moved
        / shape.degree
        / estimate.bandwidth(shape.degree, shape.degree > topology.ranks_per_node)
    )
