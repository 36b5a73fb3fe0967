"""Costs of ring strategies (`plan/rings.py`): the traffic and the pace of their busiest rank.

`registry.RINGS` names the costs of each.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from hf_flexseq.base.registry import RINGS, object_of

RING_PASSES = 3  # trips of keys and values: forward and backward, and their gradients


class RingCosts(NamedTuple):
    """Figures of the busiest rank of a ring, each a function of the degree."""

    trips: Callable[[int], float]
    """Trips of keys and values per token that a rank holds, forward and backward."""

    stretch: Callable[[int], float]
    """Seconds of attention over an even split's."""


@functools.cache
def ring_costs(strategy: str) -> RingCosts:
    """Return the costs of a strategy that is one of `registry.RINGS`."""
    costs: RingCosts = object_of(RINGS[strategy].costs)
    return costs


def zigzag_trips(degree: int) -> float:
    """Return the trips of keys and values, which come from every other rank."""
    return RING_PASSES * (degree - 1)


def zigzag_stretch(degree: int) -> float:
    """Return 1: all ranks have equal work."""
    return 1.0


ZIGZAG = RingCosts(trips=zigzag_trips, stretch=zigzag_stretch)
