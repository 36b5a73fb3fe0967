"""A rank's segments in one group, and the rows that it exchanges about them."""

from collections.abc import Iterator
from typing import NamedTuple

from hf_flexseq.plan.segments import HeldSegment, Segment, SegmentTree
from hf_flexseq.program.exchange import Channel, Label
from hf_flexseq.program.instructions import RowsSpec

SegmentKey = tuple[int, int]  # (index of the sequence in the group, place in its tree)


class RowMessages(NamedTuple):
    """Rows that travel between this rank and the others of one group."""

    channel: Channel
    what: str
    """Names the rows in errors."""
    sent: tuple[tuple[int, RowsSpec], ...]
    """(peer, which of this rank's rows)."""
    received: tuple[tuple[int, int], ...]
    """(peer, number of rows), in the order in which the rows are received."""

    def label(self) -> Label:
        """Return the label that names these messages in errors."""
        return Label(self.channel, lambda peer, sent: self.what)


class ZoneSegments(NamedTuple):
    """The segments of a rank in one group."""

    channel: Channel
    trees: dict[int, SegmentTree]
    """All segments of each of its sequences, by index of the sequence in the group."""
    held: tuple[HeldSegment, ...]
    """This rank's segments, in row order."""
    own: int
    """Index of this rank in the group."""
    start: int
    """First row of the zone among all rows of the rank."""
    number: int
    """Number of its first segment among all segments of the rank."""

    def rank(self, index: int) -> int:
        """Return the rank of an index in the group."""
        return self.channel.group.ranks[index]

    def tree(self, one: HeldSegment) -> SegmentTree:
        """Return all segments of the sequence of one of this rank's."""
        return self.trees[one.member]

    def segment(self, key: SegmentKey) -> Segment:
        """Return one segment of any rank."""
        member, place = key
        return self.trees[member].segments[place]

    def numbered(self) -> Iterator[tuple[int, HeldSegment]]:
        """Yield this rank's segments of the group with their numbers."""
        return enumerate(self.held, start=self.number)

    def lengths(self) -> list[int]:
        """Return the tokens of each of this rank's segments."""
        return [self.segment((one.member, one.place)).tokens for one in self.held]

    def middle(self) -> list[int]:
        """Return the numbers of this rank's segments that have others before and after them."""
        found = []
        for number, one in self.numbered():
            tree = self.tree(one)
            if all(tree.has_any(one.place, after=after) for after in (False, True)):
                found.append(number)
        return found
