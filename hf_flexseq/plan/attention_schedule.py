"""Attention over a group as a list of blocks: which rank computes what, when, from whom.

In a group every rank holds some *chunks* of each sequence: their queries, keys and values.
A `BlockCall` is one attention call. Three ranks take part:

    worker    computes the call
    reader    holds the queries of the call
    source    holds the keys and values of the call

The messages follow from these three. Keys and values travel to a worker that is not their source.
Queries travel to a worker that is not their reader (a *helper*), and the partial result travels
back. The compiler in `program/ring.py` uses nothing else.

The calls of a rank follow from the rounds of a strategy (`plan/rings.py`), in time linear in the
degree. `tests/attention/test_sequence_parallel.py` shows that the calls of all ranks together are
causal attention.
"""

import functools
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from hf_flexseq.plan.rings import Round, ring_rounds
from hf_flexseq.plan.shard import Cut, held_chunks

Item = TypeVar("Item")
ChunkKey = tuple[int, int]  # (index of the sequence in the group, chunk of that sequence)

# Tokens per chunk, summed over the sequences of a direction, from which every chunk has its own
# call and transfer. Larger chunks overlap better. Smaller ones would pay a message's latency, and
# on CUDA more launches than their attention hides (some 3 ms of it for 4,096 tokens).
LARGE = {"cpu": 1024, "cuda": 4096}


class BlockCall(NamedTuple):
    """Some queries against some keys of a sequence. A tuple: a rank may have thousands."""

    time: int
    """Position of the call in the worker's list; a worker has at most one call per time."""
    worker: int
    """Index in the group of the rank that computes the call."""
    reader: int
    """Index in the group of the rank that holds the queries."""
    source: int
    """Index in the group of the rank that holds the keys and values."""
    queries: tuple[int, ...]
    """Chunks of the queries, all of the reader, in the order of its rows."""
    keys: tuple[int, ...]
    """Chunks of the keys, all of the source, in the order of its rows."""
    causal: bool
    """True: each query reads keys up to its own. False: each query reads each key."""


# ---- the calls


@functools.lru_cache(maxsize=32)
def calls_of_rank(
    strategy: str, degree: int, index: int, *, mirrored: bool = False, chunk_by_chunk: bool = False
) -> tuple[tuple[BlockCall, ...], ...]:
    """Return, by time, the calls of a ring over `degree` ranks in which the rank takes part.

    mirrored: True if the last rank holds the first chunk. chunk_by_chunk: True if a call reads one
    chunk of another rank's keys at a time.
    """
    place = degree - 1 - index if mirrored else index
    by_time = []
    for time, one_round in enumerate(ring_rounds(strategy, degree, chunk_by_chunk=chunk_by_chunk)):
        # the rank's own call, and the call of the worker whose partner it is
        places = {place, (place + one_round.distance) % degree}
        found = [_call(time, one_round, one, strategy, degree, mirrored) for one in places]
        by_time.append(tuple(sorted(call for call in found if call is not None)))
    return tuple(by_time)


def _call(
    time: int, one_round: Round, worker: int, strategy: str, degree: int, mirrored: bool
) -> BlockCall | None:
    """Return a worker's call in the round of `time`, or None. Rounds count *places*: the ranks in
    token order. worker: its place."""
    partner = worker - one_round.distance
    role = one_round.earlier
    if partner < 0:
        partner += degree
        role = one_round.later
    if role is None:
        return None
    reader = partner if role.helps else worker
    source = worker if role.helps else partner
    reader_chunks = held_chunks(strategy, reader, degree)
    source_chunks = held_chunks(strategy, source, degree)
    if mirrored:  # from places to indices
        worker, reader, source = (degree - 1 - place for place in (worker, reader, source))
    return BlockCall(
        time=time,
        worker=worker,
        reader=reader,
        source=source,
        queries=tuple(reader_chunks[position] for position in role.queries),
        keys=tuple(source_chunks[position] for position in role.keys),
        causal=one_round.distance == 0,
    )


# ---- several sequences in one group


class Direction(NamedTuple):
    """Sequences of a group with the same order of chunks, which share every call."""

    mirrored: bool
    """True if the last rank holds the first chunk of these sequences."""
    sequences: tuple[int, ...]
    """Indices of these sequences in the group."""
    chunk_by_chunk: bool
    """True if each chunk of all sequences together is worth its own call and transfer. Then one
    chunk (or its gradient) travels while the call on the other one runs."""


def directions_of(group_cuts: Sequence[Cut], device: str = "cuda") -> list[Direction]:
    """Return the one or two directions of a group.

    group_cuts: cut of every sequence of the group. device: "cpu" or "cuda", which sets the size of
    a large chunk.
    """
    large = LARGE["cpu" if device == "cpu" else "cuda"]
    directions = []
    for mirrored in (False, True):
        sequences = []
        chunk_tokens = 0.0  # tokens of a mean chunk, summed over the sequences
        for sequence, cut in enumerate(group_cuts):
            if cut.mirrored == mirrored:
                sequences.append(sequence)
                chunks = len(cut.bounds) - 1
                chunk_tokens += cut.bounds[-1] / chunks
        if sequences:
            directions.append(Direction(mirrored, tuple(sequences), chunk_tokens >= large))
    return directions


def interleaved(by_direction: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the items of all directions in one list: all first items, then all second ones.

    by_direction: items of each direction, by time. All ranks number their exchanges in this order.
    """
    items = []
    for at_one_time in zip_longest(*by_direction):
        for item in at_one_time:
            if item is not None:  # a shorter direction has ended
                items.append(item)
    return items
