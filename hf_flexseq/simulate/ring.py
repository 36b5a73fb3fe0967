"""One ring attention of one group, step by step, for all of its ranks at once.

Steps come from `schedule/attention.py`, for sequences that lie the right way round (mirrored ones
take the same time). What step t + 1 reads is asked for when step t begins; it travels as soon as
both sides have begun it, and step t + 1 starts when it is there. What a step makes of another
rank's queries or keys travels back while later steps compute; with contention it shares the rank's
link with what is fetched meanwhile, and each transfer takes as long as both.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import CostModel, Int64Array
from hf_flexseq.plan import Group
from hf_flexseq.schedule.attention import attention_schedule
from hf_flexseq.topology import Topology

# How often a helper is sent something as wide as its queries, and sends it back; in one piece both
# ways together, and what goes the other way meanwhile is left out.
HELP_SENT, HELP_RETURNED = (
    {"forward": 1, "backward": 3, "both": 4},
    {"forward": 1, "backward": 1, "both": 0},
)
# Likewise keys and values.
KEYS_SENT, KEYS_RETURNED = (
    {"forward": 1, "backward": 1, "both": 3},
    {"forward": 0, "backward": 1, "both": 0},
)


@dataclass(frozen=True, slots=True, eq=False)
class RingSteps:
    """A schedule, [step, index in the group]: half chunk squares computed; the share of the
    sequence's keys and queries that are read from another rank; and from which, the rank itself
    where there is none."""

    work: Int64Array
    keys: NDArray[np.float64]
    queries: NDArray[np.float64]
    source: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class RingTraffic:
    """Nanoseconds that [step, index] takes to fetch what it reads, and to return what it made of
    it."""

    fetch: Int64Array
    back: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class RingTimes:
    """When [step, index in the group]: attention begins and ends, and what it reads travels (step
    0: not at all).

    stop: when each rank has everything, what others made of its queries and keys included.
    """

    begin: Int64Array
    end: Int64Array
    depart: Int64Array
    arrive: Int64Array
    stop: Int64Array


@functools.cache
def ring_steps(strategy: str, degree: int) -> RingSteps:
    schedule = attention_schedule(strategy, degree)
    shape, total = (schedule.times, degree), sum(map(len, schedule.chunks))
    work, keys, queries = np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape)
    source = np.tile(np.arange(degree), (schedule.times, 1))
    for step in schedule.steps:
        at = step.time, step.worker
        work[at] = step.work
        if step.source != step.worker:
            keys[at], source[at] = len(step.keys) / total, step.source
        if step.reader != step.worker:
            queries[at], source[at] = len(step.queries) / total, step.reader
    return RingSteps(work=work, keys=keys, queries=queries, source=source)


def moving_ns(
    group: Group,
    trip_bytes: tuple[float, float],
    topology: Topology,
    cost: CostModel,
    *,
    phase: str,
) -> RingTraffic:
    """How long the transfers of each [step, index] take, on the link between the two ranks.

    trip_bytes: of all keys and values, and of all queries, of the group's sequences, on one trip.
    phase: forward, backward or both, which takes all trips as if what travels back had been
    fetched.
    """
    steps, crosses = ring_steps(group.strategy, group.degree), crosses_nodes(group, topology)
    within = cost.bandwidth(min(group.degree, topology.ranks_per_node), False)
    between = cost.bandwidth(group.degree, True) if crosses.any() else within
    keys, queries = steps.keys * trip_bytes[0], steps.queries * trip_bytes[1]

    def ns(key_trips: int, query_trips: int) -> Int64Array:
        seconds = (key_trips * keys + query_trips * queries) / np.where(crosses, between, within)
        return np.rint(seconds * 1e9).astype(np.int64)

    return RingTraffic(
        fetch=ns(KEYS_SENT[phase], HELP_SENT[phase]),
        back=ns(KEYS_RETURNED[phase], HELP_RETURNED[phase]),
    )


def crosses_nodes(group: Group, topology: Topology) -> NDArray[np.bool_]:
    """Whether what [step, index] reads comes from another node."""
    node = np.arange(group.start, group.stop) // topology.ranks_per_node
    return np.not_equal(node[ring_steps(group.strategy, group.degree).source], node)


def ring_times(
    ready: Int64Array,
    attention_ns: int,
    steps: RingSteps,
    moving: RingTraffic,
    *,
    overlap: float,
    contention: bool,
) -> RingTimes:
    """A ring whose rank of index i is free at ready[i] and whose ranks compute `attention_ns` each
    on average.

    overlap: share of a transfer that needs none of the rank's own time.
    """
    times, degree = steps.work.shape
    index = np.arange(degree)
    total = int(steps.work.sum())
    upto = np.cumsum(steps.work, axis=0) * degree
    computing = np.diff(upto * attention_ns // total, axis=0, prepend=0)
    fetch, back = (np.rint(overlap * x).astype(np.int64) for x in (moving.fetch, moving.back))
    own = moving.fetch - fetch + moving.back - back  # the rank itself moves these bytes
    begin, end, depart, arrive = (np.zeros((times, degree), dtype=np.int64) for _ in range(4))
    begin[0], end[0] = ready, ready + computing[0]
    for t in range(1, times):
        both = np.maximum(begin[t - 1], begin[t - 1][steps.source[t]])
        depart[t] = both if overlap > 0 else np.maximum(both, end[t - 1])
        # Meanwhile comes back what the rank t - 2 places on made of this one's at step t - 2.
        coming = back[t - 2][(index + t - 2) % degree] if t > 2 else np.zeros_like(ready)
        arrive[t] = depart[t] + (fetch[t] + coming if contention else np.maximum(fetch[t], coming))
        begin[t] = np.maximum(end[t - 1], arrive[t]) + own[t]
        end[t] = begin[t] + computing[t]
    stop = end[-1]
    for t in range(max(1, times - 2), times):  # the last to come home
        reader = (index + t) % degree
        home = np.maximum(end[t], end[t][reader]) + back[t][reader]
        stop = np.maximum(stop, np.where(back[t][reader] > 0, home, 0))
    return RingTimes(begin=begin, end=end, depart=depart, arrive=arrive, stop=stop)
