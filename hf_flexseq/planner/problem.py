"""One step's sequences with everything a planner asks about them, as integer tables.

Sequences stand longest first (equal ones by id), so that "longest first" is a walk by row and "the
long ones" are a prefix. Columns are the shapes of groups that the blocks offer: degree, and
whether it spans nodes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, Int64Array
from hf_flexseq.cost.kernels import FloatArray
from hf_flexseq.cost.lengths import shares_of
from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.planner.blocks import Blocks, blocks_of
from hf_flexseq.planner.task import PlanTask, longest_first

PERMILLE = 1000
# Per mille of a plan's nanoseconds, up to which the search's is taken instead of one degree.
CLOSE = 1010
# Per mille of a strategy's nanoseconds, up to which Ulysses is taken instead.
CLOSE_TO_ULYSSES = 1030
# Nanoseconds or tokens of what is not possible; four of them still fit 64 bits.
NEVER = 2**60


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """K sequences, longest first, on W ranks; S shapes of groups, as in `Blocks.shapes`."""

    topology: Topology
    """The ranks and their nodes."""
    blocks: Blocks
    """The rank ranges that groups may have."""
    ids: Int64Array
    """[K] Ids of the sequences."""
    lengths: Int64Array
    """[K] Tokens of the sequences."""
    shares: FloatArray | None
    """[K] Shares of the causal pairs that they have; None where all have all."""
    cap: int
    """Most tokens of a rank in a micro-batch."""
    times: Int64Array
    """[K, S] Nanoseconds of a sequence; NEVER where it does not fit."""
    needs: Int64Array
    """[K, S] Tokens per rank of a sequence; NEVER where it does not fit."""
    strategies: tuple[str, ...]
    """Names of the strategies that groups of two ranks and more may use."""
    cheapest: Int64Array
    """[K, S] Index in `strategies` of the cheapest one; of Ulysses where it is hardly slower."""
    least_area: Int64Array
    """[K] Cheapest device-nanoseconds of a sequence."""
    constant: int
    """Nanoseconds of a micro-batch, whatever is in it."""

    def part(self, rows: Int64Array) -> "Problem":
        """Return the problem of some rows, [rows] ascending."""
        shares = None if self.shares is None else self.shares[rows]
        tables = ("ids", "lengths", "times", "needs", "cheapest", "least_area")
        return replace(self, shares=shares, **{name: getattr(self, name)[rows] for name in tables})

    @property
    def world(self) -> int:
        """Number of ranks, W."""
        return self.topology.world_size

    @property
    def fewest_micro_batches(self) -> int:
        """Micro-batches that all tokens need at least."""
        return -(-int(self.lengths.sum()) // (self.cap * self.world))


def make_problem(task: PlanTask, *, alone: bool = True) -> Problem:
    """Return the tables of a step's sequences. alone: whether each is priced as if it were alone
    in its group, with all waits of it; otherwise none has any."""
    lengths, topology, cost = task.lengths, task.topology, task.cost
    strategy, cap = task.strategy, task.cap
    # 1. the sequences, [K] each
    order = longest_first(lengths)
    ids = np.array(order, dtype=np.int64)
    tokens = np.array([lengths[i] for i in order], dtype=np.int64)
    shares = shares_of(lengths, order)
    # 2. what each takes on each shape, [K, S] each
    blocks = blocks_of(topology)
    times_by_shape = []
    names_by_shape = []
    for shape in blocks.shapes:
        shape_times, shape_names = cheapest(
            cost, tokens, shape, strategy, alone=alone, shares=shares
        )
        times_by_shape.append(shape_times)
        names_by_shape.append(shape_names)
    times = np.stack(times_by_shape, axis=1)
    degrees = np.array([degree for degree, _ in blocks.shapes])
    needs = -(-tokens[:, None] // degrees)
    # 3. where each fits, [K, S]
    fits = (needs <= cap) & (times < NEVER)
    times = np.where(fits, times, NEVER)
    area = np.where(fits, times * np.where(fits, degrees, 1), NEVER)
    return Problem(
        topology=topology,
        blocks=blocks,
        ids=ids,
        lengths=tokens,
        shares=shares,
        # more is never used, and would overflow when counted in nanoseconds
        cap=min(cap, 2 * sum(lengths)),
        times=times,
        needs=np.where(fits, needs, NEVER),
        strategies=cost.strategies(strategy),
        cheapest=np.stack(names_by_shape, axis=1),
        least_area=area.min(axis=1),
        constant=cost.micro_batch_ns,
    )


def cheapest(
    cost: CostModel,
    lengths: Int64Array,
    shape: tuple[int, bool],
    strategy: str,
    *,
    alone: bool = False,
    shares: FloatArray | None = None,
) -> tuple[Int64Array, Int64Array]:
    """Return for each sequence the nanoseconds of its cheapest allowed strategy on a group, and
    the index of that strategy in `cost.strategies`: two arrays, [sequences].

    The nanoseconds are NEVER where no strategy is allowed. lengths: [sequences] tokens. shape:
    degree, and whether it spans nodes. strategy: as in `CostModel.strategies`. alone: whether to
    count a group of this sequence only, by the strategy that it would get: Ulysses unless another
    is cheaper by more than `CLOSE_TO_ULYSSES`. shares: [sequences] of the causal pairs that units
    have; None for plain sequences.
    """
    degree, spans_nodes = shape
    names = ("local",) if degree == 1 else cost.strategies(strategy)
    if not names:
        return np.full(len(lengths), NEVER), np.zeros(len(lengths), dtype=np.int64)
    price = cost.alone_ns if alone and cost.has_waits else cost.sequences_ns
    options = [price(lengths, degree, name, spans_nodes, shares) for name in names]
    nanoseconds = np.stack(options)  # [strategies, sequences]
    # Rings take more transfers and kernel calls, whose seconds are the least certain.
    handicaps = [CLOSE_TO_ULYSSES if alone and name != "ulysses" else PERMILLE for name in names]
    index = (nanoseconds * np.array(handicaps)[:, None]).argmin(axis=0)  # [sequences]
    return nanoseconds[index, np.arange(len(lengths))], index


def micro_batches_of(
    problem: Problem, where: Sequence[int], batches: Sequence[int]
) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of a solution.

    Sequences of a block that differ in strategy make one group each. Micro-batches without
    sequences are left out. where: [K] block of each row of the problem. batches: [K] micro-batch
    of each row.
    """
    blocks = problem.blocks
    ids = problem.ids.tolist()
    shapes = blocks.shape_of[list(where)]  # [K]
    strategies = problem.cheapest[np.arange(len(where)), shapes].tolist()
    # 1. the sequences of each group: members[micro-batch][block, strategy]
    members: dict[int, dict[tuple[int, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (block, batch) in enumerate(zip(where, batches, strict=True)):
        alone = block < problem.world
        name = "local" if alone else problem.strategies[strategies[row]]
        members[batch][block, name].append(ids[row])
    # 2. the groups of each micro-batch
    start = blocks.start.tolist()
    stop = blocks.stop.tolist()
    micro_batches = []
    for _, groups_of_batch in sorted(members.items()):
        groups = []
        for (block, name), sequences in sorted(groups_of_batch.items()):
            group = Group(
                ranks=tuple(range(start[block], stop[block])),
                sequences=tuple(sorted(sequences)),
                strategy=name,
            )
            groups.append(group)
        micro_batches.append(MicroBatch(groups=widest_first(groups)))
    return tuple(micro_batches)
