"""Costs of ring strategies (`plan/rings.py`): the traffic and the work of their busiest rank.

`registry.RINGS` names the costs of each. tests/cost/test_launches.py holds the counts to the
programs that ranks run.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from hf_flexseq.base.registry import RINGS, object_of

RING_PASSES = 3  # trips of keys and values: forward and backward, and their gradients
ZIGZAG_LAUNCHES = 10  # besides the attention calls
ZIGZAG_RANK_LAUNCHES = 4  # for each rank of the group


class RingWork(NamedTuple):
    """Host work for a ring in one layer, forward and backward; posts follow from rounds."""

    calls: int
    """Attention calls."""

    launches: int
    """Operations on the device, the attention calls among them."""

    messages: int
    """Sends and receives."""


class RingCosts(NamedTuple):
    """Figures of the busiest rank of a ring, each a function of the degree."""

    trips: Callable[[int], tuple[int, int]]
    """Trips of (keys and values, queries) per token that a rank holds, forward and backward."""

    stretch: Callable[[int], float]
    """Seconds of attention over those of an even split."""

    work: Callable[[int], RingWork]
    """Host work in one layer."""


@functools.cache
def ring_costs(strategy: str) -> RingCosts:
    """Return the costs of a strategy that is one of `registry.RINGS`."""
    costs: RingCosts = object_of(RINGS[strategy].costs)
    return costs


def zigzag_trips(degree: int) -> tuple[int, int]:
    """Return the trips of keys and values, and of queries: keys come from every other rank."""
    return RING_PASSES * (degree - 1), 0


def zigzag_stretch(degree: int) -> float:
    """Return 1: all ranks have equal work."""
    return 1.0


def zigzag_work(degree: int) -> RingWork:
    """Return what the host of the busiest rank does in one layer, forward and backward."""
    calls = degree + (degree + 1)  # the backward cuts one in two, for gradients to travel under
    return RingWork(
        calls=calls,
        launches=calls + ZIGZAG_LAUNCHES + ZIGZAG_RANK_LAUNCHES * degree,
        messages=2 * RING_PASSES * (degree - 1),
    )


ZIGZAG = RingCosts(trips=zigzag_trips, stretch=zigzag_stretch, work=zigzag_work)
