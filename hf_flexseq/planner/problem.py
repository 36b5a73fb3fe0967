"""One step's sequences with everything a planner asks about them, as integer tables.

Sequences stand longest first (equal ones by id), so that "longest first" is a walk by row and "the
long ones" are a prefix. Columns are the shapes of groups that the blocks offer: degree, and
whether it spans nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_flexseq.cost import CostModel, Int64Array
from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.planner.blocks import Blocks, blocks_of
from hf_flexseq.topology import Topology

NEVER = 2**60  # nanoseconds or tokens of what is not possible; four of them still fit 64 bits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """K sequences, longest first, on W ranks.

    ids: [K] the sequences' ids. lengths: [K] tokens. cap: most tokens of a rank in a micro-batch.
    times: [K, shapes] nanoseconds, NEVER where a sequence does not fit. needs: [K, shapes] tokens
    per rank, likewise. first_fit: [K] the narrowest block that each sequence fits; no narrower one
    has memory for it. strategies: the names that groups of two ranks and more may use. cheapest:
    [K, shapes] index of the cheapest one. latency: [shapes] nanoseconds of a group beside its
    sequences, where they are not charged for it. least_area: [K] the cheapest device-nanoseconds.
    constant: nanoseconds of a micro-batch, whatever is in it. free: whether ranks meet only in
    their groups, so that their clocks run on from micro-batch to micro-batch.
    """

    topology: Topology
    blocks: Blocks
    ids: Int64Array
    lengths: Int64Array
    cap: int
    times: Int64Array
    needs: Int64Array
    first_fit: Int64Array
    strategies: tuple[str, ...]
    cheapest: Int64Array
    latency: Int64Array
    least_area: Int64Array
    constant: int
    free: bool

    @property
    def world(self) -> int:
        return self.topology.world_size

    @property
    def fewest_micro_batches(self) -> int:
        return -(-int(self.lengths.sum()) // (self.cap * self.world))


def make_problem(
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    strategy: str,
    cap: int,
    sync: str,
    charged: bool = False,
) -> Problem:
    """The tables of `lengths` when groups of two ranks and more may use what `strategy` allows.

    charged: count the latency of a group in the time of each of its sequences. It is paid once a
    group: that is too much for groups of several, and otherwise most searches count too little.
    """
    ids = np.array(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)), dtype=np.int64)
    tokens = np.array([lengths[i] for i in ids], dtype=np.int64)
    blocks = blocks_of(topology)
    degrees = np.array([degree for degree, _ in blocks.shapes])
    columns = [cheapest(cost, tokens, shape, strategy) for shape in blocks.shapes]
    needs = -(-tokens[:, None] // degrees)
    times, names = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    latency = np.array([cost.latency_ns(degree) for degree in degrees.tolist()])
    fits = (needs <= cap) & (times < NEVER)
    times = np.where(fits, times + latency * charged, NEVER)
    return Problem(
        topology=topology,
        blocks=blocks,
        ids=ids,
        lengths=tokens,
        # more is never used, and would overflow when counted in nanoseconds
        cap=min(cap, 2 * sum(lengths)),
        times=times,
        needs=np.where(fits, needs, NEVER),
        first_fit=np.searchsorted(blocks.shape_of, fits.argmax(axis=1)),
        strategies=cost.strategies(strategy),
        cheapest=names,
        latency=latency * (not charged),
        least_area=np.where(fits, times * np.where(fits, degrees, 1), NEVER).min(axis=1),
        constant=cost.micro_batch_ns,
        free=sync == "free",
    )


def cheapest(
    cost: CostModel, lengths: Int64Array, shape: tuple[int, bool], strategy: str
) -> tuple[Int64Array, Int64Array]:
    """Nanoseconds of the cheapest allowed strategy for each of `lengths` on a group of `shape`,
    and its index in `cost.strategies`. NEVER where no strategy is allowed.
    """
    degree, spans = shape
    names = ("local",) if degree == 1 else cost.strategies(strategy)
    if not names:
        return np.full(len(lengths), NEVER), np.zeros(len(lengths), dtype=np.int64)
    options = np.stack([cost.sequences_ns(lengths, degree, name, spans) for name in names])
    return options.min(axis=0), options.argmin(axis=0)


def micro_batches_of(
    problem: Problem, where: Sequence[int], batches: Sequence[int]
) -> tuple[MicroBatch, ...]:
    """The micro-batches in which row k of the problem stands on block where[k] in micro-batch
    batches[k].

    Sequences of a block that differ in strategy make one group each. Micro-batches without
    sequences are left out.
    """
    blocks, ids, world = problem.blocks, problem.ids.tolist(), problem.world
    start, stop = blocks.start.tolist(), blocks.stop.tolist()
    cheapest = problem.cheapest[np.arange(len(where)), blocks.shape_of[list(where)]].tolist()
    members: dict[int, dict[tuple[int, str], list[int]]] = {}
    for row, (block, batch) in enumerate(zip(where, batches, strict=True)):
        name = "local" if block < world else problem.strategies[cheapest[row]]
        members.setdefault(batch, {}).setdefault((block, name), []).append(ids[row])

    def group(block: int, name: str, sequences: list[int]) -> Group:
        return Group(
            ranks=tuple(range(start[block], stop[block])),
            sequences=tuple(sorted(sequences)),
            strategy=name,
        )

    return tuple(
        MicroBatch(
            groups=widest_first(
                [
                    group(block, name, held)
                    for (block, name), held in sorted(members[batch].items())
                ]
            )
        )
        for batch in sorted(members)
    )
