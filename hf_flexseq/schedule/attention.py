"""Attention over a group as a list of blocks: who computes what, from whose queries and whose
keys, and when.

In attention over a group every rank holds some chunks of each sequence: queries, keys and values.
A *step* is one attention call: its *worker* computes, for queries that the *reader* holds, over
keys and values that the *source* holds. What travels follows from it: keys and values to a worker
that is not their source, queries to a worker that is not their reader (a *helper*), and the
partial result from there back. The executor in `attention/ring.py` knows nothing else, so a new
member of the ring family is a new function here.

    zigzag     every rank computes for its own queries; equal work by the choice of chunks (2 per
               rank)
    balanced   LightSeq (DistFlashAttn, arXiv 2310.03294, section 3.1): contiguous chunks, so late
               ranks have more to
               do, and ranks that have run out of keys before their own queries compute for them

`balanced` departs from the paper, which is right for even degrees only: as printed, and in its
code, nobody helps at the last step, which loses (d - 1) / 2 blocks of an odd degree. With them an
odd degree has no idle slot at all, and an even one half a block's time per rank, (d + 1) / d of
the ideal.

Rejected: passing keys and values on around the ring. A chunk is fetched straight from its owner,
and only when some query of the worker's reads it: the zigzag schedule moves a quarter less than
the ring of the same name.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from hf_flexseq.plan.shard import Cut, held_chunks

Item = TypeVar("Item")
LARGE = 1024  # tokens of a chunk from which on it travels alone


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCall:
    """One attention call.

    time: its place in the worker's list. worker, reader, source: indices in the group of the ranks
    that compute, hold the queries, hold the keys and values. queries, keys: chunks, each a subset
    of what the reader (the source) holds, in the order of its row. causal: queries and keys are
    the same chunks, and none reads a later token; otherwise every query reads every key.
    """

    time: int
    worker: int
    reader: int
    source: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool

    @property
    def work(self) -> int:
        """What it computes, in halves of a square of one chunk by one chunk."""
        return len(self.queries) * len(self.keys) * (1 if self.causal else 2)

    def __str__(self) -> str:
        def of(chunks: tuple[int, ...], holder: int) -> str:
            return "+".join(map(str, chunks)) + (f" of {holder}" if holder != self.worker else "")

        reads = "causal kv" if self.causal else "kv"
        queries, keys = of(self.queries, self.reader), of(self.keys, self.source)
        return f"{self.worker}: q{queries} x {reads}{keys}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One sequence's attention. chunks: what each rank holds. steps: by time, then worker; a
    worker may idle."""

    chunks: tuple[tuple[int, ...], ...]
    steps: tuple[BlockCall, ...]

    @property
    def degree(self) -> int:
        return len(self.chunks)

    @property
    def times(self) -> int:
        return 1 + max(step.time for step in self.steps)

    def critical_path(self) -> float:
        """Work of the busiest rank at each time, added up, over that of a perfect split, for
        chunks of equal size."""
        busiest = [0] * self.times
        for step in self.steps:
            busiest[step.time] = max(busiest[step.time], step.work)
        return sum(busiest) * self.degree / sum(step.work for step in self.steps)

    def __str__(self) -> str:
        """One line per time, the calls of all ranks side by side."""
        lines = [
            [str(step) for step in self.steps if step.time == time] for time in range(self.times)
        ]
        return "\n".join(f"{time} | " + " | ".join(line) for time, line in enumerate(lines))


@functools.cache
def attention_schedule(
    strategy: str, degree: int, mirrored: bool = False, *, chunk_by_chunk: bool = False
) -> Schedule:
    """The schedule of a ring strategy. mirrored: for a sequence whose first chunk the last rank
    holds. chunk_by_chunk: a call reads one chunk of another rank's keys at a time."""
    schedule = {"zigzag": zigzag, "balanced": balanced}[strategy](degree)
    schedule = _chunk_by_chunk(schedule) if chunk_by_chunk else schedule
    return _mirror(schedule) if mirrored else schedule


class Lane(NamedTuple):
    """The sequences of a group that lie the same way round, which go through the schedule
    together.

    mirrored: which way. places: of the sequences in the group. chunk_by_chunk: whether their
    chunks together are worth a call and a transfer each: then one travels, or its gradients do,
    while the call on the other one runs.
    """

    mirrored: bool
    places: tuple[int, ...]
    chunk_by_chunk: bool

    def schedule(self, strategy: str, degree: int) -> Schedule:
        return attention_schedule(
            strategy, degree, self.mirrored, chunk_by_chunk=self.chunk_by_chunk
        )


def lanes_of(group_cuts: Sequence[Cut]) -> list[Lane]:
    """One, or two where sequences lie both ways round."""
    lanes = []
    for mirrored in (False, True):
        places = tuple(place for place, cut in enumerate(group_cuts) if cut.mirrored == mirrored)
        chunk = sum(
            group_cuts[place].bounds[-1] / (len(group_cuts[place].bounds) - 1) for place in places
        )
        if places:
            lanes.append(Lane(mirrored, places, chunk >= LARGE))
    return lanes


