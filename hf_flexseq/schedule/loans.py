"""How many tokens all ranks of a ring lend to each other, turn by turn: what decides how they travel.

A rank's own part in them is in `attention/turns.py`. There as here the sequences of a group that lie the same way
round go through the schedule together, and those of both kinds take turns.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hf_flexseq.schedule.attention import Step, attention_schedule
from hf_flexseq.schedule.routing import Transfer
from hf_flexseq.shard import Cut


class Loan(NamedTuple):
    """Tokens whose queries, or whose keys and values, the rank of index `holder` lends to that of index `worker`."""

    holder: int
    worker: int
    queries: int
    keys: int


@functools.lru_cache(maxsize=64)
def make_loans(strategy: str, cuts: tuple[Cut, ...], degree: int) -> tuple[tuple[Loan, ...], ...]:
    """By turn, the same turns that every rank of the group takes."""
    lanes = []
    for flipped in (False, True):
        of_lane = [cut for cut in cuts if cut.mirrored == flipped]
        if of_lane:
            schedule = attention_schedule(strategy, degree, flipped)
            by_time: list[list[Loan]] = [[] for _ in range(schedule.times)]
            for step in schedule.steps:
                by_time[step.time] += _loans(step, of_lane)
            lanes.append(map(tuple, by_time))
    return tuple(turn for together in zip(*lanes, strict=True) for turn in together)


def _loans(step: Step, cuts: Sequence[Cut]) -> Iterator[Loan]:
    """Of one step; sequences of which it has no query or no key are left out of it."""
    tokens = [(cut.tokens(step.queries), cut.tokens(step.keys)) for cut in cuts]
    queries, keys = (sum(pair[which] for pair in tokens if all(pair)) for which in (0, 1))
    if queries and step.reader != step.worker:
        yield Loan(step.reader, step.worker, queries, 0)
    if keys and step.source != step.worker:
        yield Loan(step.source, step.worker, 0, keys)


RowBytes = tuple[int, ...]  # bytes of one row of each tensor of a message


def loan_transfers(
    loans: Sequence[Loan], first_rank: int, of_queries: RowBytes, of_keys: RowBytes, *, returns: bool
) -> tuple[Transfer, ...]:
    """What travels for these loans: the lent rows to the worker, or what it made of them back.

    first_rank: of the group. of_queries, of_keys: tensors that travel for queries, and for keys and values.
    """
    made = []
    for loan in loans:
        ends = (loan.worker, loan.holder) if returns else (loan.holder, loan.worker)
        source, target = (first_rank + index for index in ends)
        nbytes = sum(aligned(loan.queries * n) for n in of_queries) + sum(aligned(loan.keys * n) for n in of_keys)
        made.append(Transfer(source, target, nbytes))
    return tuple(made)


def aligned(nbytes: int) -> int:
    """The bytes that a tensor takes in a message that is one buffer: any type may follow it."""
    return -(-nbytes // 16) * 16
