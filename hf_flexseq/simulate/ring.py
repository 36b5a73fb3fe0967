"""One ring attention of one group, step by step, for all of its ranks at once.

The steps come from `schedule/attention.py`, for sequences whose first chunk the first rank holds
(mirrored sequences take the same time). The rules:

1. A rank asks for what step t + 1 reads when its step t begins.
2. The transfer departs as soon as both its sender and its receiver have begun step t.
3. Step t + 1 begins when step t has ended and the transfer has arrived.
4. What a step computes for another rank's queries or keys travels back while later steps compute.
   With contention such a result shares the rank's link with what is fetched meanwhile, and each of
   the two takes as long as both together.

Arrays are [steps, degree] throughout: one row per step of the schedule, one column per rank of the
group. Times are whole nanoseconds. A ring of two ranks by hand stands in
`tests/simulate/test_run.py` (`test_ring_steps_by_hand`).
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import CostModel, Int64Array
from hf_flexseq.plan import Group
from hf_flexseq.schedule.attention import attention_schedule
from hf_flexseq.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Trips:
    """How often keys or queries of one step travel in one phase of a layer.

    A trip of queries is anything as wide as the queries: the queries themselves, their output or
    its gradient. A trip of keys is a pair of keys and values, or the pair of their gradients.
    """

    keys_out: int
    """Trips of keys and values to the rank that computes."""
    keys_back: int
    """Trips of their gradients home, while later steps compute."""
    queries_out: int
    """Trips as wide as the queries to the rank that computes in their owner's place."""
    queries_back: int
    """Trips of what that rank computed home, while later steps compute."""


TRIPS = {
    # Keys come, or queries come and their output returns.
    "forward": Trips(keys_out=1, keys_back=0, queries_out=1, queries_back=1),
    # Keys come and their gradients return; or q, out and dout come and dq returns.
    "backward": Trips(keys_out=1, keys_back=1, queries_out=3, queries_back=1),
    # A micro-batch in one piece: keys and their gradients make all three trips as if each were
    # fetched; of the six trips as wide as queries, the two home travel the other way meanwhile.
    "both": Trips(keys_out=3, keys_back=0, queries_out=4, queries_back=0),
}


@dataclass(frozen=True, slots=True, eq=False)
class RingSteps:
    """A schedule as arrays of [steps, degree]."""

    work: Int64Array
    """What a rank computes, in halves of a square of one chunk by one chunk."""
    keys: NDArray[np.float64]
    """Share of the sequence's keys that the rank reads from another rank."""
    queries: NDArray[np.float64]
    """Share of the sequence's queries that the rank reads from another rank."""
    source: Int64Array
    """Index of the rank that these keys or queries come from; the rank's own where none come."""


@dataclass(frozen=True, slots=True, eq=False)
class RingTraffic:
    """Nanoseconds that transfers take alone on their link, [steps, degree]."""

    fetch: Int64Array
    """Fetching what the step reads."""
    back: Int64Array
    """Returning what the step computed for another rank."""


@dataclass(frozen=True, slots=True, eq=False)
class RingTimes:
    """When things happen in one ring attention, nanoseconds on the clock of the step."""

    begin: Int64Array
    """[steps, degree] The attention of the step begins."""
    end: Int64Array
    """[steps, degree] The attention of the step ends."""
    depart: Int64Array
    """[steps, degree] What the step reads departs from its source; nothing does at step 0."""
    arrive: Int64Array
    """[steps, degree] What the step reads has arrived."""
    stop: Int64Array
    """[degree] The rank has everything, results of other ranks for it included."""


# More schedules than a plan has: two strategies of every degree that a large cluster offers. That
# of 1,024 ranks takes 32 MB.
@functools.lru_cache(maxsize=32)
def ring_steps(strategy: str, degree: int) -> RingSteps:
    """Return the schedule of `strategy` over `degree` ranks as arrays of [steps, degree]."""
    schedule = attention_schedule(strategy, degree)
    chunks = sum(len(of_rank) for of_rank in schedule.chunks)
    shape = (schedule.times, degree)
    work = np.zeros(shape, dtype=np.int64)
    keys = np.zeros(shape)
    queries = np.zeros(shape)
    source = np.tile(np.arange(degree), (schedule.times, 1))
    for call in schedule.calls:
        at = (call.time, call.worker)
        work[at] = call.work
        if call.source != call.worker:
            keys[at] = len(call.keys) / chunks
            source[at] = call.source
        if call.reader != call.worker:
            queries[at] = len(call.queries) / chunks
            source[at] = call.reader
    return RingSteps(work=work, keys=keys, queries=queries, source=source)


