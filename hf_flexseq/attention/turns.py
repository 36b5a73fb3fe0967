"""A schedule made concrete for one rank and one micro-batch: which rows, how many tokens, to and
from whom.

    Step (chunks of a sequence, indices in the group)  ->  Turn (rows of this rank, global ranks,
    lengths)

A turn covers all sequences of a group that lie the same way round (`shard.mirrored`): one kernel
call, and one message per tensor and partner. Groups with sequences of both kinds take turns, a
step of the ones and a step of the others.

Every rank derives what it sends and what it receives from the same steps and lengths, so that
every send has its receive. Sequences of which a step has no query or no key are left out of it, on
both sides.
"""

import functools
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import torch

from hf_flexseq.kernels.segments import Segments
from hf_flexseq.plan.shard import Cut, held_chunks
from hf_flexseq.schedule.attention import BlockCall, attention_schedule, in_turns, lanes_of

Piece = tuple[int, int]  # place of the sequence in the group, chunk


class Rows(NamedTuple):
    """Some rows of a rank. index: which; None when they are all of them, or another rank's and
    only their number is of interest."""

    tokens: int
    index: torch.Tensor | slice | None

    @property
    def place(self) -> torch.Tensor | slice:
        """What to index a tensor with."""
        return slice(None) if self.index is None else self.index

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """A view where the rows stand together."""
        return (
            x.index_select(0, self.index)
            if isinstance(self.index, torch.Tensor)
            else x[self.place]
        )

    def split(self, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Indices of the first of these rows, of the next ones, and so on."""
        index = self.index if isinstance(self.index, torch.Tensor) else torch.arange(self.tokens)
        if isinstance(self.index, slice):
            index += self.index.start
        return index.split(list(lengths))

    def add_to(self, total: torch.Tensor, part: torch.Tensor) -> None:
        if isinstance(self.index, torch.Tensor):
            total.index_add_(0, self.index, part.to(total.dtype))
        else:
            total[self.place].add_(part)


class Share(NamedTuple):
    """Rows that one side holds and the other reads. peer: the other side's global rank; None: both
    are this rank. pieces: what they are."""

    peer: int | None
    rows: Rows
    pieces: tuple[Piece, ...] = ()


NOTHING = Share(None, Rows(0, None))
OWN = 0


class Turn(NamedTuple):
    """What a rank does at one time.

    number: place among the turns, the same on all ranks. time: of the schedule; at 0 (`OWN`) every
    rank attends to what it holds. segments: its attention call; None when it has none. queries,
    keys: what that reads. lent_queries, lent_keys: what other ranks' calls read of this rank's,
    and to whom it goes.
    """

    number: int
    time: int
    segments: Segments | None
    queries: Share
    keys: Share
    lent_queries: tuple[Share, ...]
    lent_keys: tuple[Share, ...]


class ZoneLayout:
    """Where the chunks that a rank holds lie in its rows of a group."""

    __slots__ = ("_starts", "cuts", "device", "tokens")

    def __init__(
        self, cuts: Sequence[Cut], strategy: str, index: int, degree: int, device: torch.device
    ) -> None:
        self.cuts, self.device = cuts, device
        self._starts: dict[tuple[int, int], int] = {}
        row = 0
        for place, cut in enumerate(cuts):
            for chunk in held_chunks(strategy, index, degree, mirrored=cut.mirrored):
                self._starts[place, chunk] = row
                row += cut.tokens((chunk,))
        self.tokens = row

    def rows(self, pieces: Iterable[Piece]) -> Rows:
        """Those of `pieces`, which stand in the order of the rows."""
        spans: list[slice] = []
        for place, chunk in pieces:
            start = self._starts[place, chunk]
            stop = start + self.cuts[place].tokens((chunk,))
            together = bool(spans) and spans[-1].stop == start
            spans[-1:] = (
                [slice(spans[-1].start, stop)] if together else [*spans[-1:], slice(start, stop)]
            )
        tokens = sum(span.stop - span.start for span in spans)
        if tokens == self.tokens or len(spans) == 1:
            return Rows(tokens, None if tokens == self.tokens else spans[0])
        parts = [torch.arange(0), *(torch.arange(span.start, span.stop) for span in spans)]
        return Rows(tokens, torch.cat(parts).to(self.device))


def make_turns(
    strategy: str,
    group_cuts: Sequence[Cut],
    index: int,
    ranks: Sequence[int],
    device: torch.device,
) -> tuple[Turn, ...]:
    """The turns of the rank of `index` among `ranks`, which share sequences cut so by a ring
    strategy."""
    layout, degree = ZoneLayout(group_cuts, strategy, index, len(ranks), device), len(ranks)
    turns = in_turns(
        [
            [
                _turn(time, at_time, lane.places, layout, index, ranks)
                for time, at_time in enumerate(
                    steps_of(strategy, degree, lane.mirrored, index, lane.chunk_by_chunk)
                )
            ]
            for lane in lanes_of(group_cuts)
        ]
    )
    return tuple(turn._replace(number=number) for number, turn in enumerate(turns))


def backward_order(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The same work with what a rank does on its own halved: a part while the first keys and
    values travel here, the rest while the last gradients travel back."""
    own = [_halves(turn) for turn in turns if turn.time == OWN]
    rest = [turn for turn in turns if turn.time != OWN]
    return (*(first for first, _ in own), *rest, *(second for _, second in own))


def _halves(turn: Turn) -> tuple[Turn, Turn]:
    """A causal call in two of equal work: both halves of every sequence with themselves; second
    with first halves."""
    if turn.segments is None:
        return turn, turn
    lengths, device = turn.segments.q_lens, turn.segments.device
    second = [n // 2 for n in lengths]
    first = [n - half for n, half in zip(lengths, second, strict=True)]
    apart = [n for pair in zip(first, second, strict=True) for n in pair]
    in_halves = turn.queries.rows.split(apart)
    across = Segments(second, first, causal=False, device=device)
    return (
        turn._replace(segments=Segments(apart, apart, causal=True, device=device)),
        turn._replace(
            segments=across,
            queries=turn.queries._replace(rows=_joined(in_halves[1::2], device)),
            keys=turn.keys._replace(rows=_joined(in_halves[::2], device)),
        ),
    )


def _joined(parts: Sequence[torch.Tensor], device: torch.device) -> Rows:
    return Rows(sum(map(len, parts)), torch.cat(parts).to(device))


@functools.cache
def steps_of(
    strategy: str, degree: int, mirrored: bool, index: int, chunk_by_chunk: bool
) -> tuple[tuple[BlockCall, ...], ...]:
    """The steps, by time, in which the rank of `index` works or of which it holds queries or
    keys."""
    schedule = attention_schedule(strategy, degree, mirrored, chunk_by_chunk=chunk_by_chunk)
    times: list[list[BlockCall]] = [[] for _ in range(schedule.times)]
    for step in schedule.steps:
        if index in (step.worker, step.reader, step.source):
            times[step.time].append(step)
    return tuple(map(tuple, times))


def _turn(
    time: int,
    steps: Sequence[BlockCall],
    among: Sequence[int],
    layout: ZoneLayout,
    index: int,
    ranks: Sequence[int],
) -> Turn:
    segments, queries, keys = None, NOTHING, NOTHING
    lent_queries, lent_keys = [], []
    for step in steps:
        places = [
            p
            for p in among
            if layout.cuts[p].tokens(step.queries) and layout.cuts[p].tokens(step.keys)
        ]
        if not places:
            continue
        if step.worker == index:
            q_lens, k_lens = (
                [layout.cuts[p].tokens(c) for p in places] for c in (step.queries, step.keys)
            )
            segments = Segments(q_lens, k_lens, causal=step.causal, device=layout.device)
            queries = _read(step.reader, step.queries, places, layout, index, ranks)
            keys = _read(step.source, step.keys, places, layout, index, ranks)
        elif step.reader == index:
            lent_queries.append(_lent(step.worker, step.queries, places, layout, ranks))
        if step.source == index != step.worker:
            lent_keys.append(_lent(step.worker, step.keys, places, layout, ranks))
    return Turn(0, time, segments, queries, keys, tuple(lent_queries), tuple(lent_keys))


def _lent(
    worker: int,
    chunks: Sequence[int],
    places: Sequence[int],
    layout: ZoneLayout,
    ranks: Sequence[int],
) -> Share:
    """What this rank lends to `worker`."""
    pieces = tuple(product(places, chunks))
    return Share(ranks[worker], layout.rows(pieces), pieces)


def _read(
    holder: int,
    chunks: Sequence[int],
    places: Sequence[int],
    layout: ZoneLayout,
    index: int,
    ranks: Sequence[int],
) -> Share:
    """What this rank reads of `holder`, which may be itself."""
    pieces = tuple(product(places, chunks))
    if holder == index:
        return Share(None, layout.rows(pieces), pieces)
    return Share(
        ranks[holder], Rows(sum(layout.cuts[p].tokens(chunks) for p in places), None), pieces
    )


def name_pieces(pieces: Iterable[Piece], sequences: Sequence[int]) -> str:
    """Which chunks of which sequences they are; sequences: their ids, by place."""
    chunks: dict[int, list[int]] = {}
    for place, chunk in pieces:
        chunks.setdefault(sequences[place], []).append(chunk)
    return (
        ", ".join(f"chunks {held} of sequence {sequence}" for sequence, held in chunks.items())
        or "nothing"
    )
