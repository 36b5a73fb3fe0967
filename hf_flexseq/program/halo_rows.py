"""Which keys a rank gathers before a kernel call, and where they are: its *halo* (`halo.py`).

A sequence is a unit of one node, and the halo of a slice goes along the path of its node: it is
the end of the node's tokens before the slice, then the end of the node above, and so on, as far as
the layer reads. A key that several branches or slices read is gathered once, and then listed for
each of them; its gradients are summed there, and go back to its owner once.

Which tokens a rank reads follows from the layout and the units alone, so every rank can list the
keys that it sends and receives without asking. Rejected: ring steps over units; a step's queries
of one chunk would read keys of another in many small pieces.
"""

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.attention_schedule import ChunkKey
from hf_flexseq.plan.blocks import Range
from hf_flexseq.plan.units import UnitLayout, plain_layout
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.halo import HaloZone
from hf_flexseq.program.instructions import RowsSpec
from hf_flexseq.program.ring_steps import ChunkRows, ZoneLayout


class Part(NamedTuple):
    """Tokens of one chunk that a rank reads and does not hold."""

    key: ChunkKey
    start: int
    stop: int


def halo_zone(
    rows: slice,
    layout: ZoneLayout,
    reach: Reach,
    channel: Channel,
    trees: Sequence[UnitLayout | None] = (),
) -> HaloZone:
    """Make this rank's part in a group.

    rows: of the zone among all rows of the rank. layout: the chunks of the group's ranks. reach:
    which keys a query reads. trees: of each sequence, None for a plain one; none if all are plain.
    """
    tables = layout.tables
    reader = _Reader(layout, reach, trees or (None,) * len(layout.cuts))
    # 1. this rank's rows that others read
    sent = []
    for index, parts in sorted(reader.sent().items()):
        ranges = [layout.range_of(part.key, part.start, part.stop) for part in parts]
        sent.append(_message(layout.ranks[index], tables.rows(ranges), parts))

    # 2. the rows of others that this rank reads, after its own
    received = []
    places = _Places(layout)
    row = layout.tokens
    for index, parts in sorted(reader.received().items()):
        first = row
        for part in parts:
            places.add(part, row)
            row += part.stop - part.start
        received.append(_message(layout.ranks[index], RowsSpec(row - first), parts))

    # 3. the kernel call: a sequence for each span of queries
    ranges = []
    q_lens = []
    k_lens = []
    for sequence in range(len(layout.cuts)):
        for queries, keys in reader.spans(sequence):
            q_lens.append(queries)
            k_lens.append(sum(stop - start for start, stop in keys))
            for start, stop in keys:
                ranges += places.rows_of(sequence, start, stop)
    call = tables.call(q_lens, k_lens, causal=True, window=reach.window)
    return HaloZone(
        rows=rows,
        tokens=layout.tokens,
        channel=channel,
        sent=sent,
        received=received,
        key_rows=tables.listed(ranges),
        call=call,
    )


def _message(peer: int, rows: RowsSpec, parts: Sequence[Part]) -> ChunkRows:
    return ChunkRows(peer, rows, tuple(dict.fromkeys(part.key for part in parts)))


