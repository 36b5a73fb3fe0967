"""How much of a group's time is linear layers, attention and transfers, and how that is spread
over the layers.

The parts of a group without a ring add up to its closed form to the nanosecond. A ring's transfers
follow from its steps, see `ring.py`; here it has attention and linear layers only. A hybrid's ring
is not gone through: it takes what the closed form says, as part of the attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from hf_flexseq.cost import CostModel, group_ns, linear_ns, nodes_spanned
from hf_flexseq.plan import Group
from hf_flexseq.topology import Topology

# Forward : backward. In the backward linear layers run forward once more, attention does not.
LINEAR, ATTENTION, LATENCY = (1, 3), (2, 5), (1, 1)
# Transfers before and after the attention. An all-gather's way back weighs two of its ways there.
BEFORE = {"ulysses": (1, 1), "allgather": (1, 1)}
AFTER = {"ulysses": (1, 1), "allgather": (0, 2)}
RINGS = ("zigzag", "balanced")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupWork:
    """One group of a micro-batch, index `place` there: nanoseconds on each of its ranks, by piece
    of the micro-batch.

    before_ns, after_ns: transfers of the whole group that attention waits for, and that wait for
    it. trip_bytes: what a ring's keys and values, and its queries, weigh on one trip in one layer,
    or in all layers when the micro-batch is one piece; 0 for other strategies.
    """

    place: int
    group: Group
    latency_ns: tuple[int, ...]
    linear_ns: tuple[int, ...]
    attention_ns: tuple[int, ...]
    before_ns: tuple[int, ...]
    after_ns: tuple[int, ...]
    trip_bytes: tuple[float, float]


def make_work(
    place: int,
    group: Group,
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    layers: int,
) -> GroupWork:
    """The work of `group`, spread over the pieces of a micro-batch of `layers` layers."""
    linear, attention, moved = _totals(group, lengths, topology, cost)
    before, after = _sides(group.strategy, layers)
    parts = spread(moved, [x for both in zip(before, after, strict=True) for x in both])
    return GroupWork(
        place=place,
        group=group,
        latency_ns=spread(cost.latency_ns(group.degree), weights(LATENCY, layers)),
        linear_ns=spread(linear, weights(LINEAR, layers)),
        attention_ns=spread(attention, weights(ATTENTION, layers)),
        before_ns=parts[::2],
        after_ns=parts[1::2],
        trip_bytes=_trip_bytes(group, lengths, cost, layers)
        if group.strategy in RINGS
        else (0.0, 0.0),
    )


def _sides(strategy: str, layers: int) -> tuple[list[int], list[int]]:
    """Relative sizes of the transfers before and after the attention of each piece."""
    before, after = BEFORE.get(strategy, (1, 1)), AFTER.get(strategy, (1, 1))
    return (
        ([sum(before)], [sum(after)])
        if layers == 0
        else (weights(before, layers), weights(after, layers))
    )


def _trip_bytes(
    group: Group, lengths: Sequence[int], cost: CostModel, layers: int
) -> tuple[float, float]:
    tokens = group.tokens(lengths)
    keys, queries = cost.trip_bytes()
    return keys * tokens / max(layers, 1), queries * tokens / max(layers, 1)


def weights(halves: tuple[int, int], layers: int) -> list[int]:
    """Relative sizes of the pieces: `layers` of the forward and as many of the backward, or a
    single one for 0."""
    return [1] if layers == 0 else [halves[0]] * layers + [halves[1]] * layers


def spread(total: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """`total` cut in proportion to `sizes`, in whole numbers that add up to it."""
    bounds = [total * upto // sum(sizes) for upto in accumulate(sizes, initial=0)]
    return tuple(stop - start for start, stop in pairwise(bounds))


def _totals(
    group: Group, lengths: Sequence[int], topology: Topology, cost: CostModel
) -> tuple[int, int, int]:
    """Nanoseconds of linear layers, of a rank's average attention with what travels under it, and
    of other transfers than a ring's. Latency is not among them."""
    s = np.array([lengths[i] for i in group.sequences], dtype=np.float64)
    degree = group.degree
    linear = linear_ns(cost, group, lengths)
    if group.strategy in RINGS:
        return linear, round(cost.attention_s * float((s * s).sum()) / degree * 1e9), 0
    whole, moved = group_ns(cost, group, lengths, topology) - cost.latency_ns(group.degree), 0
    if group.strategy != "local":
        spans = topology.spans_nodes(group.start, group.stop)
        traffic = (
            cost.ring_traffic(degree, "allgather")
            if group.strategy == "allgather"
            else cost.all_to_all_bytes
        )
        speed = cost.bandwidth(degree, spans)
        if group.strategy == "hybrid" and spans:
            speed = cost.bandwidth(degree // nodes_spanned(degree), False)
        exposed = float((s * (1 - cost.hidden_share(s, degree, group.strategy))).sum())
        moved = min(whole, round(traffic * exposed / degree / speed * 1e9))
    linear = min(linear, whole - moved)
    return linear, whole - moved - linear, moved
