"""Halos: the last rows before each segment of a rank, wherever they are.

    rows_before    of any layer
    path_call      of attention over a window, within chunks, or along the paths of units
    make_halo      of a convolution, from the rows at the edges of segments

The halo of a segment goes along its path: it is the end of the segment before it, then the end of
the one before that, and so on, as far as the layer reads. All rows that a segment reads of another
one are the last of it, so the longest of these ends travels, once to each rank that reads any of
it, however many branches of a unit do. Its gradients are summed there before they go back.

Which rows a rank reads follows from the layout and the units alone, so every rank can list the
rows that it sends and receives without asking.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.segments import GroupSegments, SegmentKey
from hf_flexseq.program.instructions import RowsSpec
from hf_flexseq.program.tables import IntArray, Tables
from hf_flexseq.program.zone_segments import RowMessages, ZoneSegments

Before = Callable[[int], int]  # position of a segment -> how many rows its first token reads


class RowsBefore(NamedTuple):
    """The rows before each of a rank's segments in one group. A *source* is the index of a row
    among [this rank's rows in the group | received rows]."""

    sent: tuple[tuple[int, IntArray], ...]
    """(peer, which of this rank's rows)."""
    received: tuple[tuple[int, int], ...]
    """(peer, number of rows), in their order."""
    sources: tuple[IntArray, ...]
    """By segment, the sources of the rows before it."""


def rows_before(segments: GroupSegments, before: Before) -> RowsBefore:
    """Return the rows before all segments of a rank."""
    rows = {(one.member, one.place): one.row for one in segments.held}
    sent_rows, wanted = _first_tokens(segments, before)

    # 1. rows that go to others
    sent = []
    for index, pieces in sorted(sent_rows.items()):
        parts = []
        for key, first in sorted(pieces.items()):
            segment = segments.segment(key)
            parts.append(rows[key] + np.arange(first, segment.stop) - segment.start)
        sent.append((segments.ranks[index], np.concatenate(parts)))

    # 2. rows that come from others, after this rank's
    received = []
    source_of = {key: row - segments.segment(key).start for key, row in rows.items()}  # of token 0
    source = segments.tokens
    for index, pieces in sorted(wanted.items()):
        first_source = source
        for key, first in sorted(pieces.items()):
            source_of[key] = source - first
            source += segments.segment(key).stop - first
        received.append((segments.ranks[index], source - first_source))

    # 3. the sources of the rows before each segment
    sources = []
    for one in segments.held:
        tree = segments.tree(one)
        parts = [np.arange(0)]
        for place, first in tree.rows_before(one.place, before(tree.befores[one.place])):
            tokens = np.arange(first, tree.segments[place].stop)
            parts.append(source_of[one.member, place] + tokens)
        sources.append(np.concatenate(parts[::-1]))
    return RowsBefore(tuple(sent), tuple(received), tuple(sources))


FirstTokens = dict[int, dict[SegmentKey, int]]  # by rank and segment: the first token of it


def _first_tokens(segments: GroupSegments, before: Before) -> tuple[FirstTokens, FirstTokens]:
    """Return the first token of each of this rank's segments that others read, by reader, and of
    each segment of others that this rank reads, by holder. All further tokens are read, too.

    Of a plain sequence only those segments after this rank's are looked at that may read it: to
    look at all of them would take a time that grows with the square of the number of ranks.
    """
    sent: FirstTokens = defaultdict(dict)
    wanted: FirstTokens = defaultdict(dict)
    for one in segments.held:
        tree = segments.tree(one)
        place = one.place
        for other, first in tree.rows_before(place, before(tree.befores[place])):
            holder = tree.segments[other].holder
            if holder != segments.own:
                _note(wanted[holder], (one.member, other), first)
        own = tree.segments[place]
        end = tree.befores[place] + own.tokens
        for after in tree.after(place):
            start = tree.befores[after]
            unread = start - before(start)  # positions before those that it reads
            reader = tree.segments[after].holder
            if unread < end and reader != segments.own:
                first = own.stop - min(own.tokens, end - unread)
                _note(sent[reader], (one.member, place), first)
            elif unread >= end and tree.is_chain:
                break
    return sent, wanted


def _note(firsts: dict[SegmentKey, int], key: SegmentKey, first: int) -> None:
    firsts[key] = min(first, firsts.get(key, first))


# ---- attention


def keys_before(segments: GroupSegments, reach: Reach) -> RowsBefore:
    """Return the keys before all segments of a rank that its queries read."""
    return rows_before(segments, lambda position: position - reach.first_key(position))


def path_call(
    segments: GroupSegments, found: RowsBefore, reach: Reach, tables: Tables
) -> tuple[RowsSpec, int]:
    """Return the keys, among [this rank's rows | received rows], and the number of the lengths of
    the call in which every segment's queries read the keys of their paths: a sequence for each
    span. found: the keys before them."""
    key_rows = [np.arange(0)]
    q_lens = []
    k_lens = []
    for one, before in zip(segments.held, found.sources, strict=True):
        tokens = segments.segment((one.member, one.place)).tokens
        start = segments.tree(one).befores[one.place]
        keys = np.concatenate((before, one.row + np.arange(tokens)))
        shift = start - len(before)  # position of the first of these keys
        for span in reach.spans(start, start + tokens):
            q_lens.append(span.queries)
            k_lens.append(span.keys)
            key_rows.append(keys[span.first_key - shift : span.stop - shift])
    rows = np.concatenate(key_rows)
    call = tables.call(q_lens, k_lens, causal=True, window=reach.window)
    return RowsSpec(len(rows), array=tables.index(rows)), call


# ---- convolutions


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
    edges: IntArray,
    tables: Tables,
    received: int,
    read: IntArray,
) -> RowMessages:
    """Return the messages of a halo of `before` rows, and write to `read` [segments, before] the
    sources of the rows before each segment of this zone.

    edges: this rank's rows at the edges of segments, ascending. received: rows that zones before
    this one receive.
    """
    found = rows_before(zone.of_group, lambda position: min(before, position))
    sent = []
    for peer, rows in found.sent:
        places = np.searchsorted(edges, zone.start + rows)
        sent.append((peer, tables.order(places)))
    tokens = zone.of_group.tokens
    for (number, _), sources in zip(zone.numbered(), found.sources, strict=True):
        own = np.searchsorted(edges, zone.start + sources)
        of_others = len(edges) + received + sources - tokens
        read[number, before - len(sources) :] = np.where(sources < tokens, own, of_others)
    return RowMessages(zone.channel, "rows before segments", tuple(sent), found.received)
