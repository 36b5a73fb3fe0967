"""Rows of a group's tokens on their way from one layout to another, both known to all ranks of the
group.

A layout is a list of slices for every rank, in the order of its rows. Every rank is sent what its
new layout asks for by those that have it in the old one; several may ask for the same tokens, but
only one has each:

    old layout    rank 0: tokens 0-3    rank 1: tokens 4-7
    new layout    rank 0: tokens 2-5    rank 1: tokens 0-7

1. When made, a `Relayout` finds the rows that every pair of ranks exchanges, once.
2. `Relayout.post` sends rows of some values on their way, for any number of heads.
3. `Relocation.wait` returns the values in the new layout.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.plan.shard import Slice
from hf_flexseq.program.builder import Builder, Tables, Values
from hf_flexseq.program.exchange import Channel, Exchange, Label, post
from hf_flexseq.program.instructions import Rows

Slices = Sequence[Slice]


class Overlap(NamedTuple):
    """Tokens that one rank has in the old layout, and a rank, maybe another, in the new one."""

    tokens: Slice
    old_row: int  # where the tokens begin among the rows of the one rank
    new_row: int  # where the tokens begin among the rows of the other rank


class ArrivingRows(NamedTuple):
    """Some rows of the new layout, in a buffer by value."""

    rows: Rows  # where they belong in the new layout
    parts: Values  # by value, [rows, ...]


class Relocation(NamedTuple):
    """Values on their way to a new layout."""

    builder: Builder
    exchange: Exchange
    arriving: list[ArrivingRows]
    results: Values  # by value, [tokens of the new layout, ...], not yet filled

    def wait(self) -> Values:
        """Return every value as [tokens of the new layout, ...]."""
        self.exchange.wait()
        for rows, parts in self.arriving:
            for result, part in zip(self.results, parts, strict=True):
                self.builder.put(result, rows, part)
        return self.results


class Relayout:
    """This rank's part in one change of layout."""

    __slots__ = (
        "channel",
        "index",
        "new",
        "new_rows_kept",
        "old",
        "old_rows_kept",
        "rows_from",
        "rows_to",
        "tokens",
    )

    def __init__(
        self,
        old: Sequence[Slices],
        new: Sequence[Slices],
        index: int,
        channel: Channel,
        tables: Tables,
    ) -> None:
        """Find the rows that this rank sends and receives.

        old, new: the two layouts, by index in the group. index: this rank's index in the group.
        """
        self.old = old
        self.new = new
        self.index = index
        self.channel = channel
        self.tokens = sum(part.tokens for part in new[index])  # of this rank in the new layout

        # by index in the group: rows of the old layout that go there, of the new one that come
        self.rows_to: dict[int, Rows] = {}
        self.rows_from: dict[int, Rows] = {}
        for i in range(len(old)):
            if i != index:
                self.rows_to[i] = _old_rows(_overlaps(old[index], new[i]), tables)
                self.rows_from[i] = _new_rows(_overlaps(old[i], new[index]), tables)
        kept = _overlaps(old[index], new[index])
        self.old_rows_kept = _old_rows(kept, tables)
        self.new_rows_kept = _new_rows(kept, tables)

    def post(self, b: Builder, values: Values, message: int) -> Relocation:
        """Send rows of these values, each [tokens of the old layout, ...], to the ranks that have
        them in the new layout."""
        ranks = self.channel.group.ranks

        # 1. to and from other ranks
        exchange = Exchange(b, self.channel.tag(message), Label(self.channel, self._describe))
        for i, rows in self.rows_to.items():
            exchange.send(b.take_all(values, rows), ranks[i])
        arriving = []
        for i, rows in self.rows_from.items():
            parts = exchange.recv(values, rows.tokens, ranks[i])
            arriving.append(ArrivingRows(rows, parts))
        post(b, [exchange])

        # 2. what stays on this rank: [tokens of the old layout, ...] -> [kept, ...]
        results = tuple(b.empty((self.tokens, *x.shape[1:]), x.dtype) for x in values)
        kept = b.take_all(values, self.old_rows_kept)
        arriving.append(ArrivingRows(self.new_rows_kept, kept))
        return Relocation(b, exchange, arriving, results)

    def _describe(self, peer: int, sent: bool) -> str:
        """Name the tokens of a message to or from the global rank `peer`."""
        peer_index = peer - self.channel.group.start
        source = self.index if sent else peer_index
        target = peer_index if sent else self.index
        names = []
        for overlap in _overlaps(self.old[source], self.new[target]):
            tokens = overlap.tokens
            names.append(f"tokens {tokens.start}-{tokens.stop - 1} of sequence {tokens.sequence}")
        return "rows of " + ", ".join(names)


def _overlaps(old: Slices, new: Slices) -> list[Overlap]:
    """Return the tokens that both lists of slices have, in the order of `new`."""
    # 1. where the slices of the old layout begin, by sequence
    old_slices: dict[int, list[tuple[Slice, int]]] = {}
    row = 0
    for part in old:
        old_slices.setdefault(part.sequence, []).append((part, row))
        row += part.tokens

    # 2. what each slice of the new layout has in common with them
    overlaps = []
    row = 0
    for wanted in new:
        for part, old_row in old_slices.get(wanted.sequence, ()):
            start = max(part.start, wanted.start)
            stop = min(part.stop, wanted.stop)
            if start < stop:
                overlap = Overlap(
                    tokens=Slice(sequence=wanted.sequence, start=start, stop=stop),
                    old_row=old_row + start - part.start,
                    new_row=row + start - wanted.start,
                )
                overlaps.append(overlap)
        row += wanted.tokens
    return overlaps


def _old_rows(overlaps: Sequence[Overlap], tables: Tables) -> Rows:
    """Return the rows of these tokens in the old layout."""
    return tables.rows([_range(one.old_row, one) for one in overlaps])


def _new_rows(overlaps: Sequence[Overlap], tables: Tables) -> Rows:
    """Return the rows of these tokens in the new layout."""
    return tables.rows([_range(one.new_row, one) for one in overlaps])


def _range(start: int, overlap: Overlap) -> tuple[int, int]:
    return start, start + overlap.tokens.tokens
