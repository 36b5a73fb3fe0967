"""Needs of a recurrent layer from other segments: the rows just before this rank's segments, and
summaries of all segments before them.

    convolution    the last W - 1 rows before a segment, its *halo*, come from their holders;
                   their gradients go back (`segment_halo.py`)
    scan           every rank sums up its segments, one *summary* row each; in the forward a rank
                   gets the rows of all segments before its own, in the backward the rows of all
                   segments that go on from them (`summaries.py`)

Either way whole rows travel, straight from rank to rank, in one post (`compile.of_rows`). The
messages of a rank follow from the trees of `plan/segments.py`, which are equal on all ranks.
"""

from collections.abc import Sequence

from hf_flexseq.plan.segments import segments_of
from hf_flexseq.plan.shard import Zone
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.segment_halo import Halo, make_halo
from hf_flexseq.program.summaries import Neighbours, make_neighbours
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.zone_segments import ZoneSegments


class RankSegments:
    """The segments of a rank in one micro-batch, in the order of its rows in attention."""

    __slots__ = ("_goes_on", "_halos", "_neighbours", "_tables", "_zones", "lengths", "middle")

    def __init__(self, zones: Sequence[Zone], tables: Tables, *, goes_on: bool = False) -> None:
        """Find the segments of all groups.

        zones: of this rank. tables: take the index arrays. goes_on: whether the first segment
        continues a sequence whose earlier part is carried from an earlier chunk.
        """
        self._goes_on = goes_on
        self._tables = tables
        self._zones: list[ZoneSegments] = []
        lengths: list[int] = []
        middle: list[int] = []
        for number, zone in enumerate(zones):
            channel, of_group = Channel(zone.group, number), segments_of(zone)
            of_zone = ZoneSegments(channel, of_group, zone.start, number=len(lengths))
            self._zones.append(of_zone)
            middle += of_zone.middle()
            lengths += of_group.lengths()
        self.lengths = tuple(lengths)
        """Tokens of each segment."""
        self.middle = tuple(middle)
        """Segments that have others of their sequence before and after them."""
        self._halos: dict[int, Halo] = {}
        self._neighbours: dict[bool, Neighbours] = {}

    def halo(self, width: int) -> Halo:
        """Return the halo of a convolution over `width` rows."""
        if width not in self._halos:
            self._halos[width] = make_halo(
                self._zones, self.lengths, width - 1, self._tables, goes_on=self._goes_on
            )
        return self._halos[width]

    def neighbours(self, *, after: bool) -> Neighbours:
        """Return the needed summaries: of earlier segments, or of later ones in the backward."""
        if after not in self._neighbours:
            self._neighbours[after] = make_neighbours(
                self._zones, len(self.lengths), self.middle, self._tables, after=after
            )
        return self._neighbours[after]