class _Reader:
    """Finds which tokens the queries of a rank read."""

    def __init__(
        self, layout: ZoneLayout, reach: Reach, trees: Sequence[UnitLayout | None]
    ) -> None:
        self._layout = layout
        self._reach = reach
        self._is_plain = [tree is None for tree in trees]
        self._trees = []
        for cut, tree in zip(layout.cuts, trees, strict=True):
            self._trees.append(plain_layout(cut.bounds[-1]) if tree is None else tree)

    def _pieces(self, sequence: int, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces of a sequence that a rank holds, in the order of its rows: a node, and
        positions [start, stop) on its path."""
        tree = self._trees[sequence]
        bounds = self._layout.cuts[sequence].bounds
        for chunk in self._layout.held(sequence, index):
            for node, start, stop in tree.pieces(bounds[chunk], bounds[chunk + 1]):
                shift = tree.before[node] - tree.starts[node]  # from tokens to positions
                yield node, start + shift, stop + shift

    def spans(self, sequence: int) -> Iterator[tuple[int, list[Range]]]:
        """Yield the spans of queries that this rank holds of a sequence, in the order of its rows:
        the number of queries, and the tokens that they read."""
        for node, start, stop in self._pieces(sequence, self._layout.index):
            for span in self._reach.spans(start, stop):
                yield span.queries, self._trees[sequence].ranges(node, span.first_key, span.stop)

    def _read(self, sequence: int, index: int) -> list[Range]:
        """Return the tokens of a sequence that a rank reads, its own among them, ascending."""
        read: list[Range] = []
        for node, start, stop in self._pieces(sequence, index):
            first_key = self._reach.first_key(start)
            read += self._trees[sequence].ranges(node, first_key, stop)
        return _joined(read)

    def received(self) -> dict[int, list[Part]]:
        """Return the tokens that this rank reads from others, by index of the rank that holds
        them: by sequence, chunk and token."""
        layout = self._layout
        found: dict[int, list[Part]] = defaultdict(list)
        for sequence, cut in enumerate(layout.cuts):
            own = layout.held(sequence, layout.index)
            for start, stop in self._read(sequence, layout.index):
                chunk = bisect_right(cut.bounds, start) - 1
                while chunk < len(cut.bounds) - 1 and cut.bounds[chunk] < stop:
                    part = _common(sequence, chunk, cut.bounds, start, stop)
                    if part is not None and chunk not in own:
                        found[layout.holder(sequence, chunk)].append(part)
                    chunk += 1
        return found

    def sent(self) -> dict[int, list[Part]]:
        """Return the tokens that others read from this rank, by index of the reader: by sequence,
        chunk and token."""
        layout = self._layout
        found: dict[int, list[Part]] = defaultdict(list)
        for sequence, cut in enumerate(layout.cuts):
            own = sorted(layout.held(sequence, layout.index))
            for reader in self._readers(sequence):
                read = self._read(sequence, reader)
                for chunk in own:
                    for start, stop in read:
                        part = _common(sequence, chunk, cut.bounds, start, stop)
                        if part is not None:
                            found[reader].append(part)
        return found

    def _readers(self, sequence: int) -> set[int]:
        """Return the indices of other ranks that may read tokens of this one. Of a plain sequence
        the next chunks alone are looked at: to ask all ranks about all others would take a time
        that grows with the square of their number."""
        layout = self._layout
        bounds = layout.cuts[sequence].bounds
        found: set[int] = set()
        for chunk in layout.held(sequence, layout.index):
            for later in range(chunk + 1, len(bounds) - 1):
                first_key = self._reach.first_key(bounds[later])
                if self._is_plain[sequence] and first_key >= bounds[chunk + 1]:
                    break
                found.add(layout.holder(sequence, later))
        return found - {layout.index}


def _common(
    sequence: int, chunk: int, bounds: Sequence[int], start: int, stop: int
) -> Part | None:
    """Return the tokens of a chunk among [start, stop), if there are any."""
    low, high = max(start, bounds[chunk]), min(stop, bounds[chunk + 1])
    return Part((sequence, chunk), low, high) if low < high else None


class _Places:
    """Where the tokens stand that a rank has gathered."""

    def __init__(self, layout: ZoneLayout) -> None:
        # of each sequence, ascending: first token, token after the last one, row
        self._placed: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for sequence, cut in enumerate(layout.cuts):
            for chunk in layout.held(sequence, layout.index):
                start, stop = cut.bounds[chunk : chunk + 2]
                row, _ = layout.range_of((sequence, chunk), start, stop)
                if start < stop:
                    insort(self._placed[sequence], (start, stop, row))

    def add(self, part: Part, row: int) -> None:
        """Take a part whose first token is in `row`."""
        insort(self._placed[part.key[0]], (part.start, part.stop, row))

    def rows_of(self, sequence: int, start: int, stop: int) -> list[Range]:
        """Return the rows of tokens [start, stop), as ranges."""
        ranges = []
        placed = self._placed[sequence]
        index = max(0, bisect_right(placed, start, key=itemgetter(0)) - 1)
        while index < len(placed) and placed[index][0] < stop:
            low, high, row = placed[index]
            first, last = max(low, start), min(high, stop)
            if first < last:
                ranges.append((row + first - low, row + last - low))
            index += 1
        assert sum(b - a for a, b in ranges) == stop - start, "tokens that were not gathered"
        return ranges


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """Return ranges in ascending order, overlapping and adjacent ones as one."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined
