"""One strategy for all sequences that share their ranks, where this is faster than the best one
for each.

The searches give every sequence its own cheapest strategy. Sequences of two strategies are two
groups, each with launches and latencies of its own; in one group they share these, and what one
long sequence computes hides the launches for all.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hf_flexseq.cost import CostModel, GroupKind, groups_ns, kinds_ns
from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.topology import Topology


def with_joint_strategies(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    names: Sequence[str],
) -> tuple[MicroBatch, ...]:
    """Return the micro-batches with the groups of equal ranks joined in one of the strategy that
    is fastest for them, where that is faster than as they are.

    lengths: tokens of every sequence, by sequence id. names: of the strategies that groups of two
    ranks and more may use.
    """
    # 1. the groups that could be one, by micro-batch and ranks
    given: dict[tuple[int, int, int], list[Group]] = defaultdict(list)
    for index, micro_batch in enumerate(micro_batches):
        for group in micro_batch.groups:
            given[index, group.start, group.stop].append(group)
    wide = [groups for groups in given.values() if groups[0].degree > 1]
    if not wide:
        return tuple(micro_batches)
    # 2. each of them as one group of every strategy, [strategies, wide]
    spans = [topology.spans_nodes(groups[0].start, groups[0].stop) for groups in wide]
    members = [_members(groups) for groups in wide]
    joined = []
    for name in names:
        kinds = []
        for groups, spans_nodes in zip(wide, spans, strict=True):
            kinds.append(GroupKind(groups[0].degree, name, spans_nodes))
        joined.append(kinds_ns(cost, kinds, members, lengths))
    joined_ns = np.stack(joined)
    # 3. and as they are, [wide]
    each = [group for groups in wide for group in groups]
    first = np.cumsum([0, *(len(groups) for groups in wide[:-1])])
    given_ns = np.add.reduceat(groups_ns(cost, each, lengths, topology), first)
    # 4. the faster ones
    fastest = joined_ns.argmin(axis=0).tolist()
    faster = joined_ns.min(axis=0) < given_ns
    if not faster.any():
        return tuple(micro_batches)
    for index in np.flatnonzero(faster).tolist():
        groups = wide[index]
        groups[:] = [
            Group(
                ranks=groups[0].ranks,
                sequences=tuple(members[index]),
                strategy=names[fastest[index]],
            )
        ]
    chosen: list[list[Group]] = [[] for _ in micro_batches]
    for (index, _, _), groups in given.items():
        chosen[index] += groups
    return tuple(MicroBatch(groups=widest_first(groups)) for groups in chosen)


def _members(groups: Sequence[Group]) -> list[int]:
    """Return the sequences of some groups, in ascending order."""
    return sorted(sequence for group in groups for sequence in group.sequences)
