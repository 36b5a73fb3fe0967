"""Summaries of segments: which ones a rank sends, receives, and how it combines them.

A state goes from a segment to all that go on from it, and gradients of states come back as sums:

    forward     state after a segment  =  transition (state before it)  +  end state from zero
    backward    gradient before a segment
                    =  transposed transition (gradient after it)  +  from its own outputs
                gradient after a segment
                    =  sum of the gradients before all that go on from it

A rank computes these for all segments before its own (forward) or after them (backward), each
once, *level* by level: a level has the segments of one depth in the trees. In a chain a level has
one segment, which takes what the last one gave.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_flexseq.plan.units import ROOT
from hf_flexseq.program.instructions import Rows
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.zone_segments import RowMessages, SegmentKey, ZoneSegments


class Link(NamedTuple):
    """Sums of some states: the ways from what gives them to what takes them."""

    given: Rows
    """The states that are taken, one for each way."""
    places: int | None
    """Number of an index array: where each is added to. None where each goes to a place of its
    own, in order."""
    takers: int
    """Number of places."""


class Level(NamedTuple):
    """Results that depend on those of earlier levels alone.

    Its first results continue others: a transition is applied to the sum of these. The further
    ones are summaries as they are.
    """

    start: int
    """The first of its results among all of them."""
    transition: int
    """The first of their transitions among all that are applied."""
    link: Link
    """From all results to those of this level that continue others."""


class Neighbours(NamedTuple):
    """Summaries of the segments before, or after, those of this rank."""

    messages: tuple[RowMessages, ...]
    """By group; they send rows of the summaries."""
    summarised: tuple[int, ...]
    """This rank's segments whose summaries are read, by others or here: one row each."""
    middle: int
    """Number of an index array: rows of those between others, whose transition is read, too."""
    received_rows: int
    results: Rows
    """The summaries that are read here, level by level, each a row of [summaries | received]. Each
    becomes a *result*: the state after the segment, or the gradient of the state before it."""
    transitions: Rows
    """The transitions that are applied, level by level, each a row of [summaries | received];
    where nothing is exchanged, of the transitions of this rank's segments."""
    levels: tuple[Level, ...]
    """Those with results that continue others."""
    taken: int
    """Number of an index array: the results that this rank's segments take."""
    takes: Link
    """From these to all segments of this rank."""


def make_neighbours(
    zones: Sequence[ZoneSegments],
    segments: int,
    middle: Sequence[int],
    tables: Tables,
    *,
    after: bool,
) -> Neighbours:
    """Return the summaries that a rank needs. segments: number of this rank's. middle: those of
    them with others before and after them."""
    # 1. one row for each segment of this rank whose summary is read
    summarised: dict[int, int] = {}  # segment -> row
    for zone in zones:
        for number, one in zone.numbered():
            if zone.tree(one).beside(one.place, after=not after):
                summarised[number] = len(summarised)

    # 2. the rows of other ranks
    messages = []
    rows = len(summarised)
    row_of: list[dict[SegmentKey, int]] = []  # by zone
    for zone in zones:
        made, of_zone = _exchanged(zone, summarised, rows, tables, after=after)
        rows += sum(number for _, number in made.received)
        row_of.append(of_zone)
        if made.sent or made.received:
            messages.append(made)

    # 3. the results that are computed here, by level
    order = _Order(zones, after=after)
    keys = [key for level in order.levels for key in level]
    results = [row_of[zone][key] for zone, key in keys]
    place_of = {key: place for place, key in enumerate(keys)}
    levels = []
    applied: list[int] = []  # rows of the transitions
    start = 0
    for level in order.levels:
        ways = [
            (place_of[giver], place)
            for place, key in enumerate(level)
            for giver in order.givers(key)
        ]
        takers = len({place for _, place in ways})
        if takers:
            link = _link(ways, takers, tables)
            levels.append(Level(start=start, transition=len(applied), link=link))
            applied += results[start : start + takers]
        start += len(level)
    if not messages:
        place_in_middle = {summarised[segment]: place for place, segment in enumerate(middle)}
        applied = [place_in_middle[row] for row in applied]

    # 4. what each segment of this rank takes
    taken: dict[int, int] = {}  # result -> its place among those taken
    ways = []
    for index, zone in enumerate(zones):
        for number, one in zone.numbered():
            for giver in order.givers((index, (one.member, one.place))):
                place = taken.setdefault(place_of[giver], len(taken))
                ways.append((place, number))
    return Neighbours(
        messages=tuple(messages),
        summarised=tuple(summarised),
        middle=tables.constant(tuple(summarised[segment] for segment in middle)),
        received_rows=rows - len(summarised),
        results=tables.order(np.array(results, dtype=np.int64)),
        transitions=tables.order(np.array(applied, dtype=np.int64)),
        levels=tuple(levels),
        taken=tables.constant(tuple(taken)),
        takes=_link(ways, segments, tables),
    )


