"""A ring schedule made concrete for one rank and one micro-batch: which rows go where, and when.

    BlockCall  (schedule/attention.py)          Turn  (here)
    chunks of one sequence               ->     rows of this rank, of all sequences of a lane
    indices in the group                 ->     global ranks
    no lengths                           ->     segments of one kernel call

A turn covers all sequences of a group that lie the same way round (a *lane*): one kernel call, and
one message per tensor and peer. Groups with two lanes alternate between them, a turn of the one
and a turn of the other.

What one turn of one rank looks like, in the forward:

    1. this rank sends     sent_queries, sent_keys    to the workers whose calls read them
    2. this rank fetches   queries, keys              unless they are its own rows
    3. this rank attends   segments                   one kernel call
    4. the result goes     to the peer of `queries`   unless the queries are its own

In the backward the same rows travel, dQ goes to the peer of `queries`, and dK and dV to the peer
of `keys`. `attention/ring.py` obeys a list of turns.

Every rank derives what it sends and what it receives from the same schedule and lengths, so every
send has its receive. Sequences of which a call has no query or no key are left out of the call, on
both sides. `tests/attention/test_turns.py` plays the turns of all ranks on token names and
compares with a list of all pairs.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import torch

from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan.shard import Cut, held_chunks
from hf_flexseq.schedule.attention import (
    BlockCall,
    ChunkKey,
    calls_of_rank,
    in_turns,
    lanes_of,
)

DIAGONAL_TIME = 0  # time of a schedule at which every rank attends to its own chunks


# ---- rows


class Rows(NamedTuple):
    """Some of a rank's rows in the tensors [rows, ...] of one zone."""

    tokens: int
    """How many rows."""

    indices: torch.Tensor | slice | None
    """Which rows: int64 [tokens], or a slice where they stand together. None stands for all rows
    of this rank, or for rows of another rank, of which only the number matters."""

    @property
    def selector(self) -> torch.Tensor | slice:
        """Return the index of these rows for `x[selector]`: int64 [tokens] or a slice."""
        if self.indices is None:
            return slice(None)
        return self.indices

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return these rows of x: [rows, ...] -> [tokens, ...], a view where they are a slice."""
        if isinstance(self.indices, torch.Tensor):
            return x.index_select(0, self.indices)
        return x[self.selector]

    def split(self, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return the row indices in parts: int64 [lengths[0],], then [lengths[1],], and so on."""
        if isinstance(self.indices, torch.Tensor):
            indices = self.indices
        else:
            indices = torch.arange(self.tokens)
            if isinstance(self.indices, slice):
                indices += self.indices.start
        return indices.split(list(lengths))

    def add_to(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add part [tokens, ...] to these rows of total [rows, ...], in the dtype of total."""
        if isinstance(self.indices, torch.Tensor):
            total.index_add_(0, self.indices, part.to(total.dtype))
        else:
            total[self.selector].add_(part)


class Operand(NamedTuple):
    """Rows that a call of this rank reads, as its queries or as its keys and values."""

    peer: int | None
    """Global rank that holds the rows; None where they are this rank's own."""

    rows: Rows

    chunks: tuple[ChunkKey, ...] = ()
    """The chunks that the rows are, in the order of the rows; errors name them."""


class Share(NamedTuple):
    """Rows that one rank holds and the call of another rank reads."""

    peer: int
    """Global rank on the other side."""

    rows: Rows

    chunks: tuple[ChunkKey, ...] = ()
    """The chunks that the rows are, in the order of the rows; errors name them."""


NO_OPERAND = Operand(None, Rows(0, None))


# ---- turns


class Turn(NamedTuple):
    """The work and the transfers of one rank at one time of a lane's schedule."""

    number: int
    """Position among the turns of the group, the same on all of its ranks."""

    time: int
    """Time of the schedule; at `DIAGONAL_TIME` nothing travels."""

    segments: Segments | None
    """Lengths of the attention call of this rank; None when it has no call at this time."""

    queries: Operand
    """Queries that the call reads."""

    keys: Operand
    """Keys and values that the call reads."""

    sent_queries: tuple[Share, ...]
    """Queries of this rank that calls of other ranks read."""

    sent_keys: tuple[Share, ...]
    """Keys and values of this rank that calls of other ranks read."""


class ZoneLayout:
    """The positions of one rank's chunks in its rows of a group."""

    __slots__ = ("_starts", "cuts", "device", "index", "ranks", "tokens")

    def __init__(
        self,
        cuts: Sequence[Cut],
        strategy: str,
        index: int,
        ranks: Sequence[int],
        device: torch.device,
    ) -> None:
        """cuts: the cut of every sequence of the group.
        index: of this rank in the group. ranks: global ranks of the group, by index.
        """
        self.cuts = cuts
        self.index = index
        self.ranks = ranks
        self.device = device
        self._starts: dict[ChunkKey, int] = {}  # first row of each chunk of this rank
        row = 0
        for sequence, cut in enumerate(cuts):
            for chunk in held_chunks(strategy, index, len(ranks), mirrored=cut.mirrored):
                self._starts[sequence, chunk] = row
                row += cut.tokens((chunk,))
        self.tokens = row

    def tokens_of(self, sequences: Sequence[int], chunks: Sequence[int]) -> list[int]:
        """Return the tokens that `chunks` have in each of the sequences."""
        return [self.cuts[sequence].tokens(chunks) for sequence in sequences]

    def rows(self, chunks: Iterable[ChunkKey]) -> Rows:
        """Return the rows of some chunks of this rank, given in the order of its rows."""
        # 1. ranges of rows, chunks that follow each other in one range
        ranges: list[slice] = []
        for sequence, chunk in chunks:
            start = self._starts[sequence, chunk]
            stop = start + self.cuts[sequence].tokens((chunk,))
            if ranges and ranges[-1].stop == start:
                ranges[-1] = slice(ranges[-1].start, stop)
            else:
                ranges.append(slice(start, stop))
        # 2. the simplest way to say which they are
        tokens = sum(rows.stop - rows.start for rows in ranges)
        if tokens == self.tokens:
            return Rows(tokens, None)
        if len(ranges) == 1:
            return Rows(tokens, ranges[0])
        parts = [torch.arange(0)]
        for rows in ranges:
            parts.append(torch.arange(rows.start, rows.stop))
        return Rows(tokens, to_device(torch.cat(parts), self.device))  # int64 [tokens]


def make_turns(
    strategy: str,
    group_cuts: Sequence[Cut],
    index: int,
    ranks: Sequence[int],
    device: torch.device,
) -> tuple[Turn, ...]:
    """Return the turns of one rank of a group under a ring strategy, in the order of execution.

    group_cuts: the cut of every sequence of the group.
    index: of the rank in the group. ranks: global ranks of the group, by index.
    """
    layout = ZoneLayout(group_cuts, strategy, index, ranks, device)
    by_lane = []
    for lane in lanes_of(group_cuts):
        calls_by_time = calls_of_rank(
            strategy,
            len(ranks),
            index,
            mirrored=lane.mirrored,
            chunk_by_chunk=lane.chunk_by_chunk,
        )
        turns = []
        for time, calls in enumerate(calls_by_time):
            turns.append(_make_turn(time, calls, lane.sequences, layout))
        by_lane.append(turns)
    numbered = enumerate(in_turns(by_lane))
    return tuple(turn._replace(number=number) for number, turn in numbered)


def _make_turn(
    time: int, calls: Sequence[BlockCall], lane_sequences: Sequence[int], layout: ZoneLayout
) -> Turn:
    """Return the turn of this rank at one time of a lane, still without its number.

    calls: the calls at this time in which this rank has a part; one at most is its own.
    """
    segments = None
    queries = NO_OPERAND
    keys = NO_OPERAND
    sent_queries: list[Share] = []
    sent_keys: list[Share] = []
    for call in calls:
        # Sequences that are too short for one of the chunks are left out of the call.
        sequences = []
        for sequence in lane_sequences:
            cut = layout.cuts[sequence]
            if cut.tokens(call.queries) and cut.tokens(call.keys):
                sequences.append(sequence)
        if not sequences:
            continue
        if call.worker == layout.index:
            segments = Segments(
                layout.tokens_of(sequences, call.queries),
                layout.tokens_of(sequences, call.keys),
                causal=call.causal,
                device=layout.device,
            )
            queries = _operand(call.reader, sequences, call.queries, layout)
            keys = _operand(call.source, sequences, call.keys, layout)
            continue
        if call.reader == layout.index:
            sent_queries.append(_share(call.worker, sequences, call.queries, layout))
        if call.source == layout.index:
            sent_keys.append(_share(call.worker, sequences, call.keys, layout))
    return Turn(
        number=0,
        time=time,
        segments=segments,
        queries=queries,
        keys=keys,
        sent_queries=tuple(sent_queries),
        sent_keys=tuple(sent_keys),
    )


def _operand(
    holder: int, sequences: Sequence[int], chunks: Sequence[int], layout: ZoneLayout
) -> Operand:
    """Return the chunks of some sequences that this rank's call reads.

    holder: index in the group of the rank that holds them, which may be this one.
    """
    keys = tuple(product(sequences, chunks))
    if holder == layout.index:
        return Operand(None, layout.rows(keys), keys)
    tokens = sum(layout.tokens_of(sequences, chunks))
    return Operand(layout.ranks[holder], Rows(tokens, None), keys)


def _share(
    worker: int, sequences: Sequence[int], chunks: Sequence[int], layout: ZoneLayout
) -> Share:
    """Return the chunks of some sequences that this rank sends to the rank of index `worker`."""
    keys = tuple(product(sequences, chunks))
    return Share(layout.ranks[worker], layout.rows(keys), keys)


# ---- the order of the backward


def backward_order(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns of a backward: the diagonal in two halves, one first and one last.

    The first half is computed while the first keys and values travel here, the second half while
    the last gradients travel back.
    """
    first_halves = []
    second_halves = []
    between = []
    for turn in turns:
        if turn.time == DIAGONAL_TIME:
            first, second = _halves(turn)
            first_halves.append(first)
            second_halves.append(second)
        else:
            between.append(turn)
    return (*first_halves, *between, *second_halves)


def _halves(turn: Turn) -> tuple[Turn, Turn]:
    """Return a causal turn of this rank alone as two turns of equal work.

    Every sequence is cut in the middle:

                    first keys     second keys
        first queries   causal     -               the first turn attends to the two triangles,
        second queries  full       causal          the second turn to the square
    """
    if turn.segments is None:
        return turn, turn
    device = turn.segments.device
    seconds = [length // 2 for length in turn.segments.q_lens]
    firsts = []
    all_halves = []  # first and second half of a sequence, then of the next one, ...
    for length, second in zip(turn.segments.q_lens, seconds, strict=True):
        firsts.append(length - second)
        all_halves += [length - second, second]
    rows = turn.queries.rows
    if len(seconds) == 1 and not isinstance(rows.indices, torch.Tensor):
        start = rows.selector.start or 0
        middle = start + firsts[0]
        first_rows = Rows(firsts[0], slice(start, middle))
        second_rows = Rows(seconds[0], slice(middle, middle + seconds[0]))
    else:
        half_rows = rows.split(all_halves)
        first_rows = _joined(half_rows[::2], device)
        second_rows = _joined(half_rows[1::2], device)

    triangles = turn._replace(
        segments=Segments(all_halves, all_halves, causal=True, device=device)
    )
    squares = turn._replace(
        segments=Segments(seconds, firsts, causal=False, device=device),
        queries=turn.queries._replace(rows=second_rows),
        keys=turn.keys._replace(rows=first_rows),
    )
    return triangles, squares


def _joined(parts: Sequence[torch.Tensor], device: torch.device) -> Rows:
    """Return the rows whose indices are int64 parts of any lengths, one after the other."""
    tokens = sum(len(part) for part in parts)
    return Rows(tokens, to_device(torch.cat(list(parts)), device))


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
