"""How much of a group's time is linear layers, attention and transfers, and how that is spread over the layers.

The parts of a local or Ulysses group add up to its closed form to the nanosecond. A ring's transfers follow from its
steps, see `ring.py`; here it has attention and linear layers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from hf_flexseq.cost import CostModel, group_ns
from hf_flexseq.plan import Group
from hf_flexseq.topology import Topology

# Forward : backward. In the backward linear layers run forward once more, attention does not.
LINEAR, ATTENTION, ALL_TO_ALL = (1, 3), (2, 5), (1, 1)
TRIPS = 3  # of a ring's chunk: keys and values in the forward and in the backward, and their gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One group of a micro-batch, index `place` there: nanoseconds on each of its ranks, by piece of the micro-batch.

    chunk_bytes: what one of a ring's 2 x degree chunks of keys and values weighs on one trip in one layer, or on all
    trips when the micro-batch is one piece; 0 for other strategies.
    """

    place: int
    group: Group
    latency_ns: tuple[int, ...]
    linear_ns: tuple[int, ...]
    attention_ns: tuple[int, ...]
    all_to_all_ns: tuple[int, ...]
    chunk_bytes: float


def make_work(
    place: int, group: Group, lengths: Sequence[int], topology: Topology, cost: CostModel, *, layers: int
) -> Work:
    """The work of `group`, spread over the pieces of a micro-batch of `layers` layers."""
    linear, attention, moved, chunk = _totals(group, lengths, topology, cost)
    return Work(
        place=place,
        group=group,
        latency_ns=spread(cost.latency_ns(group.degree), weights(ALL_TO_ALL, layers)),
        linear_ns=spread(linear, weights(LINEAR, layers)),
        attention_ns=spread(attention, weights(ATTENTION, layers)),
        all_to_all_ns=spread(moved, weights(ALL_TO_ALL, layers)),
        chunk_bytes=chunk / (TRIPS * layers) if layers else chunk,
    )


def weights(halves: tuple[int, int], layers: int) -> list[int]:
    """Relative sizes of the pieces: `layers` of the forward and as many of the backward, or a single one for 0."""
    return [1] if layers == 0 else [halves[0]] * layers + [halves[1]] * layers


def spread(total: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """`total` cut in proportion to `sizes`, in whole numbers that add up to it."""
    bounds = [total * upto // sum(sizes) for upto in accumulate(sizes, initial=0)]
    return tuple(stop - start for start, stop in pairwise(bounds))


def _totals(group: Group, lengths: Sequence[int], topology: Topology, cost: CostModel) -> tuple[int, int, int, float]:
    """Of the whole micro-batch: nanoseconds of linear layers, attention and all-to-all, bytes of a ring's chunk.
    Latency is not among them."""
    s = np.array([lengths[i] for i in group.sequences], dtype=np.float64)
    tokens, degree = float(s.sum()), group.degree
    linear = round(cost.linear_s * tokens / degree * 1e9)
    if group.strategy == "zigzag":
        if cost.ring_bytes is None:
            raise ValueError(f"cost model {cost.name!r} has no ring_bytes, so it cannot price a zigzag group")
        attention = round(cost.attention_s * float((s * s).sum()) / degree * 1e9)
        return linear, attention, 0, cost.ring_bytes * tokens / (2 * degree)
    whole, moved = group_ns(cost, group, lengths, topology) - cost.latency_ns(group.degree), 0
    if group.strategy == "ulysses":
        spans = topology.spans_nodes(group.start, group.stop)
        moved = min(whole, round(cost.all_to_all_bytes * tokens / degree / cost.bandwidth(degree, spans) * 1e9))
    linear = min(linear, whole - moved)
    return linear, whole - moved - linear, moved, 0.0
