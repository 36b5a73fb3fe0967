"""A rank's segments in one group, and the rows that it exchanges about them."""

from collections.abc import Iterator
from typing import NamedTuple

from hf_flexseq.plan.segments import GroupSegments, HeldSegment
from hf_flexseq.program.exchange import Channel, Label
from hf_flexseq.program.instructions import RowsSpec


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
    """The segments of a rank in one group, among those of all its groups."""

    channel: Channel
    of_group: GroupSegments
    start: int
    """First row of the zone among all rows of the rank."""
    number: int
    """Number of its first segment among all segments of the rank."""

    def numbered(self) -> Iterator[tuple[int, HeldSegment]]:
        """Yield this rank's segments of the group with their numbers."""
        return enumerate(self.of_group.held, start=self.number)

    def middle(self) -> list[int]:
        """Return the numbers of this rank's segments that have others before and after them."""
        found = []
        for number, one in self.numbered():
            tree = self.of_group.tree(one)
            if all(tree.has_any(one.place, after=after) for after in (False, True)):
                found.append(number)
        return found
