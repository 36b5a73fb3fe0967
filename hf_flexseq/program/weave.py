"""The zones of a rank in one attention call, woven together: one computes while another waits.

A rank may have a part in several groups of a micro-batch (its *zones*). The forward or backward of
a zone is a generator that emits instructions (`builder.py`). It posts the transfers that it can,
then yields the *time* at which it wants to go on and wait for them, and so on until it returns its
result. So the program has the instructions of all zones in the one order in which they run. Times
are fractions of the zone's own course: a zone posts its first transfers at 0, has done its work at
1, and waits at `END` for transfers that are still on their way to it.

1. Every zone posts its first transfers, widest zone first: the slowest link gets its work at once.
2. The zone whose time is next goes on; among equals the narrowest. So zones advance side by side,
   each in as many steps as it has. The local zone is cut into calls for this purpose and fills the
   waiting of the others.

    time     0                          1       END
    wide     post . wait, attend, post . ...... wait for results
    narrow   post . . wait, attend, post . .... wait for results
    local    attend . . . attend . . . attend

Why nothing can hang
--------------------
Times depend on the strategy and the group only, so all ranks of a group agree on them. Everything
that is posted on any rank in this call is therefore posted in one order: by time, then by zone,
and both ends of a message have the same place in it. Take the first transfer in this order that
never completes. All transfers before it complete, so both of its ranks post it, and nothing is
before it in their queues: it completes, which is a contradiction. This needs no tags, and holds
where all posts of a rank are carried out one after the other. The calls of a step and the
reduction of gradients belong to the same order (docs/architecture.md). Inside a zone the order
goes on: rings post by step (`ring.py`). `tests/attention/test_never_hangs.py` tries it with random
plans, also where a rank has one queue for all of its transfers.

Zeppelin (arXiv 2509.21841, section 4.1) runs inter-node, intra-node and local queues one after the
other. Here the order is finer but just as static. Rejected: going on with whatever has arrived,
since gloo cannot be asked.
"""

import math
from collections.abc import Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
ZoneSteps = Generator[float, None, Result]  # yields times, returns the result of the zone

END = 2.0  # time after all work of every zone
RETURNED = math.inf  # time of a zone that has returned its result


def run_zones(zones: Sequence[ZoneSteps[Result]]) -> list[Result]:
    """Return the results of the zones, in their order: widest first."""
    results: dict[int, Result] = {}  # by index of the zone
    times = [0.0] * len(zones)  # at which each zone goes on
    # 1. the first transfers of all zones
    for index in range(len(zones)):
        _advance(zones, index, times, results)
    # 2. the zone whose time is next
    while len(results) < len(zones):
        time = min(times)
        narrowest = max(index for index in range(len(zones)) if times[index] == time)
        _advance(zones, narrowest, times, results)
    return [results[index] for index in range(len(zones))]


def _advance(
    zones: Sequence[ZoneSteps[Result]],
    index: int,
    times: list[float],
    results: dict[int, Result],
) -> None:
    """Run one zone up to its next time, or up to its result; update `times` and `results`."""
    try:
        time = next(zones[index])
    except StopIteration as end:
        times[index] = RETURNED
        results[index] = end.value
        return
    assert time >= times[index], f"a zone cannot go back from {times[index]} to {time}"
    times[index] = time


def within(start: float, stop: float, steps: ZoneSteps[Result]) -> ZoneSteps[Result]:
    """Run `steps` as a part of another zone, whose times from `start` to `stop` it takes up.

    The inner zone's times from 0 to 1 are mapped to the outer zone's from `start` to `stop`; its
    `END` is `stop`. Returns the inner zone's result.
    """
    try:
        while True:
            inner_time = min(next(steps), 1.0)
            yield start + inner_time * (stop - start)
    except StopIteration as end:
        result: Result = end.value
        return result
