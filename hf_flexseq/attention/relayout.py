"""Rows of a group's tokens on their way from one layout to another, both known to all ranks of the
group.

A layout is a list of slices for every rank, in the order of its rows. Every rank is sent what it
wants by those who hold it; several may want the same tokens, but only one holds each.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.turns import Rows
from hf_flexseq.distributed.communicator import Channel, Exchange
from hf_flexseq.plan.shard import Slice

Slices = Sequence[Slice]


class Overlap(NamedTuple):
    """Tokens that one rank holds and another one wants, and where its rows of them begin on either
    side."""

    tokens: Slice
    held_row: int
    wanted_row: int


class Relocation(NamedTuple):
    """Tensors on their way into the rows of `results`."""

    exchange: Exchange
    arriving: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
    results: tuple[torch.Tensor, ...]

    def wait(self) -> tuple[torch.Tensor, ...]:
        self.exchange.wait()
        for index, parts in self.arriving:
            for result, part in zip(self.results, parts, strict=True):
                result[index] = part
        return self.results


class Relayout:
    """This rank's part in one change of layout."""

    __slots__ = ("channel", "fetched", "held", "index", "lent", "own", "tokens", "wanted")

    def __init__(
        self,
        held: Sequence[Slices],
        wanted: Sequence[Slices],
        index: int,
        channel: Channel,
        device: torch.device,
    ) -> None:
        """held, wanted: the layouts, by place in the group. index: this rank's place."""
        self.held, self.wanted, self.index, self.channel = held, wanted, index, channel
        self.tokens = sum(piece.tokens for piece in wanted[index])
        others = [i for i in range(len(held)) if i != index]
        self.lent = {i: _rows(_overlaps(held[index], wanted[i]), device)[0] for i in others}
        self.fetched = {i: _rows(_overlaps(held[i], wanted[index]), device)[1] for i in others}
        self.own = _rows(_overlaps(held[index], wanted[index]), device)

    def post(self, tensors: Sequence[torch.Tensor], tag: int) -> Relocation:
        """Send rows of these, which are in the old layout, to those who want them."""
        exchange, ranks = Exchange(self.channel.label(self._describe)), self.channel.group.ranks
        for i, rows in self.lent.items():
            exchange.send([rows.take(x) for x in tensors], ranks[i])
        arriving = [
            (to.index, exchange.recv(tensors, to.tokens, ranks[i]))
            for i, to in self.fetched.items()
        ]
        exchange.post(self.channel.communicator, tag=self.channel.tag(tag))
        results = tuple(x.new_empty(self.tokens, *x.shape[1:]) for x in tensors)
        held, wanted = self.own
        arriving.append((wanted.index, tuple(held.take(x) for x in tensors)))
        return Relocation(exchange, arriving, results)

    def _describe(self, peer: int, sent: bool) -> str:
        place = peer - self.channel.group.start
        source, target = (self.index, place) if sent else (place, self.index)
        pieces = [overlap.tokens for overlap in _overlaps(self.held[source], self.wanted[target])]
        return "rows of " + ", ".join(
            f"tokens {x.start}-{x.stop - 1} of sequence {x.sequence}" for x in pieces
        )


def _overlaps(held: Slices, wanted: Slices) -> Iterator[Overlap]:
    """In the order of `wanted`."""
    of_sequence: dict[int, list[tuple[Slice, int]]] = {}
    row = 0
    for piece in held:
        of_sequence.setdefault(piece.sequence, []).append((piece, row))
        row += piece.tokens
    row = 0
    for want in wanted:
        for piece, held_row in of_sequence.get(want.sequence, ()):
            start, stop = max(piece.start, want.start), min(piece.stop, want.stop)
            if start < stop:
                tokens = Slice(sequence=want.sequence, start=start, stop=stop)
                yield Overlap(tokens, held_row + start - piece.start, row + start - want.start)
        row += want.tokens


def _rows(overlaps: Iterator[Overlap], device: torch.device) -> tuple[Rows, Rows]:
    """The rows of these tokens where they are held and where they are wanted."""
    found = list(overlaps)
    sides = (
        [(x.held_row, x.tokens.tokens) for x in found],
        [(x.wanted_row, x.tokens.tokens) for x in found],
    )
    indices = [
        torch.cat([torch.arange(0), *(torch.arange(row, row + n) for row, n in side)])
        for side in sides
    ]
    return tuple(Rows(len(index), index.to(device)) for index in indices)
