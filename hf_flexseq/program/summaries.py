"""Summaries of segments: which ones a rank sends, receives, and how it combines them.

A state goes from a segment to all segments that go on from it, and gradients of states come back
as sums:

    forward     state after a segment  =  transition (state before it)  +  end state from zero
    backward    gradient before a segment
                    =  transposed transition (gradient after it)  +  from its own outputs
                gradient after a segment
                    =  sum of the gradients before all segments that go on from it

A rank computes these for all segments before its own (forward) or after them (backward), each
once, *level* by level: a level has the segments of one depth in the trees. In a chain a level has
one segment, which takes the last one's result.

Of the branches of a unit only sums go to other ranks. A rank that holds a segment, and all
segments that go on from it, computes the gradient before the segment alone, and one row has the
sum for all segments that go on from the same one (`SegmentTree.folded`). So a rank receives few
rows from each other rank, however many branches a unit has.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hf_flexseq.plan.segments import SegmentKey, SegmentTree
from hf_flexseq.plan.units import ROOT
from hf_flexseq.program.instructions import RowsSpec
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.zone_segments import RowMessages, ZoneSegments


class Link(NamedTuple):
    """Sums of states: the ways from the states that are given to the places that take their
    sums."""

    given: RowsSpec
    """The states that are taken, one for each way."""
    places: int | None
    """Number of an index array: the place to which each is added. None where each goes to a
    separate place, in order."""
    takers: int
    """Number of places."""


class Level(NamedTuple):
    """Results that depend on results of earlier levels alone.

    Its first results continue others: a transition is applied to the sum of these. The further
    ones are summaries as they are.
    """

    start: int
    """The first of its results among all of them."""
    transition: int
    """The first of their transitions among all that are applied."""
    link: Link
    """From all results to this level's results that continue others."""


class Stage(NamedTuple):
    """Summaries that become *results*: the state after a segment, or the gradient of the state
    before it."""

    results: RowsSpec
    """The summaries of these, level by level, among those that the stage is given."""
    transitions: RowsSpec
    """The transitions that are applied, level by level, among those that the stage is given."""
    levels: tuple[Level, ...]
    """The levels with results that continue others."""


class Neighbours(NamedTuple):
    """Summaries of the segments before, or after, this rank's."""

    summarised: tuple[int, ...]
    """This rank's segments whose summaries are read, by others or here."""
    own: Stage
    """Their results without other ranks: of all summarised segments, in this order, with the
    transitions of this rank's segments between others."""
    rows: Link
    """From the results of `own` to the rows that others, or `every`, read."""
    middle: RowsSpec
    """The transitions that these rows have, as indices into the transitions of this rank's
    segments between others."""
    middle_rows: int
    """Number of an index array: the rows of these transitions."""
    messages: tuple[RowMessages, ...]
    """By group; they send rows."""
    received_rows: int
    every: Stage
    """Of [rows | received rows], with their transitions. If no messages are sent or received, with
    the transitions of this rank's segments between others."""
    taken: int
    """Number of an index array: the results of `every` that this rank's segments take."""
    takes: Link
    """From these to all segments of this rank."""
    takes_own: Link
    """From the results of `own` to all segments of this rank."""


SummaryKey = tuple[int, SegmentKey]  # (zone, segment)
Givers = Callable[[SummaryKey], Sequence[SummaryKey]]


