"""How many bytes travel between which ranks, in the exchanges that may be routed.

There are two kinds of these exchanges:

    ring        The fetches of all ranks of a group, turn by turn: queries, or keys and values,
                that a worker fetches from their holder, and the results that go back. The part of
                one rank in them is in `program/turns.py`. There as here the sequences of a group
                that lie the same way round go through the schedule together, and the two kinds of
                sequences take turns.
    remapping   Rows that move between the layout of attention and the even one (`plan/remap.py`).

All of this is a function of the plan, so all ranks agree on it. `routing.py` decides what to do.

The fetches of a ring are listed one by one, in time that grows with the square of the degree.
`ring_tokens.py` has the same as arrays, with which `ring_routing.py` finds the routing of a ring.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hf_flexseq.plan import Group
from hf_flexseq.plan.remap import Move
from hf_flexseq.plan.shard import Cut, cuts
from hf_flexseq.schedule.attention import BlockCall, in_turns, lanes_of
from hf_flexseq.schedule.routing import Transfer

RowBytes = tuple[int, ...]  # bytes of one row of each tensor of a message
ALIGNMENT = 16  # bytes; a multiple of the size of every element type


class Fetch(NamedTuple):
    """Tokens whose queries, or whose keys and values, one rank fetches from another for a call."""

    holder: int
    """Index in the group of the rank that has the rows."""

    worker: int
    """Index in the group of the rank that computes with them."""

    queries: int
    """Tokens whose queries travel; 0 where keys and values do."""

    keys: int
    """Tokens whose keys and values travel; 0 where queries do."""


def group_fetches(group: Group, lengths: Sequence[int]) -> tuple[tuple[Fetch, ...], ...]:
    """Return the fetches of a `zigzag` or `balanced` group, by turn.

    lengths: tokens of each sequence of the group.
    """
    group_cuts = cuts(group.strategy, tuple(lengths), group.degree)
    return ring_fetches(group.strategy, group_cuts, group.degree)


@functools.lru_cache(maxsize=64)
def ring_fetches(
    strategy: str, group_cuts: tuple[Cut, ...], degree: int
) -> tuple[tuple[Fetch, ...], ...]:
    """Return the fetches of a ring by turn, the same turns that every rank of the group takes.

    group_cuts: the cut of every sequence of the group.
    """
    by_lane = []
    for lane in lanes_of(group_cuts):
        schedule = lane.schedule(strategy, degree)
        lane_cuts = [group_cuts[sequence] for sequence in lane.sequences]
        by_time: list[list[Fetch]] = [[] for _ in range(schedule.times)]
        for call in schedule.calls:
            by_time[call.time] += _fetches(call, lane_cuts)
        by_lane.append([tuple(fetches) for fetches in by_time])
    return tuple(in_turns(by_lane))


def _fetches(call: BlockCall, lane_cuts: Sequence[Cut]) -> Iterator[Fetch]:
    """Yield the fetches of one call.

    Sequences of which the call has no query or no key are left out of the call.
    """
    queries = 0
    keys = 0
    for cut in lane_cuts:
        sequence_queries = cut.tokens(call.queries)
        sequence_keys = cut.tokens(call.keys)
        if sequence_queries and sequence_keys:
            queries += sequence_queries
            keys += sequence_keys
    if queries and call.reader != call.worker:
        yield Fetch(call.reader, call.worker, queries, 0)
    if keys and call.source != call.worker:
        yield Fetch(call.source, call.worker, 0, keys)


def fetch_transfers(
    fetches: Sequence[Fetch],
    first_rank: int,
    query_bytes: RowBytes,
    key_bytes: RowBytes,
    *,
    returns: bool,
) -> tuple[Transfer, ...]:
    """Return the transfers of these fetches, or with `returns` those of their results going back.

    first_rank: global rank of index 0 of the group.
    query_bytes, key_bytes: bytes of a row of each tensor that travels for queries, and for keys.
    """
    transfers = []
    for fetch in fetches:
        source, target = fetch.holder, fetch.worker
        if returns:
            source, target = target, source
        nbytes = 0
        for row_bytes in query_bytes:
            nbytes += aligned(fetch.queries * row_bytes)
        for row_bytes in key_bytes:
            nbytes += aligned(fetch.keys * row_bytes)
        transfers.append(Transfer(first_rank + source, first_rank + target, nbytes))
    return tuple(transfers)


def move_transfers(moves: Sequence[Move], row_bytes: int, *, back: bool) -> tuple[Transfer, ...]:
    """Return the transfers of the moves of a remapping, with rows of `row_bytes` bytes.

    back: the rows travel from the targets of the moves to their sources.
    """
    transfers = []
    for move in moves:
        nbytes = aligned(move.tokens * row_bytes)
        if back:
            transfers.append(Transfer(move.target, move.source, nbytes))
        else:
            transfers.append(Transfer(move.source, move.target, nbytes))
    return tuple(transfers)


def aligned(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a message that is one buffer of several tensors.

    They are rounded up to `ALIGNMENT`, so that a tensor of any type may follow.
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
