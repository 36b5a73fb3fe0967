"""Random legal plans, for tests that must hold under any of them."""

import random
from collections.abc import Sequence

from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Group, MicroBatch, Plan, check, widest_first


def random_plan(
    lengths: Sequence[int],
    world_size: int,
    rng: random.Random,
    *,
    micro_batches: int | None = None,
    nodes: int = 1,
    shared: float | None = None,
) -> Plan:
    """Any sequences on any laminar family of groups inside a node or of whole ones, in any number
    of micro-batches.

    shared: share of the sequences that go to groups of several ranks; None leaves it to chance.
    """
    topology = Topology(nodes=nodes, ranks_per_node=world_size // nodes)
    count = micro_batches or rng.randint(1, 3)
    bins: list[list[int]] = [[] for _ in range(count)]
    for sequence in range(len(lengths)):
        rng.choice(bins).append(sequence)
    plan = Plan(
        lengths=tuple(lengths),
        micro_batches=tuple(
            _random_micro_batch(members, topology, rng, shared) for members in bins if members
        ),
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="random",
        planning_s=0.0,
    )
    check(plan, topology)
    return plan


def _random_micro_batch(
    members: list[int],
    topology: Topology,
    rng: random.Random,
    shared: float | None,
) -> MicroBatch:
    ranges = _random_laminar(0, topology.world_size, topology.ranks_per_node, rng)
    held: dict[tuple[int, int], list[int]] = {}
    for sequence in members:
        allowed = ranges
        if shared is not None:
            is_shared = rng.random() < shared
            allowed = [(start, stop) for start, stop in ranges if (stop - start > 1) == is_shared]
        held.setdefault(rng.choice(allowed), []).append(sequence)
    groups = [
        Group(
            ranks=tuple(range(start, stop)),
            sequences=tuple(sequences),
            strategy="local" if stop - start == 1 else rng.choice(STRATEGIES[1:]),
        )
        for (start, stop), sequences in held.items()
    ]
    return MicroBatch(groups=widest_first(groups))


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
