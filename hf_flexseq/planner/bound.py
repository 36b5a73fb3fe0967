"""Seconds that no plan can beat: every rank busy all the time at each sequence's cheapest degree.

    bound = (sum over sequences of the least degree x time) / ranks + fewest micro-batches x
    constant

Free ranks may run fewer micro-batches than their neighbours, so for them the constant counts as
often as ranks must start a micro-batch to hold all tokens, shared by all ranks, and at least once:
whoever works longest works in one.

    bound = max(area / ranks + constant, (area + ceil(tokens / cap) x constant) / ranks)

In lockstep there is a tighter one, which matters where ranks are many. A sequence has to end with
its micro-batch, so a long one may have no time for its cheapest degree. What a micro-batch lasts
is what the others leave of the step: they hold all tokens for which it has no room, and their
constants are paid. So a step of Z seconds needs an area that grows as Z shrinks,

    longest(Z) = Z - fewest micro-batches x constant - (least area of the other tokens) / ranks
    area(Z)    = sum over sequences of the least degree x time, of the degrees on which the
                 attention of the sequence ends within longest(Z)

and no plan takes Z with Z < area(Z) / ranks + fewest micro-batches x constant. Only attention
counts in longest(Z): Zeppelin spreads the linear layers of a sequence over all ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hf_flexseq.cost import CostModel, Int64Array
from hf_flexseq.planner.problem import NEVER, cheapest
from hf_flexseq.topology import Topology


class Bounds(NamedTuple):
    """Nanoseconds that no step on some sequences can undercut."""

    plain: int
    """The first formula of the module."""

    tighter: int
    """The tighter one, `plain` or more; `plain` where ranks are free."""


def bounds_ns(
    lengths: Int64Array, topology: Topology, cost: CostModel, *, strategy: str, cap: int, sync: str
) -> Bounds:
    """Return the bounds of a step on these sequences.

    Every sequence must fit on some degree. lengths: [sequences] tokens. strategy: what groups of
    two ranks and more may use. cap: most tokens of a rank in a micro-batch. sync: `lockstep` or
    `free`.
    """
    if not len(lengths):
        return Bounds(0, 0)
    # 1. the cheapest shape of each sequence, [sequences]: its area, and its attention there
    least, attention = _cheapest(lengths, topology, cost, strategy, cap)
    area: int = sum(least.tolist())
    # 2. spread over all ranks, with the constants of the fewest micro-batches
    tokens = int(lengths.sum())
    world = topology.world_size
    if sync == "free":
        started = max(world, -(-tokens // cap))  # (rank, micro-batch) pairs
        plain = -(-(area + started * cost.micro_batch_ns) // world)
        return Bounds(plain, plain)
    fewest = -(-tokens // (cap * world))
    constants = fewest * cost.micro_batch_ns
    plain = -(-area // world) + constants
    # 3. what of a step is left for its longest micro-batch
    others = _least_area_of(tokens - cap * world, lengths, least) // world
    spent = constants + others - len(lengths)  # the nanoseconds of each sequence are rounded
    # 4. sequences that may be too long for that on their cheapest shape
    is_long = attention > plain - spent
    if not is_long.any():
        return Bounds(plain, plain)
    short_area: int = sum(least[~is_long].tolist())
    long_area = _area_within(lengths[is_long], topology, cost, strategy, cap)

    def has_time(step_ns: int) -> bool:
        """Return whether a step has the time that its sequences need in it."""
        area = long_area(step_ns - spent)
        return area is not None and step_ns >= -(-(short_area + area) // world) + constants

    return Bounds(plain, _least(has_time, plain))


def _area_within(
    lengths: Int64Array, topology: Topology, cost: CostModel, strategy: str, cap: int
) -> Callable[[int], int | None]:
    """Return a function: the least device-nanoseconds of some sequences, [sequences], together, if
    the attention of each has to end within so many nanoseconds; None where one cannot."""
    on_shapes = []
    for shape in shapes_of(topology):
        on_shapes.append(_on_shape(lengths, shape, cost, strategy, cap))
    all_areas = np.stack([areas for areas, _ in on_shapes])  # [shapes, sequences]
    attention = np.stack([nanoseconds for _, nanoseconds in on_shapes])

    def area_within(within_ns: int) -> int | None:
        areas = np.where(attention <= within_ns, all_areas, NEVER).min(axis=0)  # [sequences]
        if (areas == NEVER).any():
            return None
        area: int = sum(areas.tolist())
        return area

    return area_within


def _least(holds: Callable[[int], bool], start: int) -> int:
    """Return the least number from `start` on for which `holds`, which then holds for all more."""
    if holds(start):
        return start
    below, above = start, 2 * start
    while not holds(above):
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        if holds(middle):
            above = middle
        else:
            below = middle
    return above


def _cheapest(
    lengths: Int64Array, topology: Topology, cost: CostModel, strategy: str, cap: int
) -> tuple[Int64Array, Int64Array]:
    """Return the least device-nanoseconds of each sequence, and the nanoseconds of its attention
    where it has them: two arrays, [sequences]."""
    least = np.full(len(lengths), NEVER)
    attention = np.full(len(lengths), NEVER)
    for shape in shapes_of(topology):
        areas, nanoseconds = _on_shape(lengths, shape, cost, strategy, cap)
        better = areas < least
        least = np.where(better, areas, least)
        attention = np.where(better, nanoseconds, attention)
    return least, attention


def _on_shape(
    lengths: Int64Array, shape: tuple[int, bool], cost: CostModel, strategy: str, cap: int
) -> tuple[Int64Array, Int64Array]:
    """Return what each sequence takes on a shape: two arrays, [sequences].

    They are its least device-nanoseconds, and at most the nanoseconds of these that are no linear
    layers; NEVER where it does not fit.
    """
    degree, _ = shape
    nanoseconds, _ = cheapest(cost, lengths, shape, strategy)
    fits = (-(-lengths // degree) <= cap) & (nanoseconds < NEVER)
    linear = np.ceil(cost.linear_s * lengths / degree * 1e9).astype(np.int64)
    areas = np.where(fits, nanoseconds * degree, NEVER)
    return areas, np.where(fits, nanoseconds - linear, NEVER)


def _least_area_of(tokens: int, lengths: Int64Array, least: Int64Array) -> int:
    """Return device-nanoseconds that any `tokens` of the sequences need at least.

    least: [sequences] device-nanoseconds. Sequences are taken cheapest per token first, and the
    last one in part.
    """
    if tokens <= 0:
        return 0
    order = np.argsort(least / lengths, kind="stable")
    held = lengths[order].cumsum()
    full = int(np.searchsorted(held, tokens, side="right"))  # sequences that are taken whole
    area: int = sum(least[order[:full]].tolist())
    left = tokens - (int(held[full - 1]) if full else 0)
    if left:
        last = order[full]
        area += int(least[last]) * left // int(lengths[last])
    return area


def shapes_of(topology: Topology) -> list[tuple[int, bool]]:
    """Return every (degree, spans nodes) a group can have, ascending by degree: a part of one
    node, or whole nodes."""
    shapes = [(degree, False) for degree in range(1, topology.ranks_per_node + 1)]
    for nodes in range(2, topology.nodes + 1):
        shapes.append((nodes * topology.ranks_per_node, True))
    return shapes
