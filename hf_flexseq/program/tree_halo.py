"""Attention over units of rows with shared prefixes by ranks that hold slices of them, and layers
with a window or a chunk over units: each rank gathers the keys on the paths of its slices that its
queries read, and then makes one kernel call.

It is a halo (`halo.py`) along paths: the keys before a slice are the end of its node, then the end
of the node above, and so on. A key that several branches read is gathered once and then listed for
each of them; its gradients are summed there, and go back to its owner once.

Which tokens a rank reads follows from the layout and the trees alone, so every rank finds what it
sends and what it receives without asking. Rejected: ring steps over trees; a step's queries of one
chunk would read keys of another in many small pieces.
"""

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.attention_schedule import ChunkKey
from hf_flexseq.plan.units import ROOT, Node, UnitLayout, layout_of
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.halo import ChunkMessage, HaloZone, listed_rows
from hf_flexseq.program.instructions import RowsSpec
from hf_flexseq.program.ring_steps import ZoneLayout

Range = tuple[int, int]  # tokens [start, stop) of a unit


class Part(NamedTuple):
    """Tokens of one chunk that a rank reads and does not hold."""

    key: ChunkKey
    start: int
    stop: int


def tree_halo_zone(
    rows: slice,
    layout: ZoneLayout,
    reach: Reach,
    channel: Channel,
    trees: Sequence[UnitLayout | None],
) -> HaloZone:
    """Make this rank's part in a group.

    rows: of the zone among all rows of the rank. layout: the chunks of the group's ranks. reach:
    which keys a query reads. trees: of each sequence; None for a plain one.
    """
    tables = layout.tables
    reader = _Reader(layout, reach, trees)
    # 1. this rank's rows that others read
    sent = []
    for index, rank in enumerate(layout.ranks):
        if index == layout.index:
            continue
        parts = [part for part in reader.parts(index) if reader.holder(part) == layout.index]
        if parts:
            ranges = [layout.range_of(part.key, part.start, part.stop) for part in parts]
            keys = tuple(dict.fromkeys(part.key for part in parts))
            sent.append(ChunkMessage(rank, tables.rows(ranges), keys))

    # 2. the rows of others that this rank reads, after its own
    by_holder: dict[int, list[Part]] = defaultdict(list)
    for part in reader.parts(layout.index):
        by_holder[reader.holder(part)].append(part)
    received = []
    places = _Places(layout)
    row = layout.tokens
    for index, parts in sorted(by_holder.items()):
        tokens = 0
        for part in parts:
            places.add(part, row + tokens)
            tokens += part.stop - part.start
        keys = tuple(dict.fromkeys(part.key for part in parts))
        received.append(ChunkMessage(layout.ranks[index], RowsSpec(tokens), keys))
        row += tokens

    # 3. the kernel call: a sequence for each span of queries
    ranges = []
    q_lens = []
    k_lens = []
    for sequence in range(len(layout.cuts)):
        for queries, keys_of_span in reader.spans(sequence, layout.index):
            q_lens.append(queries)
            k_lens.append(sum(stop - start for start, stop in keys_of_span))
            for start, stop in keys_of_span:
                ranges += places.rows_of(sequence, start, stop)
    call = tables.call(q_lens, k_lens, causal=True, window=reach.window)
    return HaloZone(
        rows,
        layout.tokens,
        channel,
        sent=sent,
        received=received,
        key_rows=listed_rows(ranges, tables),
        call=call,
    )


class _Reader:
    """Finds which tokens the queries of a rank read."""

    def __init__(
        self, layout: ZoneLayout, reach: Reach, trees: Sequence[UnitLayout | None]
    ) -> None:
        self._layout = layout
        self._reach = reach
        self._trees = []
        for cut, tree in zip(layout.cuts, trees, strict=True):
            plain = (Node(ROOT, cut.bounds[-1]),)
            self._trees.append(layout_of(plain) if tree is None else tree)

    def spans(self, sequence: int, index: int) -> list[tuple[int, list[Range]]]:
        """Return the spans of queries that a rank holds of a sequence, in the order of its rows:
        the number of queries, and the tokens that they read."""
        tree = self._trees[sequence]
        bounds = self._layout.cuts[sequence].bounds
        found = []
        for chunk in self._layout.held(sequence, index):
            for node, start, stop in tree.pieces(bounds[chunk], bounds[chunk + 1]):
                shift = tree.before[node] - tree.starts[node]  # from tokens to positions
                for span in self._reach.spans(start + shift, stop + shift):
                    keys = tree.ranges(node, span.first_key, span.stop)
                    found.append((span.queries, keys))
        return found

    def parts(self, index: int) -> list[Part]:
        """Return what a rank reads of others, by sequence, chunk and token."""
        parts = []
        for sequence, cut in enumerate(self._layout.cuts):
            wanted = _joined(
                [keys for _, ranges in self.spans(sequence, index) for keys in ranges]
            )
            own = set(self._layout.held(sequence, index))
            for start, stop in wanted:
                chunk = bisect_right(cut.bounds, start) - 1
                while chunk < len(cut.bounds) - 1 and cut.bounds[chunk] < stop:
                    low = max(start, cut.bounds[chunk])
                    high = min(stop, cut.bounds[chunk + 1])
                    if low < high and chunk not in own:
                        parts.append(Part((sequence, chunk), low, high))
                    chunk += 1
        return parts

    def holder(self, part: Part) -> int:
        """Return the index of the rank that holds a part."""
        return self._layout.holder(*part.key)


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
        """Take a part whose first token stands in `row`."""
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
