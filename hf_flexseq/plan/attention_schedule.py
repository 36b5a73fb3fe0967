"""Attention over a group as a list of blocks: which rank computes what, when, from whom.

In a group every rank holds some *chunks* of each sequence: their queries, keys and values.
A `BlockCall` is one attention call. Three ranks take part:

    worker    computes the call
    reader    holds the queries of the call
    source    holds the keys and values of the call

The messages follow from these three. Keys and values travel to a worker that is not their source.
Queries travel to a worker that is not their reader (a *helper*), and the partial result travels
back. The compiler in `program/ring.py` uses nothing else.

The calls follow from the rounds of a strategy (`plan/rings.py`):

    calls_of_rank         the calls of one rank, in time linear in the degree
    attention_schedule    the calls of all ranks, in quadratic time: for checks and pictures

`check` below is the reference test of a schedule. `tests/plan/test_attention_schedule.py`
runs it on every strategy, and compares the calls of each rank with the whole schedule.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

    @property
    def work(self) -> int:
        """Return the work of the call, in half squares of a chunk by a chunk."""
        halves_per_square = 1 if self.causal else 2
        return len(self.queries) * len(self.keys) * halves_per_square

    def __str__(self) -> str:
        """Return the call as text, e.g. `1: q1+2 x kv0 of 0`."""
        queries = self._chunks_as_text(self.queries, self.reader)
        keys = self._chunks_as_text(self.keys, self.source)
        kind = "causal kv" if self.causal else "kv"
        return f"{self.worker}: q{queries} x {kind}{keys}"

    def _chunks_as_text(self, chunks: tuple[int, ...], holder: int) -> str:
        text = "+".join(map(str, chunks))
        if holder != self.worker:
            text += f" of {holder}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The attention of one sequence over a group."""

    chunks: tuple[tuple[int, ...], ...]
    """Chunks of each rank of the group, by rank index."""

    calls: tuple[BlockCall, ...]
    """All calls, sorted by time and then by worker; a worker may idle at a time."""

    @property
    def degree(self) -> int:
        return len(self.chunks)

    @property
    def times(self) -> int:
        return 1 + max(call.time for call in self.calls)

    def __str__(self) -> str:
        """Return one line of text per time, with the calls of all ranks side by side."""
        lines = []
        for time in range(self.times):
            calls = [str(call) for call in self.calls if call.time == time]
            lines.append(f"{time} | " + " | ".join(calls))
        return "\n".join(lines)


# ---- the calls


@functools.lru_cache(maxsize=32)
def calls_of_rank(
    strategy: str, degree: int, index: int, *, mirrored: bool = False, chunk_by_chunk: bool = False
) -> tuple[tuple[BlockCall, ...], ...]:
    """Return, by time, the calls of `attention_schedule` in which the rank takes part."""
    calls = _RingCalls(strategy, degree, mirrored)
    place = calls.place(index)
    by_time = []
    for time, one_round in enumerate(ring_rounds(strategy, degree, chunk_by_chunk=chunk_by_chunk)):
        # the rank's own call, and the call of the worker whose partner it is
        places = {place, (place + one_round.distance) % degree}
        found = [calls.of_worker(time, one_round, worker) for worker in places]
        by_time.append(tuple(sorted(call for call in found if call is not None)))
    return tuple(by_time)


@functools.lru_cache(maxsize=64)
def attention_schedule(
    strategy: str, degree: int, mirrored: bool = False, *, chunk_by_chunk: bool = False
) -> Schedule:
    """Return the schedule of a ring strategy over `degree` ranks.

    mirrored: True if the last rank holds the first chunk. chunk_by_chunk: True if a call reads one
    chunk of another rank's keys at a time.
    """
    calls = _RingCalls(strategy, degree, mirrored)
    of_all = []
    for time, one_round in enumerate(ring_rounds(strategy, degree, chunk_by_chunk=chunk_by_chunk)):
        for index in range(degree):
            call = calls.of_worker(time, one_round, calls.place(index))
            if call is not None:
                of_all.append(call)
    chunks = tuple(calls.chunks(calls.place(index)) for index in range(degree))
    return Schedule(chunks=chunks, calls=tuple(of_all))


class _RingCalls:
    """Makes the calls of a ring from rounds, which count *places*: the ranks in token order."""

    def __init__(self, strategy: str, degree: int, mirrored: bool) -> None:
        self._strategy = strategy
        self._degree = degree
        self._mirrored = mirrored

    def place(self, index: int) -> int:
        """Return the place of the rank of `index`, or the index of the rank at a place."""
        return self._degree - 1 - index if self._mirrored else index

    def chunks(self, place: int) -> tuple[int, ...]:
        """Return the chunks that the rank at a place holds."""
        return held_chunks(self._strategy, place, self._degree)

    def of_worker(self, time: int, one_round: Round, worker: int) -> BlockCall | None:
        """Return the call of the worker at a place in the round of `time`, or None."""
        partner = worker - one_round.distance
        role = one_round.earlier
        if partner < 0:
            partner += self._degree
            role = one_round.later
        if role is None:
            return None
        reader = partner if role.helps else worker
        source = worker if role.helps else partner
        reader_chunks = self.chunks(reader)
        source_chunks = self.chunks(source)
        return BlockCall(
            time=time,
            worker=self.place(worker),
            reader=self.place(reader),
            source=self.place(source),
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

    def schedule(self, strategy: str, degree: int) -> Schedule:
        return attention_schedule(
            strategy, degree, self.mirrored, chunk_by_chunk=self.chunk_by_chunk
        )


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


# ---- checks


def check(schedule: Schedule) -> None:
    """Raise ValueError, naming the place, unless `schedule` computes causal attention exactly
    once.

    1. Readers and sources hold the chunks of their calls.
    2. No worker has two calls at one time.
    3. Every block of queries and keys that are not later is computed exactly once.
    """
    # 1. chunks are on their ranks
    chunks = schedule.chunks
    for call in schedule.calls:
        reader_holds = set(call.queries) <= set(chunks[call.reader])
        source_holds = set(call.keys) <= set(chunks[call.source])
        if not (reader_holds and source_holds):
            raise ValueError(
                f"time {call.time}, {call}: some of these chunks are held by another rank"
            )
        if call.causal and call.queries != call.keys:
            raise ValueError(f"time {call.time}, {call}: a causal call reads its own chunks")

    # 2. one call per worker and time
    counts = Counter((call.time, call.worker) for call in schedule.calls)
    if counts and max(counts.values()) > 1:
        time, worker = max(counts, key=counts.__getitem__)
        raise ValueError(f"time {time}: rank {worker} has {counts[time, worker]} calls")

    # 3. the blocks of the causal triangle, each once
    computed: Counter[tuple[int, int, bool]] = Counter()
    for call in schedule.calls:
        computed.update(_blocks(call))
    wanted: Counter[tuple[int, int, bool]] = Counter()
    for query in range(sum(map(len, chunks))):
        for key in range(query + 1):
            wanted[query, key, query == key] += 1
    if computed != wanted:
        missing = sorted(wanted - computed)
        extra = sorted(computed - wanted)
        raise ValueError(f"blocks (query, key, causal) missing {missing}, extra {extra}")


def _blocks(call: BlockCall) -> Iterator[tuple[int, int, bool]]:
    """Yield (query chunk, key chunk, causal) of every square that a call computes.

    A causal call computes only a triangle of its diagonal squares.
    """
    for index, query in enumerate(call.queries):
        keys = call.keys[: index + 1] if call.causal else call.keys
        for key in keys:
            yield query, key, call.causal and query == key