def ring_traffic_ns(
    group: Group,
    trip_bytes: tuple[float, float],
    topology: Topology,
    cost: CostModel,
    *,
    phase: str,
) -> RingTraffic:
    """Return how long each step's transfers take, on the link between the two ranks.

    trip_bytes: bytes of all keys and values, and of all queries, of the group's sequences on one
    trip.
    phase: a key of `TRIPS`.
    """
    steps = ring_steps(group.strategy, group.degree)
    trips = TRIPS[phase]

    # 1. bytes of one trip, [steps, degree]
    key_bytes = steps.keys * trip_bytes[0]
    query_bytes = steps.queries * trip_bytes[1]

    # 2. bytes/s of the link that the trip takes, [steps, degree]
    crosses = crosses_nodes(group, topology)
    within = cost.bandwidth(min(group.degree, topology.ranks_per_node), False)
    between = cost.bandwidth(group.degree, True) if crosses.any() else within
    speed = np.where(crosses, between, within)

    # 3. whole nanoseconds, [steps, degree]
    fetch_s = (trips.keys_out * key_bytes + trips.queries_out * query_bytes) / speed
    back_s = (trips.keys_back * key_bytes + trips.queries_back * query_bytes) / speed
    return RingTraffic(
        fetch=np.rint(fetch_s * 1e9).astype(np.int64),
        back=np.rint(back_s * 1e9).astype(np.int64),
    )


def crosses_nodes(group: Group, topology: Topology) -> NDArray[np.bool_]:
    """Return whether each rank reads from another node at each step, [steps, degree]."""
    rank2node = np.arange(group.start, group.stop) // topology.ranks_per_node  # [degree]
    source = ring_steps(group.strategy, group.degree).source  # [steps, degree]
    return np.not_equal(rank2node[source], rank2node)


def ring_times(
    ready: Int64Array,
    attention_ns: int,
    steps: RingSteps,
    traffic: RingTraffic,
    *,
    overlap: float,
    contention: bool,
) -> RingTimes:
    """Return when every step of one ring attention begins and ends on every rank.

    ready: [degree] when each rank is free.
    attention_ns: nanoseconds that a rank computes, averaged over the group.
    overlap: share of a transfer that needs none of the rank's own time.
    contention: whether a fetch and a result that comes back at the same time share the link.
    """
    count, degree = steps.work.shape
    computing = _computing_ns(steps.work, attention_ns)  # [steps, degree]

    # A transfer has a part that travels by itself and a part that takes the rank's own time.
    fetch = np.rint(overlap * traffic.fetch).astype(np.int64)
    back = np.rint(overlap * traffic.back).astype(np.int64)
    by_the_rank = (traffic.fetch - fetch) + (traffic.back - back)

    begin = np.zeros((count, degree), dtype=np.int64)
    end = np.zeros((count, degree), dtype=np.int64)
    depart = np.zeros((count, degree), dtype=np.int64)
    arrive = np.zeros((count, degree), dtype=np.int64)
    index = np.arange(degree)

    # Step 0 reads nothing from other ranks.
    begin[0] = ready
    end[0] = ready + computing[0]
    for t in range(1, count):
        # 1. the fetch departs when sender and receiver have begun the step before
        depart[t] = np.maximum(begin[t - 1], begin[t - 1][steps.source[t]])
        if overlap <= 0:
            depart[t] = np.maximum(depart[t], end[t - 1])

        # 2. meanwhile comes back what the rank t - 2 after this one computed for it at step t - 2
        if t > 2:
            coming_back = back[t - 2][(index + t - 2) % degree]
        else:
            coming_back = np.zeros_like(ready)

        # 3. the fetch arrives
        if contention:
            arrive[t] = depart[t] + fetch[t] + coming_back
        else:
            arrive[t] = depart[t] + np.maximum(fetch[t], coming_back)

        # 4. the step runs
        begin[t] = np.maximum(end[t - 1], arrive[t]) + by_the_rank[t]
        end[t] = begin[t] + computing[t]

    return RingTimes(
        begin=begin, end=end, depart=depart, arrive=arrive, stop=_all_results_home(end, back)
    )


def _computing_ns(work: Int64Array, attention_ns: int) -> Int64Array:
    """Return the nanoseconds of attention of each step, [steps, degree], by its share of `work`.

    A rank's steps are cut out of one running total, so that rounding never adds up.
    """
    degree = work.shape[1]
    done = np.cumsum(work, axis=0) * degree  # [steps, degree]
    computing: Int64Array = np.diff(done * attention_ns // int(work.sum()), axis=0, prepend=0)
    return computing


def _all_results_home(end: Int64Array, back: Int64Array) -> Int64Array:
    """Return when each rank has the results that other ranks computed for it, [degree].

    Results of the last two steps are still on their way when the last step ends; earlier ones have
    come during it.
    """
    count, degree = end.shape
    index = np.arange(degree)
    stop: Int64Array = end[-1]
    for t in range(max(1, count - 2), count):
        worker = (index + t) % degree  # the rank that computed for this one at step t
        both_done = np.maximum(end[t], end[t][worker])
        home = both_done + back[t][worker]
        stop = np.maximum(stop, np.where(back[t][worker] > 0, home, 0))
    return stop
