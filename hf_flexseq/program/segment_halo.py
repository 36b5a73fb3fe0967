"""The halo of a convolution: the last rows before each segment of a rank, wherever they are.

A row that several branches of a unit read travels once to each rank that has any of them, and its
gradients are summed there before they go back.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_flexseq.program.instructions import RowsSpec
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.zone_segments import RowMessages, SegmentKey, ZoneSegments


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


def make_halo(
    zones: Sequence[ZoneSegments],
    lengths: Sequence[int],
    before: int,
    tables: Tables,
    *,
    goes_on: bool,
) -> Halo:
    """Return the halo of `before` rows, W - 1.

    lengths: tokens of each segment of this rank. goes_on: whether the first segment continues an
    earlier chunk.
    """
    # 1. the edges of this rank's segments
    tokens = np.array(lengths, dtype=np.int64)  # [segments]
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
    if goes_on:
        read[0] = zero_row + 1 + steps
    messages = []
    received = 0
    for zone in zones:
        made = _of_zone(zone, before, edges, tables, received, read)
        received += sum(rows for _, rows in made.received)
        if made.sent or made.received:
            messages.append(made)

    # 3. row j of a segment reads columns j to j + W - 1 of [before it | its own rows]
    own = np.searchsorted(edges, np.where(is_there, first_rows, 0))  # [segments, W - 1]
    columns = np.concatenate((read, own), axis=1)  # [segments, 2 W - 2]
    windows = np.lib.stride_tricks.sliding_window_view(columns, before + 1, axis=1)[:, :before]
    sources = windows[is_there]  # [segments, W - 1, W] -> [B, W]
    sources = np.where(sources < 0, len(edges) + received + sources - zero_row, sources)
    return Halo(
        messages=tuple(messages),
        edges=tables.index(edges),
        edge_rows=len(edges),
        received_rows=received,
        firsts=tables.index(first_rows[is_there]),
        sources=tables.index(np.ascontiguousarray(sources).reshape(-1)),
    )


def _of_zone(
    zone: ZoneSegments,
    before: int,
    edges: np.ndarray,
    tables: Tables,
    received: int,
    read: np.ndarray,
) -> RowMessages:
    """Return the messages of a halo of `before` rows, and write to `read` [segments, before] the
    sources of the rows before each segment of this zone.

    edges: this rank's rows at the edges of segments, ascending. received: rows that zones before
    this one receive.
    """
    rows = {(one.member, one.place): zone.start + one.row for one in zone.held}
    sent_rows, wanted = _first_tokens(zone, before)

    # 1. rows that go to others, found among the edges
    sent = []
    for index, pieces in sorted(sent_rows.items()):
        parts = []
        for key, first in sorted(pieces.items()):
            segment = zone.segment(key)
            parts.append(rows[key] + np.arange(first, segment.stop) - segment.start)
        places = np.searchsorted(edges, np.concatenate(parts))
        sent.append((zone.rank(index), RowsSpec(len(places), array=tables.index(places))))

    # 2. rows that come from others, after the edges
    arrived = []
    sources: dict[SegmentKey, tuple[int, int]] = {}  # -> (first token, its source)
    source = len(edges) + received
    for index, pieces in sorted(wanted.items()):
        first_source = source
        for key, first in sorted(pieces.items()):
            sources[key] = (first, source)
            source += zone.segment(key).stop - first
        arrived.append((zone.rank(index), source - first_source))

    # 3. the sources of the rows before each segment
    for number, one in zone.numbered():
        tree = zone.tree(one)
        for place, first, column in tree.rows_before(one.place, before):
            key = (one.member, place)
            segment = tree.segments[place]
            tokens = np.arange(first, segment.stop)
            last_column = column + segment.stop - first
            if segment.holder == zone.own:
                found = np.searchsorted(edges, rows[key] + tokens - segment.start)
            else:
                first_token, first_source = sources[key]
                found = first_source + tokens - first_token
            read[number, column:last_column] = found
    return RowMessages(zone.channel, "rows before segments", tuple(sent), tuple(arrived))


FirstTokens = dict[int, dict[SegmentKey, int]]  # by rank and segment: the first token of it


def _first_tokens(zone: ZoneSegments, before: int) -> tuple[FirstTokens, FirstTokens]:
    """Return the first token of each of this rank's segments that others read, by reader, and of
    each segment of others that this rank reads, by holder. All further tokens are read, too."""
    sent: FirstTokens = defaultdict(dict)
    wanted: FirstTokens = defaultdict(dict)
    if zone.channel.group.degree == 1:
        return sent, wanted
    for member, tree in zone.trees.items():
        for reader, segment in enumerate(tree.segments):
            for place, first, _ in tree.rows_before(reader, before):
                holder = tree.segments[place].holder
                if holder == segment.holder or zone.own not in (holder, segment.holder):
                    continue
                firsts = sent[segment.holder] if holder == zone.own else wanted[holder]
                key = (member, place)
                firsts[key] = min(first, firsts.get(key, first))
    return sent, wanted
