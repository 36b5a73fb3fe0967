"""The ranks of a sequence's tokens, in the order in which a recurrence goes through them.

Full attention may read tokens in any order. A recurrence must go from the first token of a row to
its last, across ranks; and a layer that reads few tokens reads the last ones before its own. A
*segment* is a contiguous range of tokens on one rank. The segments of a plain sequence, in token
order, are its *chain*:

    zigzag on two ranks, 8 tokens       0 0 1 1 1 1 0 0
    chain                               rank 0 [0, 2), rank 1 [2, 6), rank 0 [6, 8)

Adjacent chunks of one rank are one segment. A segment of a unit of rows is in one node, and
several may go on from it: the segments are a tree, and a chain is a tree without branches.
`tests/attention/recurrent` compares what goes along the trees with every row by itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hf_flexseq.plan.rings import chunks_per_rank
from hf_flexseq.plan.shard import Cut, Zone, contiguous_part, cuts, holder_of
from hf_flexseq.plan.units import ROOT, UnitLayout


class Segment(NamedTuple):
    """Consecutive tokens of one sequence on one rank."""

    holder: int
    """Index of its rank in the group."""
    start: int
    """First token, counted in the sequence."""
    stop: int
    """First token after the segment."""

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class SegmentTree:
    """The segments of one sequence. A *place* is the index of a segment in token order."""

    __slots__ = ("_stops", "befores", "depths", "is_chain", "parents", "segments", "wholes")

    def __init__(self, segments: Iterable[Segment], parents: Iterable[int]) -> None:
        """segments: in token order, which is depth first. parents: the place of the segment just
        before each one; `ROOT` for the first."""
        self.segments = tuple(segments)
        self.parents = tuple(parents)
        depths: list[int] = []
        befores: list[int] = []
        for parent in self.parents:
            is_first = parent == ROOT
            depths.append(0 if is_first else depths[parent] + 1)
            befores.append(0 if is_first else befores[parent] + self.segments[parent].tokens)
        self.is_chain = self.parents == tuple(range(ROOT, len(self.parents) - 1))
        """True for a plain sequence: each goes on from the one before it."""
        self.befores = tuple(befores)
        """Tokens of the path before each."""
        self.depths = tuple(depths)
        """Number of segments before each."""
        stops = list(range(1, len(self.segments) + 1))
        wholes = [True] * len(stops)
        for place in range(len(stops) - 1, 0, -1):
            parent = self.parents[place]
            stops[parent] = max(stops[parent], stops[place])
            is_one = self.segments[parent].holder == self.segments[place].holder
            wholes[parent] = wholes[parent] and wholes[place] and is_one
        self._stops = stops
        self.wholes = tuple(wholes)
        """For each segment True if its rank holds all that go on from it, too."""

    def before(self, place: int) -> list[int]:
        """Return the places of all segments before one, the farthest first."""
        found = []
        while self.parents[place] != ROOT:
            place = self.parents[place]
            found.append(place)
        return found[::-1]

    def after(self, place: int) -> range:
        """Return the places of all segments that go on from one, directly or not."""
        return range(place + 1, self._stops[place])

    def beside(self, place: int, *, after: bool) -> list[int] | range:
        """Return the places of all segments before one, or after it."""
        return self.after(place) if after else self.before(place)

    def has_any(self, place: int, *, after: bool) -> bool:
        """Return True if there are segments before one, or after it."""
        return self._stops[place] > place + 1 if after else self.parents[place] != ROOT

    def folded(self) -> dict[int, list[int]]:
        """Return the places of segments that represent others where the results of all segments
        that go on from one are summed, each with the places that it represents.

        A segment with any of another rank after it represents itself. Of the others, all segments
        of a rank that go on from the same such segment are represented by the first of them;
        segments further on are in their results.
        """
        found: dict[int, list[int]] = {}
        first_of: dict[tuple[int, int], int] = {}  # (parent, holder) -> the first place
        for place, (segment, parent) in enumerate(zip(self.segments, self.parents, strict=True)):
            if not self.wholes[place]:
                found[place] = [place]
            elif parent != ROOT and not self.wholes[parent]:
                first = first_of.setdefault((parent, segment.holder), place)
                found.setdefault(first, []).append(place)
        return found

    def rows_before(self, place: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield the last `rows` tokens before a segment, fewer at the start of its sequence, the
        nearest first: (place, first token)."""
        while rows and self.parents[place] != ROOT:
            place = self.parents[place]
            segment = self.segments[place]
            taken = min(rows, segment.tokens)
            rows -= taken
            yield place, segment.stop - taken


class HeldSegment(NamedTuple):
    """A segment of this rank, with its place in the tree of its sequence."""

    member: int
    """Index of the sequence in the group."""
    place: int
    """Index of the segment in the tree."""
    row: int
    """Row of its first token in the zone."""


SegmentKey = tuple[int, int]  # (index of the sequence in the group, place in its tree)


