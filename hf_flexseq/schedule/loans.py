"""How many tokens all ranks of a ring lend to each other, turn by turn: what decides how they
travel.

A rank's own part in them is in `attention/turns.py`. There as here the sequences of a group that
lie the same way round go through the schedule together, and those of both kinds take turns.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hf_flexseq.plan import Group
from hf_flexseq.plan.shard import Cut, cuts
from hf_flexseq.schedule.attention import BlockCall, in_turns, lanes_of


class Loan(NamedTuple):
    """Tokens whose queries, or whose keys and values, the rank of index `holder` lends to that of
    index `worker`."""

    holder: int
    worker: int
    queries: int
    keys: int


def group_loans(group: Group, lengths: Sequence[int]) -> tuple[tuple[Loan, ...], ...]:
    """Of a `zigzag` or `balanced` group. lengths: of its sequences."""
    return make_loans(
        group.strategy, cuts(group.strategy, tuple(lengths), group.degree), group.degree
    )


@functools.lru_cache(maxsize=64)
def make_loans(
    strategy: str, group_cuts: tuple[Cut, ...], degree: int
) -> tuple[tuple[Loan, ...], ...]:
    """By turn, the same turns that every rank of the group takes."""
    by_lane = []
    for lane in lanes_of(group_cuts):
        schedule, of_lane = (
            lane.schedule(strategy, degree),
            [group_cuts[place] for place in lane.places],
        )
        by_time: list[list[Loan]] = [[] for _ in range(schedule.times)]
        for step in schedule.steps:
            by_time[step.time] += _loans(step, of_lane)
        by_lane.append([tuple(loans) for loans in by_time])
    return tuple(in_turns(by_lane))


def _loans(step: BlockCall, of_lane: Sequence[Cut]) -> Iterator[Loan]:
    """Of one step; sequences of which it has no query or no key are left out of it."""
    tokens = [(cut.tokens(step.queries), cut.tokens(step.keys)) for cut in of_lane]
    queries, keys = (sum(pair[which] for pair in tokens if all(pair)) for which in (0, 1))
    if queries and step.reader != step.worker:
        yield Loan(step.reader, step.worker, queries, 0)
    if keys and step.source != step.worker:
        yield Loan(step.source, step.worker, 0, keys)
