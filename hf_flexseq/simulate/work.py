"""A group's time, divided into linear layers, attention and transfers, and spread over the layers.

What a group waits for beside its work is the closed form's (`CostModel.waits`).

The parts of a group without a ring add up to its closed form to the nanosecond. A ring's
transfers follow from its steps (see `ring.py`); here a ring has attention and linear layers only.
Its layers with a window or a chunk follow, with their halos before and after; then those that are
recurrent, with the exchange of their summaries before the scan. The ring of a
hybrid is not walked through: it takes what the closed form says, as part of the
attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from hf_flexseq.cost import CostModel, FloatArray, Int64Array, linear_ns, nodes_spanned
from hf_flexseq.plan import Group
from hf_flexseq.registry import RINGS
from hf_flexseq.topology import Topology

Halves = tuple[int, int]  # relative sizes of a forward and of a backward

# In the backward linear layers cost their forward and two products more (checkpointing), attention
# five products for the forward's two, and what a group waits for is the same.
LINEAR: Halves = (1, 3)
ATTENTION: Halves = (2, 5)
WAITS: Halves = (1, 1)
# Transfers before and after the attention. The gradients that return halos of a ring are float32,
# so that their way back counts as two of their ways there.
BEFORE: dict[str, Halves] = {"ulysses": (1, 1)}
BEFORE |= dict.fromkeys(RINGS, (1, 0))
AFTER: dict[str, Halves] = {"ulysses": (1, 1)}
AFTER |= dict.fromkeys(RINGS, (0, 2))
EVEN: Halves = (1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupWork:
    """One group of a micro-batch: nanoseconds on each of its ranks, by pass.

    A pass is one simulated layer, forward or backward; a micro-batch that is not cut into layers
    is a single pass.
    """

    index: int
    """Index of the group in its micro-batch."""
    group: Group
    waits_ns: tuple[int, ...]
    """By pass: what the group waits for beside its work: transfers that begin, and launches and
    posts of the host that attention and transfers do not hide."""
    linear_ns: tuple[int, ...]
    """By pass: linear layers."""
    attention_ns: tuple[int, ...]
    """By pass: attention of full layers, and transfers that travel under it (Ulysses' hidden
    ones)."""
    near_ns: tuple[int, ...]
    """By pass: the same of layers with a window or a chunk, which follow."""
    scan_ns: tuple[int, ...]
    """By pass: recurrent layers."""
    summaries_ns: tuple[int, ...]
    """By pass: what recurrent layers exchange."""
    before_ns: tuple[int, ...]
    """By pass: transfers of the whole group that attention waits for; of a ring halos."""
    after_ns: tuple[int, ...]
    """By pass: transfers of the whole group that wait for attention."""
    trip_bytes: tuple[float, float]
    """Bytes of a ring's keys and values, and of its queries, on one trip in one layer (in all
    layers when the micro-batch is a single pass); 0 for other strategies."""


def make_work(
    index: int,
    group: Group,
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    layers: int,
) -> GroupWork:
    """Return the work of `group`, spread over the passes of a micro-batch.

    index: of the group in its micro-batch.
    lengths: tokens of all sequences of the plan.
    layers: simulated layers; 0 for a single pass.
    """
    spans_nodes = topology.spans_nodes(group.start, group.stop)
    kind = (group.degree, group.strategy, spans_nodes)
    tokens = np.array([lengths[i] for i in group.sequences], dtype=np.int64)  # [sequences]
    work = int(cost.sequences_ns(tokens, *kind).sum())
    waits = cost.group_ns(tokens, *kind) - work
    # 1. recurrent layers, which are sums of their own
    scans, summaries, of_group = _recurrent_ns(tokens, kind, cost)
    waits = max(0, waits - of_group)
    # 2. all the others
    rest = work - scans - summaries
    linear, attention, near, moved = _totals(group, lengths, topology, cost, rest)
    before_ns, after_ns = _spread_transfers(moved, group.strategy, layers)
    return GroupWork(
        index=index,
        group=group,
        waits_ns=spread(waits, weights(WAITS, layers)),
        linear_ns=spread(linear, weights(LINEAR, layers)),
        attention_ns=spread(attention, weights(ATTENTION, layers)),
        near_ns=spread(near, weights(ATTENTION, layers)),
        scan_ns=spread(scans, weights(LINEAR, layers)),
        summaries_ns=spread(summaries + of_group, weights(EVEN, layers)),
        before_ns=before_ns,
        after_ns=after_ns,
        trip_bytes=_trip_bytes(group, lengths, cost, layers),
    )


def _recurrent_ns(
    lengths: Int64Array, kind: tuple[int, str, bool], cost: CostModel
) -> tuple[int, int, int]:
    """Return the nanoseconds of a group's recurrent layers, and of their exchanges, which are
    priced with the sequences or with the group.

    lengths: [sequences] tokens. kind: degree, strategy and whether the group spans nodes.
    """
    if not cost.recurrent:
        return 0, 0, 0
    degree, strategy, _ = kind
    scans_s = float(cost.scan_s(lengths.astype(np.float64), degree, strategy).sum())
    of_group_s = cost.group_summaries_s(*kind)
    summaries_s = 0.0 if of_group_s else cost.summaries_s(*kind) * len(lengths)
    return round(scans_s * 1e9), round(summaries_s * 1e9), round(of_group_s * 1e9)


def weights(halves: Halves, layers: int) -> list[int]:
    """Return the relative sizes of all passes: `layers` forwards, then as many backwards.

    A micro-batch that is not cut into layers (0) has a single pass.
    """
    if layers == 0:
        return [1]
    forward, backward = halves
    return [forward] * layers + [backward] * layers


def spread(total: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return `total` cut in proportion to `sizes`, in whole numbers that add up to it."""
    bounds = [total * upto // sum(sizes) for upto in accumulate(sizes, initial=0)]
    return tuple(stop - start for start, stop in pairwise(bounds))


def _spread_transfers(
    moved_ns: int, strategy: str, layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the transfers before and after the attention of every pass, which add up to
    `moved_ns`."""
    before = BEFORE.get(strategy, EVEN)
    after = AFTER.get(strategy, EVEN)
    if layers == 0:
        before_sizes, after_sizes = [sum(before)], [sum(after)]
    else:
        before_sizes, after_sizes = weights(before, layers), weights(after, layers)
    # before and after of the first pass, before and after of the second, ...
    in_order: list[int] = []
    for sizes_of_pass in zip(before_sizes, after_sizes, strict=True):
        in_order += sizes_of_pass
    parts = spread(moved_ns, in_order)
    return parts[::2], parts[1::2]


def _trip_bytes(
    group: Group, lengths: Sequence[int], cost: CostModel, layers: int
) -> tuple[float, float]:
    """Return the bytes of a ring's keys and values, and of its queries, on one trip."""
    if group.strategy not in RINGS:
        return 0.0, 0.0
    tokens = group.tokens(lengths)
    keys, queries = cost.trip_bytes()
    passes = max(layers, 1)
    full_tokens = cost.full_share * tokens
    return keys * full_tokens / passes, queries * full_tokens / passes


def _totals(
    group: Group, lengths: Sequence[int], topology: Topology, cost: CostModel, whole: int
) -> tuple[int, int, int, int]:
    """Return the nanoseconds of a group's linear layers, attention of full layers, attention of
    layers with a window or a chunk, and exposed transfers. Recurrent layers are left out.

    Attention is a rank's average, with the transfers that travel under it. What travels around a
    ring and what the group waits for are in none of the four. whole: nanoseconds of all sequences.
    """
    s = np.array([lengths[i] for i in group.sequences], dtype=np.float64)  # [sequences]
    linear = linear_ns(cost, group, lengths)
    if group.strategy in RINGS:
        attention_s = cost.attention_s * float((s * s).sum()) / group.degree
        near_s = float(cost.near_attention_s(s, group.degree, group.strategy).sum())
        halo_s = _halo_s(s, group, topology, cost)
        return linear, round(attention_s * 1e9), round(near_s * 1e9), round(halo_s * 1e9)

    moved = 0
    if group.strategy != "local":
        hidden = cost.hidden_share(s, group.degree, group.strategy)
        exposed_tokens = float((s * (1 - hidden)).sum())
        traffic, speed = _traffic_and_speed(group, topology, cost)
        moved_s = traffic * exposed_tokens / group.degree / speed
        moved = min(whole, round(moved_s * 1e9))
    linear = min(linear, whole - moved)
    attention = whole - moved - linear
    near = round(attention * _near_share(s, cost))
    return linear, attention - near, near, moved


def _near_share(s: FloatArray, cost: CostModel) -> float:
    """Return the share of attention's seconds that layers with a window or a chunk have. s:
    [sequences] tokens."""
    near_s = float(cost.near_attention_s(s, 1, "local").sum())
    return near_s and near_s / (near_s + cost.attention_s * float((s * s).sum()))


def _halo_s(s: FloatArray, group: Group, topology: Topology, cost: CostModel) -> float:
    """Return the seconds of a group's halos, and of the gradients that go back. s: [sequences]
    tokens."""
    if not cost.kinds:
        return 0.0
    spans_nodes = topology.spans_nodes(group.start, group.stop)
    return float(cost.halo_s(s, group.degree, group.strategy, spans_nodes).sum())


def _traffic_and_speed(group: Group, topology: Topology, cost: CostModel) -> tuple[float, float]:
    """Return the bytes per token that a group's collectives move, and their bytes/s."""
    spans_nodes = topology.spans_nodes(group.start, group.stop)
    traffic = cost.all_to_all_bytes
    if group.strategy == "hybrid" and spans_nodes:
        # the all-to-alls of a hybrid stay inside nodes
        speed = cost.bandwidth(group.degree // nodes_spanned(group.degree), False)
    else:
        speed = cost.bandwidth(group.degree, spans_nodes)
    return traffic, speed
