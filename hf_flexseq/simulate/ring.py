"""One ring attention of one group, step by step, for all of its ranks at once.

Steps come from `schedule/attention.py`. Keys and values of step t + 1 are asked for when step t begins; they travel
as soon as reader and owner have both begun it, and step t + 1 starts when they are there. In the backward the
gradients of step t's keys and values travel back while later steps compute; with contention they share the rank's
link with what is fetched meanwhile, and each transfer takes as long as both.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import CostModel, Int64Array
from hf_flexseq.plan import Group
from hf_flexseq.schedule.attention import zigzag
from hf_flexseq.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """A schedule, [step, index in the group]: half chunk squares computed, key chunks read, and from whom."""

    work: Int64Array
    keys: Int64Array
    source: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class RingTimes:
    """When [step, index in the group]: attention begins and ends, and keys and values travel (step 0: not at all).

    stop: when each rank has everything, returned gradients included.
    """

    begin: Int64Array
    end: Int64Array
    depart: Int64Array
    arrive: Int64Array
    stop: Int64Array


@functools.cache
def zigzag_steps(degree: int) -> Steps:
    ranks = [zigzag(index, degree) for index in range(degree)]

    def table(values: list[list[int]]) -> Int64Array:
        return np.array(values, dtype=np.int64).T.copy()

    return Steps(
        work=table([[len(s.queries) * len(s.keys) * (1 if s.causal else 2) for s in steps] for steps in ranks]),
        keys=table([[len(s.keys) for s in steps] for steps in ranks]),
        source=table([[s.source for s in steps] for steps in ranks]),
    )


def transfer_ns(group: Group, chunk_bytes: float, topology: Topology, cost: CostModel) -> Int64Array:
    """Nanoseconds that the keys and values of each [step, index] travel, on the link between reader and owner."""
    steps, index = zigzag_steps(group.degree), np.arange(group.degree)
    crosses = crosses_nodes(group, topology)
    within = cost.bandwidth(min(group.degree, topology.ranks_per_node), False)
    between = cost.bandwidth(group.degree, True) if crosses.any() else within
    seconds = steps.keys * chunk_bytes / np.where(crosses, between, within)
    return np.where(steps.source == index, 0, np.rint(seconds * 1e9)).astype(np.int64)


def crosses_nodes(group: Group, topology: Topology) -> NDArray[np.bool_]:
    """Whether the keys and values of [step, index] come from another node."""
    node = np.arange(group.start, group.stop) // topology.ranks_per_node
    return np.not_equal(node[zigzag_steps(group.degree).source], node)


def ring_times(
    ready: Int64Array, attention_ns: int, moving_ns: Int64Array, *, overlap: float, returns: bool, contention: bool
) -> RingTimes:
    """A ring whose rank of index i is free at ready[i] and computes `attention_ns` in all.

    moving_ns: see `transfer_ns`. overlap: share of a transfer that needs none of the rank's own time. returns: whether
    gradients travel back, as in the backward.
    """
    degree, index = len(ready), np.arange(len(ready))
    steps = zigzag_steps(degree)
    computing = np.diff(np.cumsum(steps.work, axis=0) * attention_ns // steps.work.sum(axis=0), axis=0, prepend=0)
    hidden = np.rint(overlap * moving_ns).astype(np.int64)
    own = (moving_ns - hidden) * (2 if returns else 1)  # the rank itself moves these bytes
    begin, end, depart, arrive = (np.zeros((degree, degree), dtype=np.int64) for _ in range(4))
    begin[0], end[0], home = ready, ready + computing[0], ready
    for t in range(1, degree):
        both = np.maximum(begin[t - 1], begin[t - 1][steps.source[t]])
        depart[t] = both if overlap > 0 else np.maximum(both, end[t - 1])
        # Meanwhile the gradients of step t - 2, lent to the rank t - 2 places on, come back.
        back = hidden[t - 2][(index + t - 2) % degree] if returns and t > 2 else np.zeros_like(ready)
        arrive[t] = depart[t] + (hidden[t] + back if contention else np.maximum(hidden[t], back))
        begin[t] = np.maximum(end[t - 1], arrive[t]) + own[t]
        end[t] = begin[t] + computing[t]
    if returns and degree > 1:
        reader = (index + degree - 1) % degree  # the last gradients to come home
        home = np.maximum(end[-1], end[-1][reader]) + hidden[-1][reader]
    return RingTimes(begin=begin, end=end, depart=depart, arrive=arrive, stop=np.maximum(end[-1], home))
