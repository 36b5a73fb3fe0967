"""A ring schedule made concrete for one rank and one micro-batch: which rows go where, and when.

    BlockCall  (plan/attention_schedule.py)          RingStep  (here)
    chunks of one sequence               ->     rows of this rank, of all sequences of a direction
    indices in the group                 ->     global ranks
    no lengths                           ->     lengths of one kernel call

A step covers all sequences of a group that lie the same way round (a *direction*): one kernel
call, and one message per tensor and peer. Groups with two directions alternate between them, a
step of the one and a step of the other.

One step of one rank, in the forward:

    1. this rank sends     sent_queries, sent_keys    to the workers whose calls read them
    2. this rank fetches   queries, keys              unless they are its own rows
    3. this rank attends   call                       one kernel call
    4. the result goes     to the peer of `queries`   unless the queries are its own

In the backward the same rows travel, dQ goes to the peer of `queries`, and dK and dV to the peer
of `keys`. `ring.py` compiles a list of steps.

Every rank derives its sends and receives from the same schedule and lengths, so every send has its
receive. Sequences of which a call has no query or no key are left out of the call, on both sides.
`tests/attention/test_sequence_parallel.py` compares what all ranks compute with dense attention.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from hf_flexseq.plan.attention_schedule import (
    BlockCall,
    ChunkKey,
    calls_of_rank,
    directions_of,
    interleaved,
)
from hf_flexseq.plan.shard import Cut, held_chunks
from hf_flexseq.program.instructions import RowsSpec
from hf_flexseq.program.tables import Tables

DIAGONAL_TIME = 0  # time of a schedule at which every rank attends to its own chunks


class ChunkRows(NamedTuple):
    """Rows of some chunks, on this rank or between it and another one."""

    peer: int
    """Global rank on the other side; this rank for rows that it reads itself."""
    rows: RowsSpec
    """The rows; of another rank, their number alone."""
    chunks: tuple[ChunkKey, ...]
    """The chunks that the rows are, in the order of the rows; errors name them."""


class Read(NamedTuple):
    """Inputs of an attention call of this rank."""

    queries: ChunkRows
    keys: ChunkRows


# ---- steps


class RingStep(NamedTuple):
    """Work and transfers of one rank at one time of a direction's schedule."""

    number: int
    """Position among the steps of the group, the same on all of its ranks."""
    time: int
    """Of the schedule; at `DIAGONAL_TIME` nothing travels."""
    call: int | None
    """Number of the lengths of this rank's kernel call; None when it has no call in this step."""
    read: Read | None
    """The kernel call's keys; None without a call."""
    sent_queries: tuple[ChunkRows, ...]
    """Queries of this rank that calls of other ranks read."""
    sent_keys: tuple[ChunkRows, ...]
    """Keys and values of this rank that calls of other ranks read."""


class ZoneLayout:
    """The positions of one rank's chunks in its rows of a group."""

    __slots__ = ("cuts", "index", "ranks", "starts", "strategy", "tables", "tokens")

    def __init__(
        self,
        cuts: Sequence[Cut],
        strategy: str,
        index: int,
        ranks: Sequence[int],
        tables: Tables,
    ) -> None:
        """cuts: the cut of every sequence of the group.
        index: of this rank in the group. ranks: global ranks of the group, by index.
        """
        self.cuts = cuts
        self.strategy = strategy
        self.index = index
        self.ranks = ranks
        self.tables = tables
        self.starts: dict[ChunkKey, int] = {}
        """First row of each chunk of this rank, in the order of its rows."""
        row = 0
        for sequence, cut in enumerate(cuts):
            for chunk in held_chunks(strategy, index, len(ranks), mirrored=cut.mirrored):
                self.starts[sequence, chunk] = row
                row += cut.tokens((chunk,))
        self.tokens = row

    def tokens_of(self, sequences: Sequence[int], chunks: Sequence[int]) -> list[int]:
        """Return the tokens that `chunks` have in each of the sequences."""
        return [self.cuts[sequence].tokens(chunks) for sequence in sequences]

    def rows(self, chunks: Iterable[ChunkKey]) -> RowsSpec:
        """Return the rows of some chunks of this rank, given in the order of its rows."""
        ranges = []
        for sequence, chunk in chunks:
            start = self.starts[sequence, chunk]
            ranges.append((start, start + self.cuts[sequence].tokens((chunk,))))
        return self.tables.rows(ranges)


def make_ring_steps(layout: ZoneLayout, *, device: str = "cuda") -> tuple[RingStep, ...]:
    """Return the steps of one rank of a group under a ring strategy, in the order of execution.

    layout: of the rank; its tables take rows and lengths of the steps. device: "cpu" or "cuda",
    see `directions_of`.
    """
    by_direction = []
    for direction in directions_of(layout.cuts, device):
        calls_by_time = calls_of_rank(
            layout.strategy,
            len(layout.ranks),
            layout.index,
            mirrored=direction.mirrored,
            chunk_by_chunk=direction.chunk_by_chunk,
        )
        steps = [
            _make_ring_step(time, calls, direction.sequences, layout)
            for time, calls in enumerate(calls_by_time)
        ]
        by_direction.append(steps)
    numbered = enumerate(interleaved(by_direction))
    return tuple(step._replace(number=number) for number, step in numbered)


