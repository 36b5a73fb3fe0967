"""Attention over a group as a list of blocks: which rank computes what, when, from whom.

In a group every rank holds some *chunks* of each sequence: their queries, keys and values.
A `BlockCall` is one attention call. Three ranks have a part in it:

    worker    computes the call
    reader    holds the queries of the call
    source    holds the keys and values of the call

What travels follows from these three. Keys and values travel to a worker that is not their source.
Queries travel to a worker that is not their reader (the worker is then a *helper*), and the
partial result travels back from there. The executor in `attention/ring.py` knows nothing else, so
a new member of the ring family is a new function here. There are two:

    zigzag     A rank holds two chunks, one from each half of the sequence, and computes for its
               own queries only. This choice of chunks gives all ranks equal work.
    balanced   A rank holds one chunk, so late ranks have more keys to read than early ones. Ranks
               that have run out of keys before their own queries compute for the late ones.
               LightSeq (DistFlashAttn, arXiv 2310.03294, section 3.1).

`balanced` departs from the paper, which is right for even degrees only: as printed, and in the
code published with it, nobody helps at the last time, which loses (d - 1) / 2 blocks of an odd
degree d. With these blocks an odd degree has no idle rank at any time. An even degree idles for
half a block's time per rank and takes (d + 1) / d of the ideal time.

Rejected: handing keys and values on from rank to rank around the ring. A chunk is fetched straight
from its owner, and only when some query of the worker reads it: the zigzag schedule moves a
quarter less than the ring of the same name.

`check` below is the slow and obvious test of a schedule; `tests/schedule/test_attention.py` runs
it on every strategy.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from hf_flexseq.plan.shard import Cut, held_chunks

Item = TypeVar("Item")
ChunkKey = tuple[int, int]  # (index of the sequence in the group, chunk of that sequence)

# Tokens of a chunk, summed over the sequences of a lane, from which on every chunk has a call and
# a transfer of its own: larger chunks overlap better, smaller ones would pay a message's latency.
LARGE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCall:
    """An attention call: some queries against some keys of the same sequence."""

    time: int
    """Position of the call in the worker's list; a worker has at most one call per time."""

    worker: int
    """Index in the group of the rank that computes the call."""

    reader: int
    """Index in the group of the rank that holds the queries."""

    source: int
    """Index in the group of the rank that holds the keys and values."""

    queries: tuple[int, ...]
    """Chunks of the queries: some of the reader's chunks, in the order of the reader's rows."""

    keys: tuple[int, ...]
    """Chunks of the keys: some of the source's chunks, in the order of the source's rows."""

    causal: bool
    """True: queries and keys are the same chunks, and no query reads a later token.
    False: every query reads every key."""

    @property
    def work(self) -> int:
        """Return the work of the call, in halves of a square of one chunk by one chunk."""
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
    """The chunks that each rank of the group holds, by rank index."""

    calls: tuple[BlockCall, ...]
    """All calls, sorted by time and then by worker; a worker may have none at a time."""

    @property
    def degree(self) -> int:
        return len(self.chunks)

    @property
    def times(self) -> int:
        return 1 + max(call.time for call in self.calls)

    def critical_path(self) -> float:
        """Return how many times as long the schedule takes as a perfect split of its work.

        Chunks count as equally large. Every time lasts as long as its busiest rank works.
        """
        busiest = [0] * self.times
        for call in self.calls:
            busiest[call.time] = max(busiest[call.time], call.work)
        total = sum(call.work for call in self.calls)
        return sum(busiest) * self.degree / total

    def __str__(self) -> str:
        """Return one line of text per time, with the calls of all ranks side by side."""
        lines = []
        for time in range(self.times):
            calls = [str(call) for call in self.calls if call.time == time]
            lines.append(f"{time} | " + " | ".join(calls))
        return "\n".join(lines)


@functools.cache
def attention_schedule(
    strategy: str, degree: int, mirrored: bool = False, *, chunk_by_chunk: bool = False
) -> Schedule:
    """Return the schedule of a ring strategy over `degree` ranks.

    mirrored: build it for a sequence whose first chunk is held by the last rank.
    chunk_by_chunk: let a call read one chunk of another rank's keys at a time.
    """
    strategies = {"zigzag": zigzag, "balanced": balanced}
    schedule = strategies[strategy](degree)
    if chunk_by_chunk:
        schedule = _chunk_by_chunk(schedule)
    if mirrored:
        schedule = _mirror(schedule)
    return schedule


# ---- the strategies


def zigzag(degree: int) -> Schedule:
    """Return the schedule in which each rank reads, at time t, from the rank t indices before.

    A rank of index i holds chunks i and 2d-1-i. A source before it has one chunk that all of its
    queries follow. A source after it has two chunks that only its back queries follow. Either way
    the call is half a square of work, for every rank at every time.
    """
    chunks = tuple(held_chunks("zigzag", index, degree) for index in range(degree))
    calls = [_diagonal(index, chunks[index]) for index in range(degree)]
    for time in range(1, degree):
        for index in range(degree):
            source = (index - time) % degree
            if source < index:
                queries = chunks[index]
                keys = chunks[source][:1]
            else:
                queries = chunks[index][1:]
                keys = chunks[source]
            call = BlockCall(
                time=time,
                worker=index,
                reader=index,
                source=source,
                queries=queries,
                keys=keys,
                causal=False,
            )
            calls.append(call)
    return Schedule(chunks=chunks, calls=tuple(calls))