class GroupSegments(NamedTuple):
    """The segments of a group's sequences that one of its ranks has tokens of."""

    ranks: Sequence[int]
    """Global ranks of the group, by index."""
    own: int
    """Index of the rank."""
    trees: dict[int, SegmentTree]
    """All segments of each of these sequences, by index of the sequence in the group."""
    held: tuple[HeldSegment, ...]
    """The rank's segments, in row order."""

    @property
    def tokens(self) -> int:
        """Rows of the rank."""
        return sum(self.lengths())

    def tree(self, one: HeldSegment) -> SegmentTree:
        """Return all segments of the sequence of one of the rank's."""
        return self.trees[one.member]

    def segment(self, key: SegmentKey) -> Segment:
        """Return one segment of any rank."""
        member, place = key
        return self.trees[member].segments[place]

    def lengths(self) -> list[int]:
        """Return the tokens of each of the rank's segments."""
        return [self.segment((one.member, one.place)).tokens for one in self.held]


def segments_of(zone: Zone) -> GroupSegments:
    """Return the segments of the sequences with tokens in this zone."""
    group, lengths = zone.group, zone.lengths
    if chunks_per_rank(group.strategy):
        group_cuts = cuts(group.strategy, lengths, group.degree)
        found = segments_of_cuts(group_cuts, group.trees, group.ranks, zone.index)
    else:
        parts: list[Iterable[Segment]] = []
        tokens = sum(lengths)
        first, last = contiguous_part(tokens, zone.index, group.degree)
        offset = 0  # offset of the sequence in the concatenation
        for length in lengths:
            is_here = first < offset + length and offset < last
            parts.append(_contiguous(offset, length, tokens, group.degree) if is_here else ())
            offset += length
        found = _segments(parts, group.trees, group.ranks, zone.index)
    assert found.tokens == zone.stop - zone.start, "segments are not the rows of the zone"
    return found


def segments_of_cuts(
    group_cuts: Sequence[Cut],
    units: Sequence[UnitLayout | None],
    ranks: Sequence[int],
    index: int,
) -> GroupSegments:
    """Return the segments of sequences that are cut into chunks.

    group_cuts: of each sequence. units: of each sequence, None for a plain one; none if all are
    plain. ranks: of the group. index: of the rank.
    """
    return _segments([_chunks(cut, len(ranks)) for cut in group_cuts], units, ranks, index)


def _segments(
    parts: Sequence[Iterable[Segment]],
    units: Sequence[UnitLayout | None],
    ranks: Sequence[int],
    index: int,
) -> GroupSegments:
    """Return the segments that the parts of each sequence make. parts: in token order."""
    trees: dict[int, SegmentTree] = {}
    held = []
    row = 0
    units = units or (None,) * len(parts)
    for member, (of_one, unit) in enumerate(zip(parts, units, strict=True)):
        tree = _tree(of_one, unit)
        for place, segment in enumerate(tree.segments):
            if segment.holder == index:
                trees[member] = tree
                held.append(HeldSegment(member, place, row))
                row += segment.tokens
    return GroupSegments(ranks, index, trees, tuple(held))


def _tree(parts: Iterable[Segment], unit: UnitLayout | None) -> SegmentTree:
    """Return the parts, in token order, cut at the nodes of a unit, without empty ones, and with
    adjacent ones of a rank and a node joined."""
    segments: list[Segment] = []
    parents: list[int] = []
    last_of: dict[int, int] = {ROOT: ROOT}  # node -> place of its last segment so far
    for part in parts:
        if part.start == part.stop:
            continue
        pieces: Iterable[tuple[int, int, int]] = ((0, part.start, part.stop),)
        if unit is not None:
            pieces = unit.pieces(part.start, part.stop)
        for node, start, stop in pieces:
            last = last_of.get(node)
            if last is None:
                last = last_of[ROOT if unit is None else unit.nodes[node].parent]
            elif segments[last].holder == part.holder:
                segments[last] = segments[last]._replace(stop=stop)
                continue
            last_of[node] = len(segments)
            parents.append(last)
            segments.append(Segment(part.holder, start, stop))
    return SegmentTree(segments, parents)


def _chunks(cut: Cut, degree: int) -> Iterator[Segment]:
    """Yield the chunks of a sequence, possibly empty."""
    for chunk in range(len(cut.bounds) - 1):
        index = holder_of(chunk, degree, mirrored=cut.mirrored)
        yield Segment(index, cut.bounds[chunk], cut.bounds[chunk + 1])


def _contiguous(offset: int, length: int, tokens: int, degree: int) -> Iterator[Segment]:
    """Yield the parts of a sequence if the concatenation of all sequences is cut.

    offset: of the sequence in the concatenation. tokens: of all sequences.
    """
    end = offset + length
    index = ((offset + 1) * degree - 1) // tokens  # index of the part with the first token
    start = offset
    while start < end:
        _, part_stop = contiguous_part(tokens, index, degree)
        stop = min(part_stop, end)
        yield Segment(index, start - offset, stop - offset)
        start = stop
        index += 1
