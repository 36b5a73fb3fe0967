"""Rings: strategies whose ranks hold chunks of each sequence and read other ranks' chunks in
rounds.

In a *round* every worker has a call with one *partner*, the rank at a fixed distance before it,
modulo the degree. The round defines the call for a partner with earlier tokens than the worker,
and for one with later tokens. So a new ring is a function from a degree to its rounds, with the
traffic and the pace of its busiest rank: a `Ring`, registered in `registry.RINGS`. One is the
core's:

    zigzag     A rank holds two chunks, one from each half of the sequence, and computes for its
               own queries only. This choice of chunks gives all ranks equal work.

`plan/attention_schedule.py` derives the calls from the rounds.

Rejected: passing keys and values from rank to rank around the ring. A chunk is fetched directly
from its owner, and only if a query of the worker reads it. That moves a quarter less than the ring
of the same name.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_flexseq.base.registry import RINGS, object_of

FRONT, BACK = 0, 1  # positions of a rank's two chunks in its row
RING_PASSES = 3  # trips of keys and values: forward and backward, and their gradients


class Role(NamedTuple):
    """Work of a worker in a round, on the chunks of its partner and its own."""

    helps: bool
    """True: the worker computes for the partner's queries, with its own keys.
    False: it computes for its own queries, with the partner's keys."""
    queries: tuple[int, ...]
    """Positions of the queries among the reader's chunks."""
    keys: tuple[int, ...]
    """Positions of the keys among the source's chunks."""


class Round(NamedTuple):
    """Work of all workers at one time."""

    distance: int
    """Distance to the partner before a worker, modulo the degree; 0 is a causal call."""
    earlier: Role | None
    """Role if the partner holds earlier tokens; None for no call."""
    later: Role | None
    """Role if the partner wraps around and holds later tokens; None for no call."""


class Ring(NamedTuple):
    """A ring strategy."""

    chunks_per_rank: int
    """Chunks of a sequence that a rank holds: one, or a front and a back one."""
    rounds: Callable[[int], Sequence[Round]]
    """degree -> the rounds after the first, in which every rank attends to its own chunks."""
    trips: Callable[[int], float]
    """degree -> trips of keys and values per token that the busiest rank holds, forward and
    backward."""
    stretch: Callable[[int], float] = lambda degree: 1.0
    """degree -> seconds of the busiest rank's attention over an even split's."""


def zigzag_rounds(degree: int) -> list[Round]:
    """Return the rounds after the first in which each rank reads from all others.

    A rank of index i holds chunks i and 2d-1-i. A source before it has one chunk that all of its
    queries follow. A source after it has two chunks that only its back queries follow. Either way
    the call is half a square of work, for every rank at every time.
    """
    earlier = Role(helps=False, queries=(FRONT, BACK), keys=(FRONT,))
    later = Role(helps=False, queries=(BACK,), keys=(FRONT, BACK))
    return [Round(distance, earlier, later) for distance in range(1, degree)]


def zigzag_trips(degree: int) -> float:
    """Return the trips of keys and values, which come from every other rank."""
    return RING_PASSES * (degree - 1)


ZIGZAG = Ring(chunks_per_rank=2, rounds=zigzag_rounds, trips=zigzag_trips)


@functools.cache
def ring_named(strategy: str) -> Ring:
    """Return the ring of a strategy in `registry.RINGS`."""
    ring: Ring = object_of(RINGS[strategy])
    return ring


@functools.cache
def chunks_per_rank(strategy: str) -> int:
    """Return the chunks per sequence of a rank, 0 for none; a hybrid has as many as a zigzag."""
    if strategy == "hybrid":
        return ZIGZAG.chunks_per_rank
    return ring_named(strategy).chunks_per_rank if strategy in RINGS else 0


@functools.lru_cache(maxsize=64)
def ring_rounds(strategy: str, degree: int, *, chunk_by_chunk: bool) -> tuple[Round, ...]:
    """Return the rounds of a ring strategy over `degree` ranks, by time.

    At time 0 every rank attends to its own chunks. chunk_by_chunk: split every later round into
    one per chunk of a rank, with one key chunk each; a worker with fewer key chunks idles.
    """
    ring = ring_named(strategy)
    all_chunks = tuple(range(ring.chunks_per_rank))
    rounds = [Round(0, Role(helps=False, queries=all_chunks, keys=all_chunks), None)]
    for whole in ring.rounds(degree):
        if not chunk_by_chunk:
            rounds.append(whole)
            continue
        for position in all_chunks:
            earlier = _with_one_key_chunk(whole.earlier, position)
            later = _with_one_key_chunk(whole.later, position)
            rounds.append(Round(whole.distance, earlier, later))
    return tuple(rounds)


def _with_one_key_chunk(role: Role | None, position: int) -> Role | None:
    """Return the role with only its key chunk at `position`, or None if it has fewer."""
    if role is None or position >= len(role.keys):
        return None
    return role._replace(keys=(role.keys[position],))