def in_turns(by_lane: Sequence[Sequence[Item]]) -> list[Item]:
    """What lanes do, by time: a step of the one and a step of the other. All ranks count exchanges
    in this order."""
    return [item for together in zip_longest(*by_lane) for item in together if item is not None]


def zigzag(degree: int) -> Schedule:
    """At time t a rank reads from the rank t places before it.

    A rank holds chunks i and 2d-1-i, so a source before it has one chunk that all its queries
    follow, and a source after it two chunks that only its back queries follow: half a square of
    work in every step, for every rank.
    """
    chunks = tuple(held_chunks("zigzag", i, degree) for i in range(degree))
    steps = [_diagonal(i, chunks[i]) for i in range(degree)]
    for time in range(1, degree):
        for i in range(degree):
            source = (i - time) % degree
            before = source < i
            steps.append(
                BlockCall(
                    time=time,
                    worker=i,
                    reader=i,
                    source=source,
                    queries=chunks[i] if before else chunks[i][1:],
                    keys=chunks[source][:1] if before else chunks[source],
                    causal=False,
                )
            )
    return Schedule(chunks=chunks, steps=tuple(steps))


def balanced(degree: int) -> Schedule:
    """At time t a rank reads the keys t places before it; one that has none there helps the rank t
    places before it, counted around the end, with its own keys. Half way round an even degree
    these would be the same blocks: no help.
    """
    chunks = tuple(held_chunks("balanced", i, degree) for i in range(degree))
    steps = [_diagonal(i, chunks[i]) for i in range(degree)]
    for time in range(1, degree // 2 + 1):
        for i in range(degree):
            reader, source = (i, i - time) if i >= time else (i - time + degree, i)
            if i >= time or 2 * time < degree:
                steps.append(
                    BlockCall(
                        time=time,
                        worker=i,
                        reader=reader,
                        source=source,
                        queries=chunks[reader],
                        keys=chunks[source],
                        causal=False,
                    )
                )
    return Schedule(chunks=chunks, steps=tuple(steps))


def _diagonal(index: int, chunks: tuple[int, ...]) -> BlockCall:
    """What a rank does first, with what it holds itself."""
    return BlockCall(
        time=0, worker=index, reader=index, source=index, queries=chunks, keys=chunks, causal=True
    )


def _chunk_by_chunk(schedule: Schedule) -> Schedule:
    """The same with as many times for each later one as ranks hold chunks, though not every step
    has keys of all."""
    parts = max(map(len, schedule.chunks))
    steps = [step for step in schedule.steps if step.time == 0]
    steps += [
        replace(step, time=1 + (step.time - 1) * parts + n, keys=(chunk,))
        for step in schedule.steps
        if step.time
        for n, chunk in enumerate(step.keys)
    ]
    return Schedule(
        chunks=schedule.chunks, steps=tuple(sorted(steps, key=lambda s: (s.time, s.worker)))
    )


def _mirror(schedule: Schedule) -> Schedule:
    """The same with the order of the ranks turned round."""
    last = schedule.degree - 1
    steps = [
        replace(s, worker=last - s.worker, reader=last - s.reader, source=last - s.source)
        for s in schedule.steps
    ]
    return Schedule(
        chunks=schedule.chunks[::-1], steps=tuple(sorted(steps, key=lambda s: (s.time, s.worker)))
    )


# ---- checks


def check(schedule: Schedule) -> None:
    """Raise ValueError unless ranks hold what they lend, none has two calls at one time, and every
    block of queries and earlier keys is computed exactly once."""
    chunks = schedule.chunks
    for step in schedule.steps:
        if not (
            set(step.queries) <= set(chunks[step.reader])
            and set(step.keys) <= set(chunks[step.source])
        ):
            raise ValueError(
                f"time {step.time}, {step}: some of these chunks are held by another rank"
            )
        if step.causal and step.queries != step.keys:
            raise ValueError(f"time {step.time}, {step}: a causal call reads its own chunks")
    calls = Counter((step.time, step.worker) for step in schedule.steps)
    if calls and max(calls.values()) > 1:
        time, worker = max(calls, key=calls.__getitem__)
        raise ValueError(f"time {time}: rank {worker} has {calls[time, worker]} calls")
    total = sum(map(len, chunks))
    found = Counter(block for step in schedule.steps for block in _blocks(step))
    wanted = Counter((q, k, q == k) for q in range(total) for k in range(q + 1))
    if found != wanted:
        raise ValueError(
            f"blocks (query, key, causal) missing {sorted(wanted - found)}, extra "
            f"{sorted(found - wanted)}"
        )


def _blocks(step: BlockCall) -> Iterator[tuple[int, int, bool]]:
    """(query chunk, key chunk, causal) of the squares a step computes; of a causal one's diagonal,
    the triangles."""
    for place, q in enumerate(step.queries):
        for k in step.keys[: place + 1] if step.causal else step.keys:
            yield q, k, step.causal and q == k
