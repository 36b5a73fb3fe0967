"""Attention over a window, or within chunks of a sequence, by ranks that hold slices of it: each
gathers the few keys before its slices that its queries read, its *halo*, and then makes one kernel
call.

    window 4, rank 1 of three      0 0 0 0 0 0 1 1 1 1 1 1 2 2 2 2 2 2
                                         h h h s s s s s s                what rank 1 reads

1. A slice is a chunk of the strategy's layout: a rank has one of each sequence (`balanced`) or two
   (`zigzag`, `allgather`). Its halo is cut at the start of the sequence, and at the start of the
   queries' chunk where the layer has chunks. It may lie on several ranks, where slices are shorter
   than a window; it comes straight from each of them. No other key travels.
2. One kernel call takes every slice as a sequence of its own over [halo | slice], causal with a
   left window; of a layer with chunks, every part of a slice that is in one chunk.
3. Backward: the gradients of the halo's keys and values go back to their owners, in float32
   (float64 for float64), and are added there.

The gathering itself, and all instructions, are those of `gathered.py`. Which part of a chunk a
rank reads follows from the layout alone, so every rank finds what it sends and what it receives
without asking: always the end of the chunk, from the first key of the reader's next slice on.

Rejected: a ring that skips the blocks that no query reads. It would call the kernel for every
block, and masks on both edges of a block are not what kernels have.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from hf_flexseq.layers import Reach, Span
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.gathered import ChunkMessage, GatheredZone, Leg, listed
from hf_flexseq.program.instructions import Rows
from hf_flexseq.program.turns import ZoneLayout
from hf_flexseq.schedule.attention import ChunkKey


class Piece(NamedTuple):
    """The end of a chunk, as another rank reads it; positions in the sequence."""

    key: ChunkKey

    first: int
    """The first token that is read."""

    stop: int
    """One past the last token of the chunk."""


def halo_zone(rows: slice, layout: ZoneLayout, reach: Reach, channel: Channel) -> GatheredZone:
    """Make this rank's part in a group.

    rows: of the zone among all rows of the rank. layout: the chunks of the group's ranks.
    reach: which keys a query reads.
    """
    tables = layout.tables
    # 1. this rank's rows that others read
    sent = []
    for peer, pieces in sorted(_sent(layout, reach).items()):
        ranges = [layout.range_of(piece.key, piece.first, piece.stop) for piece in pieces]
        keys = tuple(piece.key for piece in pieces)
        sent.append(ChunkMessage(layout.ranks[peer], tables.rows(ranges), keys))

    # 2. the rows of others that this rank reads, behind its own
    received = []
    places: dict[ChunkKey, tuple[int, int]] = {}  # of each chunk: its first token here, its row
    row = layout.tokens
    for peer, pieces in sorted(_received(layout, reach).items()):
        tokens = 0
        for piece in pieces:
            places[piece.key] = (piece.first, row + tokens)
            tokens += piece.stop - piece.first
        keys = tuple(piece.key for piece in pieces)
        received.append(ChunkMessage(layout.ranks[peer], Rows(tokens), keys))
        row += tokens
    leg = Leg(layout.tokens, tuple(sent), tuple(received))

    # 3. the kernel call: a sequence for each span of queries
    ranges = []
    q_lens = []
    k_lens = []
    for sequence, cut in enumerate(layout.cuts):
        for chunk in layout.held(sequence, layout.index):
            for span in reach.spans(cut.bounds[chunk], cut.bounds[chunk + 1]):
                q_lens.append(span.queries)
                k_lens.append(span.keys)
                ranges += _key_ranges(layout, places, sequence, span)
    call = tables.call(q_lens, k_lens, causal=True, window=reach.window)
    return GatheredZone(rows, channel, [leg], listed(ranges, tables), call, keeps_keys=True)


def _received(layout: ZoneLayout, reach: Reach) -> dict[int, list[Piece]]:
    """Return what this rank reads of others, by index of the rank that holds it."""
    received: dict[int, list[Piece]] = defaultdict(list)
    for sequence, cut in enumerate(layout.cuts):
        for chunk, first in sorted(_read_before(layout, reach, sequence).items()):
            holder = layout.holder(sequence, chunk)
            received[holder].append(Piece((sequence, chunk), first, cut.bounds[chunk + 1]))
    return received


def _read_before(layout: ZoneLayout, reach: Reach, sequence: int) -> dict[int, int]:
    """Return, of each chunk of other ranks that this rank reads, the first token that is read."""
    bounds = layout.cuts[sequence].bounds
    own = layout.held(sequence, layout.index)
    first_read: dict[int, int] = {}
    # The earlier of two slices reads farther back, so it comes first.
    for slice_chunk in sorted(own):
        if bounds[slice_chunk] == bounds[slice_chunk + 1]:
            continue
        first_key = reach.first_key(bounds[slice_chunk])
        chunk = slice_chunk - 1
        while chunk >= 0 and bounds[chunk + 1] > first_key:
            if chunk not in own and bounds[chunk] < bounds[chunk + 1]:
                first_read.setdefault(chunk, max(bounds[chunk], first_key))
            chunk -= 1
    return first_read


def _sent(layout: ZoneLayout, reach: Reach) -> dict[int, list[Piece]]:
    """Return what other ranks read of this one, by index of the rank that reads it."""
    sent: dict[int, list[Piece]] = defaultdict(list)
    for sequence, cut in enumerate(layout.cuts):
        for chunk in sorted(layout.held(sequence, layout.index)):
            start, stop = cut.bounds[chunk : chunk + 2]
            if start == stop:
                continue
            for reader, first_key in _readers(layout, reach, sequence, chunk):
                sent[reader].append(Piece((sequence, chunk), max(start, first_key), stop))
    return sent


def _readers(
    layout: ZoneLayout, reach: Reach, sequence: int, chunk: int
) -> Iterator[tuple[int, int]]:
    """Yield (index of a rank, the first key that its next slice reads) for every other rank that
    reads a chunk of this rank."""
    bounds = layout.cuts[sequence].bounds
    seen = {layout.index}
    for later in range(chunk + 1, len(bounds) - 1):
        first_key = reach.first_key(bounds[later])
        if first_key >= bounds[chunk + 1]:
            return
        reader = layout.holder(sequence, later)
        if bounds[later] < bounds[later + 1] and reader not in seen:
            seen.add(reader)
            yield reader, first_key


def _key_ranges(
    layout: ZoneLayout, places: dict[ChunkKey, tuple[int, int]], sequence: int, span: Span
) -> list[tuple[int, int]]:
    """Return the rows [start, stop), among those gathered, of the keys of a span.

    places: of each chunk that has come from another rank, its first token and the row of that.
    """
    bounds = layout.cuts[sequence].bounds
    ranges = []
    chunk = bisect_right(bounds, span.first_key) - 1
    while chunk < len(bounds) - 1 and bounds[chunk] < span.stop:
        first = max(span.first_key, bounds[chunk])
        stop = min(span.stop, bounds[chunk + 1])
        if (sequence, chunk) in places:
            first_here, row = places[sequence, chunk]
            ranges.append((row + first - first_here, row + stop - first_here))
        elif first < stop:
            ranges.append(layout.range_of((sequence, chunk), first, stop))
        chunk += 1
    return ranges
