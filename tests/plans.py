"""Plans for tests: by hand, by a planner, and random legal ones for what must hold under any."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.plan import Group, MicroBatch, Plan, check, widest_first
from hf_flexseq.plan.blocks import SEE_BLOCKS, Range
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.plan.shard import Shard, make_shard
from hf_flexseq.plan.units import Node, Unit
from hf_flexseq.planner import make_plan


def group(start: int, stop: int, *sequences: int, strategy: str = "ulysses") -> Group:
    """The ranks [start, stop) with these sequences; a rank alone is local."""
    name = "local" if stop - start == 1 else strategy
    return Group(ranks=tuple(range(start, stop)), sequences=sequences, strategy=name)


# Groups of 4, 2 and 1 ranks over five sequences; rank 3 works in the first one alone.
NESTED = MicroBatch(
    groups=(
        group(0, 4, 0, strategy="zigzag"),
        group(0, 2, 4),
        group(2, 3, 1, 2),
        group(0, 1, 3),
    )
)


def plan_of_groups(lengths: Sequence[int], *micro_batches: Sequence[Group], **fields) -> Plan:
    """A plan of micro-batches that are given as their groups."""
    values = {"objective_s": 0.0, "lower_bound_s": 0.0, "planner": "test", "planning_s": 0.0}
    made = tuple(MicroBatch(groups=tuple(groups)) for groups in micro_batches)
    return Plan(lengths=tuple(lengths), micro_batches=made, **values | fields)


def shards_of(strategy: str, degree: int, lengths: Sequence[int]) -> list[Shard]:
    """What each rank of one group holds, [degree]."""
    micro_batch = one_group(range(degree), len(lengths), strategy)
    return [make_shard(micro_batch, lengths, rank) for rank in range(degree)]


def planned(lengths: Sequence[int], topology: Topology, cost: CostModel, **options) -> Plan:
    """The plan of `make_plan` with these options."""
    return make_plan(lengths, topology, cost, PlanOptions(**options))


def one_group(ranks: Iterable[int], sequences: int, strategy: str) -> MicroBatch:
    """These ranks in one group, with sequences from 0 on."""
    group = Group(ranks=tuple(ranks), sequences=tuple(range(sequences)), strategy=strategy)
    return MicroBatch(groups=(group,))


def ends_apart(plan: Plan) -> bool:
    """Whether a rank that had something to do has nothing in the last micro-batch."""
    by_batch = [{r for group in part.groups for r in group.ranks} for part in plan.micro_batches]
    return by_batch[-1] < set().union(*by_batch)


def random_plan(
    lengths: Sequence[int],
    world_size: int,
    rng: random.Random,
    *,
    micro_batches: int | None = None,
    nodes: int = 1,
    shared: float | None = None,
    units: Sequence[Unit] = (),
) -> Plan:
    """Any sequences on any laminar family of groups inside a node or of whole ones, in any number
    of micro-batches.

    shared: share of the sequences that go to groups of several ranks; None leaves it to chance.
    units: of the sequences; the other rows of each have no tokens in `lengths`.
    """
    topology = Topology(nodes=nodes, ranks_per_node=world_size // nodes)
    count = micro_batches or rng.randint(1, 3)
    bins: list[list[int]] = [[] for _ in range(count)]
    for sequence, length in enumerate(lengths):
        if length:
            rng.choice(bins).append(sequence)
    micro_batches = [_random_groups(members, topology, rng, shared) for members in bins if members]
    if units:
        micro_batches = [[with_units(one, units) for one in groups] for groups in micro_batches]
    plan = plan_of_groups(lengths, *micro_batches)
    check(plan, topology)
    return plan


def random_blocks(plan: Plan, rng: random.Random) -> dict[int, tuple[Range, ...]]:
    """Up to two blocks of every plain sequence in a group that sees them."""
    blocks = {}
    for group in (group for part in plan.micro_batches for group in part.groups):
        plain = set(group.sequences) - {unit.sequence for unit in group.units}
        for sequence in sorted(plain) if group.strategy in SEE_BLOCKS else ():
            ends = sorted(rng.choices(range(plan.lengths[sequence] + 1), k=4))
            pairs = ((ends[0], ends[1]), (ends[2], ends[3]))
            blocks[sequence] = tuple((start, stop) for start, stop in pairs if start < stop)
    return blocks


def with_units(group: Group, units: Sequence[Unit]) -> Group:
    """The group with those of its sequences as units that are some."""
    own = tuple(unit for unit in units if unit.sequence in group.sequences)
    return replace(group, units=own)


def path_tokens(unit: Unit, last: int) -> list[int]:
    """The tokens of a row that ends in the node `last`, in its order."""
    nodes = [(unit.layout.starts[one], unit.layout.stops[one]) for one in unit.layout.path(last)]
    return [token for start, stop in nodes for token in range(start, stop)]


def random_unit(first: int, rows: int, rng: random.Random) -> Unit:
    """A tree of any form whose rows are `first` and those behind it."""
    nodes = [Node(-1, rng.choice((1, 2, 3, 8, 13)))]
    ends: list[int] = []
    while len(ends) < rows:
        # any node of the rightmost path branches, so that nodes stay depth first
        path = [len(nodes) - 1]
        while nodes[path[-1]].parent >= 0:
            path.append(nodes[path[-1]].parent)
        parent = rng.choice(path)
        if parent == len(nodes) - 1 and rng.random() < 0.3:
            ends.append(parent)  # a row that ends here, perhaps one of several
            continue
        if len(nodes) - 1 not in {node.parent for node in nodes} | set(ends):
            ends.append(len(nodes) - 1)  # a leaf
            if len(ends) == rows:
                break
        nodes.append(Node(parent, rng.choice((1, 1, 2, 3, 5, 8, 13))))
    leaves = set(range(len(nodes))) - {node.parent for node in nodes}
    ends += sorted(leaves - set(ends))
    unit = Unit(tuple(nodes), tuple((first + i, end) for i, end in enumerate(ends)))
    unit.check()
    return unit


def _random_groups(
    members: list[int], topology: Topology, rng: random.Random, shared: float | None
) -> tuple[Group, ...]:
    ranges = _random_laminar(0, topology.world_size, topology.ranks_per_node, rng)
    held: dict[tuple[int, int], list[int]] = {}
    for sequence in members:
        allowed = ranges
        if shared is not None:
            is_shared = rng.random() < shared
            allowed = [(start, stop) for start, stop in ranges if (stop - start > 1) == is_shared]
        held.setdefault(rng.choice(allowed), []).append(sequence)
    groups = []
    for (start, stop), sequences in held.items():
        strategy = "local" if stop - start == 1 else rng.choice(STRATEGIES[1:])
        groups.append(group(start, stop, *sequences, strategy=strategy))
    return widest_first(groups)


def _random_laminar(
    start: int, stop: int, per_node: int, rng: random.Random
) -> list[tuple[int, int]]:
    """[start, stop) and random nested parts of it."""
    if stop - start == 1:
        return [(start, stop)]
    width = per_node if stop - start > per_node else 1  # several nodes are cut between nodes
    cut = start + width * rng.randint(1, (stop - start) // width - 1)
    parts = ((start, cut), (cut, stop))
    return [
        (start, stop),
        *(part for ends in parts for part in _random_laminar(*ends, per_node, rng)),
    ]