def _exchanged(
    zone: ZoneSegments, summarised: dict[int, int], rows: int, tables: Tables, *, after: bool
) -> tuple[RowMessages, dict[SegmentKey, int]]:
    """Return the messages of a zone's summaries, and the rows of all summaries that are read here.

    summarised: the row of each of this rank's segments. rows: number of rows so far.
    """
    row_of: dict[SegmentKey, int] = {}
    given: dict[int, set[SegmentKey]] = defaultdict(set)  # by reader
    wanted: dict[int, set[SegmentKey]] = defaultdict(set)  # by holder
    for number, one in zone.numbered():
        key = (one.member, one.place)
        tree = zone.tree(one)
        if number in summarised:
            row_of[key] = summarised[number]
        for place in tree.beside(one.place, after=not after):
            given[tree.segments[place].holder].add(key)
        for place in tree.beside(one.place, after=after):
            wanted[tree.segments[place].holder].add((one.member, place))

    # 1. those that go to others
    sent = []
    for index, keys in sorted(given.items()):
        if index != zone.own:
            places = [row_of[key] for key in sorted(keys)]
            ranges = [(place, place + 1) for place in places]
            sent.append((zone.rank(index), tables.rows(ranges)))

    # 2. those that come from others
    arrived = []
    for index, keys in sorted(wanted.items()):
        if index != zone.own:
            for key in sorted(keys):
                row_of[key] = rows
                rows += 1
            arrived.append((zone.rank(index), len(keys)))
    return RowMessages(zone.channel, "summaries of segments", tuple(sent), tuple(arrived)), row_of


Key = tuple[int, SegmentKey]  # (zone, segment)


class _Order:
    """The segments whose results a rank computes, in an order in which it can."""

    def __init__(self, zones: Sequence[ZoneSegments], *, after: bool) -> None:
        self._zones = zones
        self._after = after
        self._children: dict[Key, list[Key]] = defaultdict(list)
        by_depth: dict[int, list[Key]] = defaultdict(list)
        for index, zone in enumerate(zones):
            needed = {
                (one.member, place)
                for _, one in zone.numbered()
                for place in zone.tree(one).beside(one.place, after=after)
            }
            for member, place in sorted(needed):
                tree = zone.segments.trees[member]
                by_depth[len(tree.before(place))].append((index, (member, place)))
                parent = (index, (member, tree.parents[place]))
                self._children[parent].append((index, (member, place)))
        self.levels = []
        """The segments of each depth, those that continue others first."""
        for _, level in sorted(by_depth.items(), reverse=after):
            self.levels.append(sorted(level, key=lambda key: not self.givers(key)))

    def givers(self, key: Key) -> list[Key]:
        """Return the segments whose results go on to one: that before it, or those after it."""
        if self._after:
            return self._children.get(key, [])
        index, (member, place) = key
        parent = self._zones[index].segments.trees[member].parents[place]
        return [] if parent == ROOT else [(index, (member, parent))]


def _link(ways: Sequence[tuple[int, int]], takers: int, tables: Tables) -> Link:
    """Return the link of pairs (what is given, who takes it), by ascending taker."""
    given = tables.order(np.array([way[0] for way in ways], dtype=np.int64))
    places = [way[1] for way in ways]
    if places == list(range(takers)):
        return Link(given, None, takers)
    return Link(given, tables.constant(tuple(places)), takers)