def balanced(degree: int) -> Schedule:
    """Return the schedule in which ranks without keys to read help ranks with many.

    At time t a rank reads the keys of the rank t indices before it. A rank that has none there
    helps the rank t indices before it, counted around the end, with its own keys. Half way round
    an even degree these would be blocks that are computed already, so nobody helps there.
    """
    chunks = tuple(held_chunks("balanced", index, degree) for index in range(degree))
    calls = [_diagonal(index, chunks[index]) for index in range(degree)]
    for time in range(1, degree // 2 + 1):
        half_way = 2 * time == degree
        for index in range(degree):
            helps = index < time
            if helps and half_way:
                continue
            reader = index - time + degree if helps else index
            source = index if helps else index - time
            call = BlockCall(
                time=time,
                worker=index,
                reader=reader,
                source=source,
                queries=chunks[reader],
                keys=chunks[source],
                causal=False,
            )
            calls.append(call)
    return Schedule(chunks=chunks, calls=tuple(calls))


def _diagonal(index: int, chunks: tuple[int, ...]) -> BlockCall:
    """Return the first call of a rank: its own chunks against themselves."""
    return BlockCall(
        time=0, worker=index, reader=index, source=index, queries=chunks, keys=chunks, causal=True
    )


# ---- changes of a whole schedule


def _chunk_by_chunk(schedule: Schedule) -> Schedule:
    """Return the schedule with one key chunk per call after time 0.

    Every later time becomes as many times as a rank holds chunks. A call with fewer key chunks
    leaves its worker idle in the rest of them.
    """
    most_chunks = max(map(len, schedule.chunks))
    calls = []
    for call in schedule.calls:
        if call.time == 0:
            calls.append(call)
            continue
        first = 1 + (call.time - 1) * most_chunks
        for offset, chunk in enumerate(call.keys):
            calls.append(replace(call, time=first + offset, keys=(chunk,)))
    return Schedule(chunks=schedule.chunks, calls=_sorted(calls))


def _mirror(schedule: Schedule) -> Schedule:
    """Return the schedule with the order of the ranks reversed."""
    last = schedule.degree - 1
    calls = []
    for call in schedule.calls:
        mirrored = replace(
            call,
            worker=last - call.worker,
            reader=last - call.reader,
            source=last - call.source,
        )
        calls.append(mirrored)
    return Schedule(chunks=schedule.chunks[::-1], calls=_sorted(calls))


def _sorted(calls: Sequence[BlockCall]) -> tuple[BlockCall, ...]:
    return tuple(sorted(calls, key=lambda call: (call.time, call.worker)))


# ---- several sequences in one group


class Lane(NamedTuple):
    """The sequences of a group that lie the same way round, and so share every call."""

    mirrored: bool
    """Whether the last rank holds the first chunk of these sequences."""

    sequences: tuple[int, ...]
    """Indices of these sequences in the group."""

    chunk_by_chunk: bool
    """Whether the chunks of all sequences together are worth a call and a transfer each.
    Then one chunk travels, or its gradient does, while the call on the other chunk runs."""

    def schedule(self, strategy: str, degree: int) -> Schedule:
        return attention_schedule(
            strategy, degree, self.mirrored, chunk_by_chunk=self.chunk_by_chunk
        )


def lanes_of(group_cuts: Sequence[Cut]) -> list[Lane]:
    """Return the lanes of a group: one, or two where its sequences lie both ways round.

    group_cuts: the cut of every sequence of the group.
    """
    lanes = []
    for mirrored in (False, True):
        sequences = []
        chunk_tokens = 0.0  # tokens of a mean chunk, summed over the sequences
        for sequence, cut in enumerate(group_cuts):
            if cut.mirrored == mirrored:
                sequences.append(sequence)
                chunks = len(cut.bounds) - 1
                chunk_tokens += cut.bounds[-1] / chunks
        if sequences:
            lanes.append(Lane(mirrored, tuple(sequences), chunk_tokens >= LARGE))
    return lanes


def in_turns(by_lane: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the items of all lanes in one list: the first items of all lanes, then the second.

    by_lane: for each lane its items, by time. All ranks number their exchanges in this order.
    """
    items = []
    for at_one_time in zip_longest(*by_lane):
        for item in at_one_time:
            if item is not None:  # a shorter lane has ended
                items.append(item)
    return items


# ---- checks


def check(schedule: Schedule) -> None:
    """Raise ValueError, saying where, unless `schedule` computes causal attention exactly once.

    1. Readers and sources hold the chunks that calls take from them.
    2. No worker has two calls at one time.
    3. Every block of queries and keys that are not later is computed exactly once.
    """
    # 1. chunks are where calls look for them
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

    Of the squares on the diagonal of a causal call only a triangle is computed.
    """
    for index, query in enumerate(call.queries):
        keys = call.keys[: index + 1] if call.causal else call.keys
        for key in keys:
            yield query, key, call.causal and query == key