def make_neighbours(
    zones: Sequence[ZoneSegments],
    segments: int,
    middle: Sequence[int],
    tables: Tables,
    *,
    after: bool,
) -> Neighbours:
    """Return the summaries that a rank needs. segments: number of this rank's. middle: this rank's
    segments with others before and after them."""
    place_in_middle = {number: place for place, number in enumerate(middle)}
    order = _Order(zones, after=after)
    transitions = {key: place_in_middle.get(number, -1) for key, number in order.held.items()}

    # 1. the results of this rank alone
    read = [key for key in order.held if order.is_read(key)]
    levels = [read]
    if any(order.own_givers(key) for key in read):
        levels = order.levels(read, order.own_givers)
        read = [key for level in levels for key in level]
    own_places = {key: place for place, key in enumerate(read)}
    own = _stage(levels, order.own_givers, own_places, transitions, tables)

    # 2. the rows of this rank, and those of others
    rows: dict[SummaryKey, int] = {}
    ways = []
    for key in read:
        if order.members(key):
            ways += [(own_places[member], len(rows)) for member in order.members(key)]
            rows[key] = len(rows)
    rows_link = _link(ways, len(rows), tables)
    own_rows = len(rows)
    with_transition = [key for key in rows if transitions[key] >= 0 and not order.is_whole(key)]
    middle_rows = tables.constant(tuple(rows[key] for key in with_transition))
    messages = []
    for index in range(len(zones)):
        made = _messages(index, order, rows, tables)
        if made.sent or made.received:
            messages.append(made)

    # 3. the results of all rows, and what each segment of this rank takes
    levels = order.levels(order.needed, order.givers)
    every = _stage(levels, order.givers, rows, rows if messages else transitions, tables)
    places = {key: place for place, key in enumerate(key for level in levels for key in level)}
    taken: dict[int, int] = {}  # result -> its place among those taken
    ways = []
    own_ways = []
    for key, number in order.held.items():
        own_ways += [(own_places[giver], number) for giver in order.own_givers(key)]
        for giver in order.givers(key):
            ways.append((taken.setdefault(places[giver], len(taken)), number))
    return Neighbours(
        summarised=tuple(order.held[key] for key in read),
        own=own,
        rows=rows_link,
        middle=_rows_of([transitions[key] for key in with_transition], tables),
        middle_rows=middle_rows,
        messages=tuple(messages),
        received_rows=len(rows) - own_rows,
        every=every,
        taken=tables.constant(tuple(taken)),
        takes=_link(ways, segments, tables),
        takes_own=_link(own_ways, segments, tables),
    )


class _Order:
    """Which results are needed, and which ones these depend on."""

    def __init__(self, zones: Sequence[ZoneSegments], *, after: bool) -> None:
        self.zones = zones
        self._after = after
        self.held: dict[SummaryKey, int] = {}
        """This rank's segments of sequences that have several, with their numbers."""
        # row -> places of those that it is the sum of
        self._members: dict[SummaryKey, list[int]] = {}
        needed: set[SummaryKey] = set()
        for index, zone in enumerate(zones):
            if after:
                for member, tree in zone.of_group.trees.items():
                    for place, members in tree.folded().items():
                        self._members[index, (member, place)] = members
            for number, one in zone.numbered():
                tree = zone.of_group.tree(one)
                if len(tree.segments) == 1:
                    continue
                self.held[index, (one.member, one.place)] = number
                if after and tree.wholes[one.place]:
                    continue
                for place in tree.beside(one.place, after=after):
                    key = (index, (one.member, place))
                    if not after or key in self._members:
                        needed.add(key)
        self.needed = sorted(needed)
        """The rows that results are computed of, of all ranks."""
        self._children: dict[SummaryKey, list[SummaryKey]] = defaultdict(list)
        self._own_children: dict[SummaryKey, list[SummaryKey]] = defaultdict(list)
        if after:
            for key in self.needed:
                self._children[self._parent(key)].append(key)
            for key in self.held:
                if self.tree(key).parents[key[1][1]] != ROOT:
                    self._own_children[self._parent(key)].append(key)

    def tree(self, key: SummaryKey) -> SegmentTree:
        """Return all segments of the sequence of one."""
        index, (member, _) = key
        return self.zones[index].of_group.trees[member]

    def _parent(self, key: SummaryKey) -> SummaryKey:
        index, (member, place) = key
        return (index, (member, self.tree(key).parents[place]))

    def is_whole(self, key: SummaryKey) -> bool:
        """Return True if a segment depends on results of its own rank alone."""
        return self._after and self.tree(key).wholes[key[1][1]]

    def is_read(self, key: SummaryKey) -> bool:
        """Return True if results of other segments depend on a segment's."""
        return self.tree(key).has_any(key[1][1], after=not self._after)

    def readers(self, key: SummaryKey) -> set[int]:
        """Return the indices of the ranks that hold segments which depend on one."""
        tree = self.tree(key)
        places = tree.beside(key[1][1], after=not self._after)
        return {tree.segments[place].holder for place in places}

    def members(self, key: SummaryKey) -> list[SummaryKey]:
        """Return the segments whose results the row of one is the sum of; none if it has no row of
        its own."""
        if not self._after:
            return [key]
        index, (member, _) = key
        return [(index, (member, place)) for place in self._members.get(key, ())]

    def givers(self, key: SummaryKey) -> Sequence[SummaryKey]:
        """Return the rows whose results a segment continues."""
        if self._after:
            return () if self.is_whole(key) else self._children.get(key, ())
        parent = self._parent(key)
        return () if parent[1][1] == ROOT else (parent,)

    def own_givers(self, key: SummaryKey) -> Sequence[SummaryKey]:
        """Return the segments of this rank whose results one continues, without other ranks."""
        return self._own_children.get(key, ()) if self.is_whole(key) else ()

    def levels(self, keys: Collection[SummaryKey], givers: Givers) -> list[list[SummaryKey]]:
        """Return segments by depth, in the order in which results can be computed; of each depth
        the segments that continue others first."""
        by_depth: dict[int, list[SummaryKey]] = defaultdict(list)
        for key in keys:
            by_depth[self.tree(key).depths[key[1][1]]].append(key)
        levels = []
        for _, level in sorted(by_depth.items(), reverse=self._after):
            levels.append(sorted(level, key=lambda key: not givers(key)))
        return levels


