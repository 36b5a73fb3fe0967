"""The zones of a rank in one attention call, woven together: one computes while another's
transfers are on their way.

A zone's forward or backward is a generator. It posts what it can, then yields the *time* at which
it wants to go on and wait for it, and so on until it returns its result. Times are parts of the
zone's own course: it posts its first transfers at 0, has done its work at 1, and waits for what is
still on its way to it at `END`.

1. Every zone posts its first transfers, widest first: the slowest link gets its work at once.
2. The zone whose time is next goes on, the narrower one of two. So zones advance side by side,
   each in as many steps as it has, and the local one, which is cut into pieces for the purpose,
   fills the waiting of the others.

Zeppelin (arXiv 2509.21841, section 4.1) runs inter-node, intra-node and local queues one after the
other. Here the order is finer but just as static: times depend on the strategy and the group
alone, so all ranks of a group agree on them, and everything that is posted on any rank is posted
in one order, by time and then by zone. Among ranks that wait for each other one would therefore
wait for what comes first in that order, and all have posted that: nothing can hang, whatever a
backend does about tags. Rejected: going on with whatever has arrived, since gloo cannot be asked.
"""

import math
from collections.abc import Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
ZoneSteps = Generator[float, None, Result]

END = 2.0  # after all work


def run_zones(zones: Sequence[ZoneSteps[Result]]) -> list[Result]:
    """The results of the zones, which stand widest first."""
    results: list[Result] = [None] * len(zones)
    times = [0.0] * len(zones)
    for place in range(len(zones)):
        _advance(zones, place, times, results)
    while (time := min(times, default=math.inf)) < math.inf:
        narrowest = max(place for place, due in enumerate(times) if due == time)
        _advance(zones, narrowest, times, results)
    return results


def _advance(
    zones: Sequence[ZoneSteps[Result]], place: int, times: list[float], results: list[Result]
) -> None:
    """One step of a zone; infinite is the time of one that has ended."""
    try:
        time = next(zones[place])
        assert time >= times[place], f"a zone cannot go back from {times[place]} to {time}"
        times[place] = time
    except StopIteration as end:
        times[place], results[place] = math.inf, end.value


def within(start: float, stop: float, steps: ZoneSteps[Result]) -> ZoneSteps[Result]:
    """The same steps as a part of another zone's, from its time `start` to `stop`."""
    try:
        while True:
            yield start + min(next(steps), 1.0) * (stop - start)
    except StopIteration as end:
        return end.value
