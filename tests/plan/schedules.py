"""The attention of one sequence over a group, as the calls of all ranks together: its text form,
and a check that causal attention is computed exactly once."""

from collections import Counter
from typing import NamedTuple

from hf_flexseq.plan.attention_schedule import BlockCall, calls_of_rank
from hf_flexseq.plan.shard import held_chunks


class Schedule(NamedTuple):
    """The attention of one sequence over a group."""

    chunks: tuple[tuple[int, ...], ...]
    """Chunks of each rank of the group, by rank index."""
    calls: tuple[BlockCall, ...]
    """All calls, sorted by time and then by worker; a worker may idle at a time."""

    @property
    def times(self):
        return 1 + max(call.time for call in self.calls)

    def __str__(self):
        """One line of text per time, with the calls of all ranks side by side."""
        lines = []
        for time in range(self.times):
            calls = [text_of(call) for call in self.calls if call.time == time]
            lines.append(f"{time} | " + " | ".join(calls))
        return "\n".join(lines)


def schedule_of(strategy, degree, *, mirrored=False, chunk_by_chunk=False):
    """The schedule of a ring strategy over `degree` ranks: every rank's own calls."""
    options = {"mirrored": mirrored, "chunk_by_chunk": chunk_by_chunk}
    calls = [
        call
        for index in range(degree)
        for at_time in calls_of_rank(strategy, degree, index, **options)
        for call in at_time
        if call.worker == index
    ]
    chunks = [held_chunks(strategy, index, degree, mirrored=mirrored) for index in range(degree)]
    return Schedule(tuple(chunks), tuple(sorted(calls)))


def work_of(call):
    """The work of a call, in half squares of a chunk by a chunk."""
    return len(call.queries) * len(call.keys) * (1 if call.causal else 2)


def text_of(call):
    """A call as text, e.g. `1: q1+2 x kv0 of 0`."""
    queries = _chunks_as_text(call.queries, call.reader, call.worker)
    keys = _chunks_as_text(call.keys, call.source, call.worker)
    kind = "causal kv" if call.causal else "kv"
    return f"{call.worker}: q{queries} x {kind}{keys}"


def _chunks_as_text(chunks, holder, worker):
    text = "+".join(map(str, chunks))
    return text if holder == worker else f"{text} of {holder}"


def check(schedule):
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
        where = f"time {call.time}, {text_of(call)}"
        if not (reader_holds and source_holds):
            raise ValueError(f"{where}: some of these chunks are held by another rank")
        if call.causal and call.queries != call.keys:
            raise ValueError(f"{where}: a causal call reads its own chunks")

    # 2. one call per worker and time
    counts = Counter((call.time, call.worker) for call in schedule.calls)
    if counts and max(counts.values()) > 1:
        time, worker = max(counts, key=counts.__getitem__)
        raise ValueError(f"time {time}: rank {worker} has {counts[time, worker]} calls")

    # 3. the blocks of the causal triangle, each once
    computed = Counter(block for call in schedule.calls for block in _blocks(call))
    wanted = Counter(
        (query, key, query == key)
        for query in range(sum(map(len, chunks)))
        for key in range(query + 1)
    )
    if computed != wanted:
        missing = sorted(wanted - computed)
        extra = sorted(computed - wanted)
        raise ValueError(f"blocks (query, key, causal) missing {missing}, extra {extra}")


def _blocks(call):
    """(query chunk, key chunk, causal) of every square that a call computes; a causal call
    computes only a triangle of its diagonal squares."""
    for index, query in enumerate(call.queries):
        for key in call.keys[: index + 1] if call.causal else call.keys:
            yield query, key, call.causal and query == key