def _stage(
    levels: Sequence[Sequence[SummaryKey]],
    givers: Givers,
    rows: Mapping[SummaryKey, int],
    transitions: Mapping[SummaryKey, int],
    tables: Tables,
) -> Stage:
    """Return the stage of these results. rows, transitions: indices of each segment's summary and
    transition among the inputs of the stage."""
    keys = [key for level in levels for key in level]
    places = {key: place for place, key in enumerate(keys)}
    made = []
    applied: list[int] = []
    start = 0
    for level in levels:
        continuing = [key for key in level if givers(key)]
        ways = [
            (places[giver], place) for place, key in enumerate(continuing) for giver in givers(key)
        ]
        if continuing:
            link = _link(ways, len(continuing), tables)
            made.append(Level(start=start, transition=len(applied), link=link))
            applied += [transitions[key] for key in continuing]
        start += len(level)
    return Stage(
        results=_rows_of([rows[key] for key in keys], tables),
        transitions=_rows_of(applied, tables),
        levels=tuple(made),
    )


def _messages(
    index: int, order: _Order, rows: dict[SummaryKey, int], tables: Tables
) -> RowMessages:
    """Return the messages of a zone's rows, and add other ranks' rows to `rows`."""
    zone = order.zones[index]
    of_group = zone.of_group
    # 1. the rows that go to others: to all before, or behind, what they are about
    given: dict[int, list[SummaryKey]] = defaultdict(list)  # by reader
    for key in rows:
        if key[0] == index and key in order.held:
            for holder in order.readers(key) - {of_group.own}:
                given[holder].append(key)
    sent = []
    for holder, keys in sorted(given.items()):
        ranges = [(rows[key], rows[key] + 1) for key in sorted(keys)]
        sent.append((of_group.ranks[holder], tables.rows(ranges)))

    # 2. those that come from others
    wanted: dict[int, list[SummaryKey]] = defaultdict(list)  # by holder
    for key in order.needed:
        holder = of_group.segment(key[1]).holder if key[0] == index else of_group.own
        if holder != of_group.own:
            wanted[holder].append(key)
    received = []
    for holder, keys in sorted(wanted.items()):
        for key in keys:
            rows[key] = len(rows)
        received.append((of_group.ranks[holder], len(keys)))
    return RowMessages(zone.channel, "summaries of segments", tuple(sent), tuple(received))


def _rows_of(numbers: Sequence[int], tables: Tables) -> RowsSpec:
    """Return rows by their numbers."""
    return tables.order(np.array(numbers, dtype=np.int64))


def _link(ways: Sequence[tuple[int, int]], takers: int, tables: Tables) -> Link:
    """Return the link of pairs (state that is given, place that takes it)."""
    given = _rows_of([way[0] for way in ways], tables)
    places = [way[1] for way in ways]
    if places == list(range(takers)):
        return Link(given, None, takers)
    return Link(given, tables.constant(tuple(places)), takers)
