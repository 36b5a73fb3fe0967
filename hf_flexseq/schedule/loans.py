"""How many tokens all ranks of a ring lend to each other, turn by turn: what decides how they travel.

A rank's own part in them is in `attention/turns.py`. There as here the sequences of a group that lie the same way
round go through the schedule together, and those of both kinds take turns.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hf_flexseq.plan import Group
from hf_flexseq.schedule.attention import Step, attention_schedule
from hf_flexseq.schedule.routing import Links, Routing, Transfer, make_routing
from hf_flexseq.shard import Cut, cuts


class Loan(NamedTuple):
    """Tokens whose queries, or whose keys and values, the rank of index `holder` lends to that of index `worker`."""

    holder: int
    worker: int
    queries: int
    keys: int


def group_loans(group: Group, lengths: Sequence[int]) -> tuple[tuple[Loan, ...], ...]:
    """Of a `zigzag` or `balanced` group. lengths: of its sequences."""
    return make_loans(group.strategy, cuts(group.strategy, tuple(lengths), group.degree), group.degree)


@functools.lru_cache(maxsize=64)
def make_loans(strategy: str, group_cuts: tuple[Cut, ...], degree: int) -> tuple[tuple[Loan, ...], ...]:
    """By turn, the same turns that every rank of the group takes."""
    lanes = []
    for flipped in (False, True):
        of_lane = [cut for cut in group_cuts if cut.mirrored == flipped]
        if of_lane:
            schedule = attention_schedule(strategy, degree, flipped)
            by_time: list[list[Loan]] = [[] for _ in range(schedule.times)]
            for step in schedule.steps:
                by_time[step.time] += _loans(step, of_lane)
            lanes.append(map(tuple, by_time))
    return tuple(turn for together in zip(*lanes, strict=True) for turn in together)


def _loans(step: Step, of_lane: Sequence[Cut]) -> Iterator[Loan]:
    """Of one step; sequences of which it has no query or no key are left out of it."""
    tokens = [(cut.tokens(step.queries), cut.tokens(step.keys)) for cut in of_lane]
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


def routing_reason(
    groups: Iterable[Group], lengths: Sequence[int], links: Links | None, *, query_bytes: int, key_bytes: int
) -> str:
    """One line for people: what is routed in the forward of a layer of these groups, and why the rest is not.

    lengths: of the plan's sequences. query_bytes, key_bytes: of a token's queries, and of its keys and values.
    """
    if links is None:
        return "routing off: all ranks are on one node"
    if (objection := links.objection()) is not None:
        return f"routing off: {objection}"
    found = [
        make_routing(loan_transfers(turn, group.start, (query_bytes,), (key_bytes,), returns=False), links)
        for group in groups
        if group.strategy in ("zigzag", "balanced")
        for turn in group_loans(group, [lengths[i] for i in group.sequences])
    ]
    return _summary([routing for routing in found if routing.direct_s])


def _summary(crossing: Sequence[Routing]) -> str:
    if not crossing:
        return "routing nothing: no ring crosses nodes"
    routed = [routing for routing in crossing if routing.paths]
    straight_s = sum(routing.direct_s for routing in crossing)
    now_s = sum(routing.routed_s if routing.paths else routing.direct_s for routing in crossing)
    why_not = Counter(routing.why_not for routing in crossing if routing.why_not)
    steps = f"routing {len(routed)} of the {len(crossing)} ring steps that cross nodes"
    gain = f"they take {now_s * 1e3:.2f} ms instead of {straight_s * 1e3:.2f} ms in the forward of a layer"
    return "; ".join([f"{steps}: {gain}", *(f"{reason} in {count}" for reason, count in why_not.items())])
