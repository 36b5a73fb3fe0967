"""Needs of a recurrent layer from other ranks: the rows just before its segments, and what the
segments before them have summed up to.

    convolution    the last W - 1 rows before a segment, its *halo*, come from their holders;
                   their gradients go back
    scan           every rank sums up its segments, one *summary* row each; in the forward a rank
                   gets those of all segments before its own in the chains of its sequences, in
                   the backward those of all later ones

Either way whole rows travel, straight from rank to rank, in one post (`row_programs.py`). The
chains of `plan/segments.py`, equal on all ranks, say what a rank sends and receives.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hf_flexseq.plan.segments import Chains, HeldSegment, Segment, chains_of
from hf_flexseq.plan.shard import Zone
from hf_flexseq.program.exchange import Channel, Label
from hf_flexseq.program.instructions import Rows
from hf_flexseq.program.tables import Tables

SegmentKey = tuple[int, int]  # (index of the sequence in the group, place in its chain)

# ---- what travels


class RowMessages(NamedTuple):
    """Rows that travel between this rank and the others of one group."""

    channel: Channel
    what: str
    """Names the rows in errors."""
    sent: tuple[tuple[int, Rows], ...]
    """(peer, which of this rank's rows)."""
    received: tuple[tuple[int, int], ...]
    """(peer, number of rows), in the order in which the rows are received."""

    def label(self) -> Label:
        """Return what names these messages in errors."""
        return Label(self.channel, lambda peer, sent: self.what)


class Halo(NamedTuple):
    """The rows that the first rows of all segments read, for a convolution over W rows.

    Few rows are concerned: those at the edges of segments. A *source* is the index of a row among
    [edge rows | received rows | one row of zeros | W - 1 rows carried from an earlier chunk].
    """

    messages: tuple[RowMessages, ...]
    """By group; they send edge rows."""
    edges: int
    """Number of an index array: this rank's rows at the edges of segments, ascending."""
    edge_rows: int
    """Number of these rows."""
    received_rows: int
    firsts: int
    """Number of an index array: the first W - 1 rows of each segment, [B]."""
    sources: int
    """Number of an index array: the W sources that each of these reads, [B x W]."""


class Neighbours(NamedTuple):
    """Summaries of the segments before, or after, those of this rank."""

    messages: tuple[RowMessages, ...]
    """By group; they send rows of the summaries."""
    summarised: tuple[int, ...]
    """This rank's segments whose summaries other ranks read: one row each."""
    middle: int
    """Number of an index array: rows of those between others, whose transition is read, too."""
    received_rows: int
    steps: tuple[tuple[int, int], ...]
    """The state of a segment is made summary by summary, the farthest one first. By step the
    numbers of two index arrays: the segments that take a summary, and its rows among [summaries |
    received]."""


class RankSegments:
    """The segments of a rank in one micro-batch, in the order of its rows in attention."""

    __slots__ = ("_halos", "_neighbours", "_tables", "_zones", "goes_on", "lengths", "middle")

    def __init__(self, zones: Sequence[Zone], tables: Tables, *, goes_on: bool = False) -> None:
        """Find the chains of all groups.

        zones: of this rank. tables: take the index arrays. goes_on: whether the first segment is a
        part of a sequence, and what is before it is carried from an earlier chunk.
        """
        self.goes_on = goes_on
        self._tables = tables
        self._zones: list[_ZoneSegments] = []
        lengths: list[int] = []
        middle = []
        for number, zone in enumerate(zones):
            if zone.group.units:
                raise NotImplementedError(
                    "recurrent layers hand their state to one row, and rows of this step share "
                    "prefixes: set shared_prefixes='off'"
                )
            chains = chains_of(zone)
            channel = Channel(zone.group, number)
            self._zones.append(
                _ZoneSegments(channel, chains, zone.index, zone.start, len(lengths))
            )
            for one in chains.held:
                chain = chains.chains[one.member]
                if 0 < one.place < len(chain) - 1:
                    middle.append(len(lengths))
                lengths.append(chain[one.place].tokens)
        self.lengths = tuple(lengths)
        """Tokens of each segment."""
        self.middle = tuple(middle)
        """Segments that have others of their sequence before and after them."""
        self._halos: dict[int, Halo] = {}
        self._neighbours: dict[bool, Neighbours] = {}

    # ---- halos

    def halo(self, width: int) -> Halo:
        """Return the halo of a convolution over `width` rows."""
        if width not in self._halos:
            self._halos[width] = self._make_halo(width)
        return self._halos[width]

    def _make_halo(self, width: int) -> Halo:
        before = width - 1
        # 1. the edges of this rank's segments
        tokens = np.array(self.lengths, dtype=np.int64)  # [segments]
        starts = np.concatenate((np.zeros(1, dtype=np.int64), tokens.cumsum()[:-1]))[: len(tokens)]
        steps = np.arange(before)  # [W - 1]
        is_there = steps < tokens[:, None]  # [segments, W - 1]
        first_rows = starts[:, None] + steps
        last_rows = starts[:, None] + tokens[:, None] - 1 - steps
        edges = np.unique(np.concatenate((first_rows[is_there], last_rows[is_there])))
        # until the number of received rows is known: zeros, and from then on what is carried
        zero_row = -before - 1

        # 2. the sources of the rows before each segment: [segments, W - 1]
        read = np.full((len(tokens), before), zero_row)
        if self.goes_on:
            read[0] = zero_row + 1 + steps
        messages = []
        received = 0
        for zone in self._zones:
            made = zone.halo(before, edges, self._tables, received, read)
            received += sum(rows for _, rows in made.received)
            if made.sent or made.received:
                messages.append(made)

        # 3. row j of a segment reads columns j to j + W - 1 of [before it | its own rows]
        own = np.searchsorted(edges, np.where(is_there, first_rows, 0))  # [segments, W - 1]
        columns = np.concatenate((read, own), axis=1)  # [segments, 2 W - 2]
        windows = np.lib.stride_tricks.sliding_window_view(columns, width, axis=1)[:, :before]
        sources = windows[is_there]  # [segments, W - 1, W] -> [B, W]
        sources = np.where(sources < 0, len(edges) + received + sources - zero_row, sources)
        return Halo(
            messages=tuple(messages),
            edges=self._tables.index(edges),
            edge_rows=len(edges),
            received_rows=received,
            firsts=self._tables.index(first_rows[is_there]),
            sources=self._tables.index(np.ascontiguousarray(sources).reshape(-1)),
        )

    # ---- summaries

    def neighbours(self, *, after: bool) -> Neighbours:
        """Return the needed summaries: of earlier segments, or of later ones in the backward."""
        if after not in self._neighbours:
            self._neighbours[after] = self._make_neighbours(after)
        return self._neighbours[after]

    def _make_neighbours(self, after: bool) -> Neighbours:
        # 1. one row for each segment of this rank whose summary others read
        summarised: dict[int, int] = {}  # segment -> row
        for zone in self._zones:
            for segment in zone.wanted(after=after):
                summarised[segment] = len(summarised)

        # 2. the rows of other ranks
        messages = []
        needed: dict[int, list[int]] = {}  # segment -> rows, the farthest first
        rows = len(summarised)
        for zone in self._zones:
            made = zone.summaries(summarised, rows, needed, self._tables, after=after)
            rows += sum(number for _, number in made.received)
            if made.sent or made.received:
                messages.append(made)

        # 3. step by step
        steps = []
        longest = max((len(rows_of) for rows_of in needed.values()), default=0)
        for step in range(longest):
            takers = [segment for segment, rows_of in needed.items() if step < len(rows_of)]
            taken = [needed[segment][step] for segment in takers]
            steps.append(
                (self._tables.constant(tuple(takers)), self._tables.constant(tuple(taken)))
            )
        return Neighbours(
            messages=tuple(messages),
            summarised=tuple(summarised),
            middle=self._tables.constant(tuple(summarised[segment] for segment in self.middle)),
            received_rows=rows - len(summarised),
            steps=tuple(steps),
        )


class _ZoneSegments(NamedTuple):
    """The segments of a rank in one group."""

    channel: Channel
    chains: Chains
    own: int
    """Index of this rank in the group."""
    start: int
    """First row of the zone among all rows of the rank."""
    number: int
    """Number of its first segment among all segments of the rank."""

    def _rank(self, index: int) -> int:
        return self.channel.group.ranks[index]

    def _chain(self, one: HeldSegment) -> tuple[Segment, ...]:
        return self.chains.chains[one.member]

    # -- halos

    def halo(
        self, before: int, edges: np.ndarray, tables: Tables, received: int, read: np.ndarray
    ) -> RowMessages:
        """Return the messages of a halo of `before` rows, and write to `read` [segments, before]
        the sources of the rows before each segment of this zone.

        edges: this rank's rows at the edges of segments, ascending. received: rows that zones
        before this one receive.
        """
        rows = {(one.member, one.place): self.start + one.row for one in self.chains.held}

        # 1. rows that go to others, found among the edges
        sent = []
        for index, pieces in sorted(self._halos_of_others(before).items()):
            parts = []
            for key, first in sorted(pieces.items()):
                segment = self._segment(key)
                parts.append(rows[key] + np.arange(first, segment.stop) - segment.start)
            places = np.searchsorted(edges, np.concatenate(parts))
            sent.append((self._rank(index), Rows(len(places), array=tables.index(places))))

        # 2. rows that come from others, after the edges
        arrived = []
        sources: dict[SegmentKey, tuple[int, int]] = {}  # -> (first token, its source)
        source = len(edges) + received
        for index, pieces in sorted(self._halos_from_others(before).items()):
            first_source = source
            for key, first in sorted(pieces.items()):
                sources[key] = (first, source)
                source += self._segment(key).stop - first
            arrived.append((self._rank(index), source - first_source))

        # 3. the sources of the rows before each segment
        for number, one in enumerate(self.chains.held, start=self.number):
            chain = self._chain(one)
            for place, first in _in_halo(chain, one.place, before):
                key = (one.member, place)
                tokens = np.arange(first, chain[place].stop)
                if chain[place].holder == self.own:
                    found = np.searchsorted(edges, rows[key] + tokens - chain[place].start)
                else:
                    first_token, first_source = sources[key]
                    found = first_source + tokens - first_token
                read[number, tokens - (chain[one.place].start - before)] = found
        return RowMessages(self.channel, "rows before segments", tuple(sent), tuple(arrived))

    def _segment(self, key: SegmentKey) -> Segment:
        member, place = key
        return self.chains.chains[member][place]

    def _halos_from_others(self, before: int) -> dict[int, dict[SegmentKey, int]]:
        """Return the first token that this rank reads of each segment of others, by holder."""
        first_tokens: dict[int, dict[SegmentKey, int]] = defaultdict(dict)
        for one in self.chains.held:
            chain = self._chain(one)
            for place, first in _in_halo(chain, one.place, before):
                if chain[place].holder != self.own:
                    # The first segment of this rank reads farthest back, and comes first.
                    first_tokens[chain[place].holder].setdefault((one.member, place), first)
        return first_tokens

    def _halos_of_others(self, before: int) -> dict[int, dict[SegmentKey, int]]:
        """Return the first token of each segment of this rank that others read, by reader."""
        first_tokens: dict[int, dict[SegmentKey, int]] = defaultdict(dict)
        for one in self.chains.held:
            chain = self._chain(one)
            held = chain[one.place]
            for reader in chain[one.place + 1 :]:
                first = reader.start - before
                if held.stop <= first:
                    break
                if reader.holder != self.own:
                    key = (one.member, one.place)
                    first_tokens[reader.holder].setdefault(key, max(held.start, first))
        return first_tokens

    # -- summaries

    def wanted(self, *, after: bool) -> Iterable[int]:
        """Yield the segments whose summaries others read: any with a segment on the other side."""
        for number, one in enumerate(self.chains.held, start=self.number):
            if self._needed(one, after=not after):
                yield number

    def summaries(
        self,
        summarised: dict[int, int],
        rows: int,
        needed: dict[int, list[int]],
        tables: Tables,
        *,
        after: bool,
    ) -> RowMessages:
        """Return the messages of summaries, and write to `needed` the rows that each segment of
        this zone needs, the farthest first.

        summarised: the row of each of this rank's segments. rows: number of rows so far.
        """
        # 1. the summaries of this rank
        row_of: dict[SegmentKey, int] = {}
        for number, one in enumerate(self.chains.held, start=self.number):
            if number in summarised:
                row_of[one.member, one.place] = summarised[number]

        # 2. those that go to others: to all on the other side of the chain
        given: dict[int, set[SegmentKey]] = defaultdict(set)  # by reader
        for one in self.chains.held:
            for index in self._holders(one, after=not after):
                given[index].add((one.member, one.place))
        sent = []
        for index, keys in sorted(given.items()):
            places = [row_of[key] for key in sorted(keys)]
            sent.append((self._rank(index), tables.rows([(place, place + 1) for place in places])))

        # 3. those that come from others
        wanted: dict[int, set[SegmentKey]] = defaultdict(set)  # by holder
        for one in self.chains.held:
            for place in self._needed(one, after=after):
                holder = self._chain(one)[place].holder
                if holder != self.own:
                    wanted[holder].add((one.member, place))
        arrived = []
        for index, keys in sorted(wanted.items()):
            for key in sorted(keys):
                row_of[key] = rows
                rows += 1
            arrived.append((self._rank(index), len(keys)))

        # 4. the rows that each segment needs
        for number, one in enumerate(self.chains.held, start=self.number):
            places_before = self._needed(one, after=after)
            if places_before:
                needed[number] = [row_of[one.member, place] for place in places_before]
        return RowMessages(self.channel, "summaries of segments", tuple(sent), tuple(arrived))

    def _holders(self, one: HeldSegment, *, after: bool) -> set[int]:
        """Return the other ranks that hold segments before, or after, a segment."""
        chain = self._chain(one)
        return {chain[place].holder for place in self._needed(one, after=after)} - {self.own}

    def _needed(self, one: HeldSegment, *, after: bool) -> range:
        """Return the chain's places before, or after, a segment, the farthest first."""
        if after:
            return range(len(self._chain(one)) - 1, one.place, -1)
        return range(one.place)


def _in_halo(chain: Sequence[Segment], place: int, before: int) -> Iterator[tuple[int, int]]:
    """Yield (place, first token) of the `before` tokens before a segment, the nearest first."""
    first = chain[place].start - before
    for earlier in range(place - 1, -1, -1):
        segment = chain[earlier]
        if segment.stop <= first:
            return
        yield earlier, max(segment.start, first)
