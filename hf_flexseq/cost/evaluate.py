"""Nanoseconds of groups, micro-batches and whole steps by a cost model.

    group       the sum over its sequences, plus its waits
    rank        the sum over its groups
    lockstep    a micro-batch takes as long as its slowest rank, and the constant; with experts on
                several ranks, as long as the slowest expert group (`experts.py`)
    free        ranks meet only inside groups, so each has a separate clock

The cost of one sequence is `CostModel.sequences_ns`. `view/closed_form.py` draws a step with the
same nanoseconds.

With `image_ns`, the nanoseconds that a tower takes for the images of each sequence, every rank of
a group encodes the images of all of its sequences, as in other stacks. hf_flexseq encodes the
images of a step once each, beside its groups (`TowerCost.placed`).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.choices import with_choice
from hf_flexseq.cost.lengths import shares_of
from hf_flexseq.cost.model import CostModel, Int64Array
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.memory import MemoryChoice

# In this file `lengths` always are the tokens of every sequence of the plan, by sequence id.

NO_IMAGES: Mapping[int, int] = MappingProxyType({})


# ---- groups


def group_ns(cost: CostModel, group: Group, lengths: Sequence[int], topology: Topology) -> int:
    """Return the nanoseconds of a group: its sequences and its waits."""
    return int(groups_ns(cost, (group,), lengths, topology)[0])


def groups_ns(
    cost: CostModel,
    groups: Sequence[Group],
    lengths: Sequence[int],
    topology: Topology,
    image_ns: Mapping[int, int] = NO_IMAGES,
) -> Int64Array:
    """Return the nanoseconds of each group, [groups], computed for all groups of a kind at once.
    A kind is a degree, a strategy, and whether the group spans nodes."""
    # 1. which groups are of one kind
    kind2groups: dict[tuple[int, str, bool], list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        spans_nodes = topology.spans_nodes(group.start, group.stop)
        kind2groups[group.degree, group.strategy, spans_nodes].append(index)
    nanoseconds = np.zeros(len(groups), dtype=np.int64)
    for kind, indices in kind2groups.items():
        # 2. the sequences of these groups, one group after the other
        members: list[int] = []
        first: list[int] = []  # where each group's sequences begin in `members`
        for index in indices:
            first.append(len(members))
            members += groups[index].sequences
        # 3. their nanoseconds, summed by group
        tokens = np.array([lengths[one] for one in members], dtype=np.int64)  # [members]
        each = cost.sequences_ns(tokens, *kind, shares=shares_of(lengths, members))  # [members]
        if image_ns:
            images = np.array([image_ns.get(one, 0) for one in members])
            nanoseconds[indices] = np.add.reduceat(images, first)
        nanoseconds[indices] += np.add.reduceat(each, first)
        # 4. and what they wait for besides them
        if cost.has_waits and kind[0] > 1:
            cover = np.add.reduceat(cost.cover_ns(each, tokens, kind[0]), first)
            nanoseconds[indices] += cost.waits(*kind).beyond(cover)
    return nanoseconds


# ---- micro-batches


def experts_ns(
    cost: CostModel, micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> Int64Array:
    """Return the nanoseconds of each expert group's experts in a micro-batch, [expert groups], by
    a cost model that has some. Raises ValueError unless expert groups divide the ranks."""
    experts = with_choice(cost, micro_batch.memory).experts
    assert experts is not None, "only a cost model with experts prices them"
    tokens = np.zeros(topology.world_size, dtype=np.int64)  # of each rank
    for group in micro_batch.groups:
        tokens[group.start : group.stop] += group.tokens_per_rank(lengths)
    return experts.groups_ns(tokens)


# ---- steps


def check_free(cost: CostModel) -> None:
    """Raise ValueError where ranks cannot run different micro-batches."""
    if cost.experts is not None:
        raise ValueError(
            f"sync='free' with experts over {cost.experts.ranks} ranks, which meet in every "
            "layer: use sync='lockstep'"
        )


def lockstep_ns(
    cost: CostModel,
    micro_batches: Iterable[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    image_ns: Mapping[int, int] = NO_IMAGES,
) -> tuple[int, ...]:
    """Return the nanoseconds of each micro-batch when all ranks run it together, [micro-batches].

    A micro-batch takes as long as its slowest rank, or its slowest expert group, and the constant.
    """
    micro_batches = tuple(micro_batches)
    work_ns = _work_ns(cost, micro_batches, lengths, topology, image_ns)
    nanoseconds = []
    for micro_batch, of_groups in zip(micro_batches, work_ns, strict=True):
        busy = np.zeros(topology.world_size, dtype=np.int64)  # of each rank
        for group, of_group in zip(micro_batch.groups, of_groups, strict=True):
            busy[group.start : group.stop] += of_group
        if cost.experts is not None:
            together = experts_ns(cost, micro_batch, lengths, topology)  # [expert groups]
            busy = busy.reshape(len(together), -1).max(axis=1) + together
        nanoseconds.append(int(busy.max()) + cost.micro_batch_ns)
    return tuple(nanoseconds)


def _work_ns(
    cost: CostModel,
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    image_ns: Mapping[int, int],
) -> list[list[int]]:
    """Return the nanoseconds of the groups of each micro-batch, priced together for all
    micro-batches of one choice for activations."""
    choice2batches: dict[MemoryChoice | None, list[int]] = defaultdict(list)
    for index, micro_batch in enumerate(micro_batches):
        choice2batches[micro_batch.memory].append(index)
    work_ns: list[list[int]] = [[] for _ in micro_batches]
    for choice, indices in choice2batches.items():
        groups = [group for index in indices for group in micro_batches[index].groups]
        priced = with_choice(cost, choice)
        of_all = groups_ns(priced, groups, lengths, topology, image_ns).tolist()
        first = 0  # of the micro-batch's groups in `of_all`
        for index in indices:
            stop = first + len(micro_batches[index].groups)
            work_ns[index] = of_all[first:stop]
            first = stop
    return work_ns


def free_ns(
    cost: CostModel,
    micro_batches: Iterable[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    image_ns: Mapping[int, int] = NO_IMAGES,
) -> tuple[int, ...]:
    """Return each rank's clock, [world_size], after a step whose ranks meet only inside groups.

    Micro-batch by micro-batch and widest first, a group starts when the last of its ranks is free.
    A rank pays the constant once for every micro-batch it works in, before its first group there.
    Raises ValueError for experts on several ranks, which wait for each other in every layer.
    """
    check_free(cost)
    clock = np.zeros(topology.world_size, dtype=np.int64)
    for micro_batch in micro_batches:
        works = np.zeros(topology.world_size, dtype=bool)
        for group in micro_batch.groups:
            works[group.start : group.stop] = True
        clock[works] += cost.micro_batch_ns
        priced = with_choice(cost, micro_batch.memory)
        work_ns = groups_ns(priced, micro_batch.groups, lengths, topology, image_ns).tolist()
        for group, nanoseconds in zip(micro_batch.groups, work_ns, strict=True):
            ranks = slice(group.start, group.stop)
            clock[ranks] = clock[ranks].max() + nanoseconds
    return tuple(clock.tolist())


def step_ns(
    cost: CostModel,
    micro_batches: Iterable[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    *,
    sync: str,
    image_ns: Mapping[int, int] = NO_IMAGES,
) -> int:
    """Return the nanoseconds of an optimizer step; a step without micro-batches takes none.

    sync: `lockstep` or `free`.
    """
    if sync == "free":
        return max(free_ns(cost, micro_batches, lengths, topology, image_ns))
    return sum(lockstep_ns(cost, micro_batches, lengths, topology, image_ns))