def _make_ring_step(
    time: int,
    calls: Sequence[BlockCall],
    sequences_of_direction: Sequence[int],
    layout: ZoneLayout,
) -> RingStep:
    """Return the step of this rank at one time of a direction, without its number.

    calls: the calls in which this rank has a part; one at most is its own.
    """
    number = None
    read = None
    sent_queries: list[ChunkRows] = []
    sent_keys: list[ChunkRows] = []
    for call in calls:
        # Sequences that are too short for one of the chunks are left out of the call.
        sequences = []
        for sequence in sequences_of_direction:
            cut = layout.cuts[sequence]
            if cut.tokens(call.queries) and cut.tokens(call.keys):
                sequences.append(sequence)
        if not sequences:
            continue
        if call.worker == layout.index:
            q_lens = layout.tokens_of(sequences, call.queries)
            k_lens = layout.tokens_of(sequences, call.keys)
            number = layout.tables.call(q_lens, k_lens, causal=call.causal)
            read = Read(
                queries=_operand(call.reader, sequences, call.queries, layout),
                keys=_operand(call.source, sequences, call.keys, layout),
            )
            continue
        if call.reader == layout.index:
            sent_queries.append(_share(call.worker, sequences, call.queries, layout))
        if call.source == layout.index:
            sent_keys.append(_share(call.worker, sequences, call.keys, layout))
    return RingStep(
        number=0,
        time=time,
        call=number,
        read=read,
        sent_queries=tuple(sent_queries),
        sent_keys=tuple(sent_keys),
    )


def _operand(
    holder: int, sequences: Sequence[int], chunks: Sequence[int], layout: ZoneLayout
) -> ChunkRows:
    """Return the chunks that this rank's call reads of the rank of index `holder`."""
    keys = tuple(product(sequences, chunks))
    if holder == layout.index:
        rows = layout.rows(keys)
    else:
        rows = RowsSpec(sum(layout.tokens_of(sequences, chunks)))
    return ChunkRows(layout.ranks[holder], rows, keys)


def _share(
    worker: int, sequences: Sequence[int], chunks: Sequence[int], layout: ZoneLayout
) -> ChunkRows:
    """Return the chunks of some sequences that this rank sends to the rank of index `worker`."""
    keys = tuple(product(sequences, chunks))
    return ChunkRows(layout.ranks[worker], layout.rows(keys), keys)


# ---- the order of the backward


def backward_order(steps: Sequence[RingStep], tables: Tables) -> tuple[RingStep, ...]:
    """Return the steps of a backward: the diagonal in two halves, one first and one last.

    The first half is computed while the first keys and values travel here, the second half while
    the last gradients travel back.
    """
    first_halves = []
    second_halves = []
    between = []
    for step in steps:
        if step.time == DIAGONAL_TIME:
            first, second = _halves(step, tables)
            first_halves.append(first)
            second_halves.append(second)
        else:
            between.append(step)
    return (*first_halves, *between, *second_halves)


def _halves(step: RingStep, tables: Tables) -> tuple[RingStep, RingStep]:
    """Return a causal step of this rank alone as two steps of equal work.

    Every sequence is cut in the middle:

                    first keys     second keys
        first queries   causal     -               the first step attends to the two triangles,
        second queries  full       causal          the second step to the square
    """
    if step.call is None or step.read is None:
        return step, step
    # 1. the lengths of the halves
    lengths = tables.calls[step.call].q_lens
    seconds = [length // 2 for length in lengths]
    firsts = []
    all_halves = []  # first and second half of a sequence, then of the next one, ...
    for length, second in zip(lengths, seconds, strict=True):
        firsts.append(length - second)
        all_halves += [length - second, second]

    # 2. their rows: [rows of the step] -> [rows of a half], by half
    read = step.read
    rows = tables.positions(read.queries.rows)
    half_rows = np.split(rows, np.cumsum(all_halves)[:-1])
    first_rows = tables.order(np.concatenate(half_rows[::2]))
    second_rows = tables.order(np.concatenate(half_rows[1::2]))

    # 3. the steps
    triangles = step._replace(call=tables.call(all_halves, all_halves, causal=True))
    if not sum(seconds):
        return triangles, step._replace(call=None, read=None)
    square = Read(
        queries=read.queries._replace(rows=second_rows), keys=read.keys._replace(rows=first_rows)
    )
    squares = step._replace(call=tables.call(seconds, firsts, causal=False), read=square)
    return triangles, squares


# ---- names for errors


def name_chunks(chunks: Iterable[ChunkKey], sequences: Sequence[int]) -> str:
    """Return the chunks as text, e.g. "chunks [0, 3] of sequence 7".

    sequences: id of each sequence, by its index in the group.
    """
    by_sequence: dict[int, list[int]] = {}
    for index, chunk in chunks:
        by_sequence.setdefault(sequences[index], []).append(chunk)
    names = []
    for sequence, its_chunks in by_sequence.items():
        names.append(f"chunks {its_chunks} of sequence {sequence}")
    return ", ".join(names) or "nothing"
