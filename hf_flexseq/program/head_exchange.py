"""The two all-to-alls of Ulysses, between a share of the tokens and a share of the heads.

    seq_to_head    [my tokens, all heads, head_dim]  ->  [all tokens, my heads, head_dim]
    head_to_seq    [all tokens, my heads, head_dim]  ->  [my tokens, all heads, head_dim]

Several tensors travel in one message, and each may have another number of heads. Both directions
are posted by one call and waited for by another one, for something to compute in between.

Shares are of any size, none included. Of KV heads a rank is sent just those that its query heads
read, so several ranks may have one; their gradients are summed where they arrive, in float32
(float64 for float64): many ranks may share a KV head, and a 16-bit sum would lose with each.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.plan.head_layout import HeadLayout
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel, Label
from hf_flexseq.program.instructions import AllToAllSpec, Value
from hf_flexseq.program.tags import head_to_seq, seq_to_head

HeadRanges = tuple[tuple[range, ...], ...]  # by tensor, by rank


class ArrivingHeads(NamedTuple):
    """Tensors on their way to this rank, [my tokens, heads, head_dim] of every rank."""

    builder: Builder
    post: int
    received: Value  # flat, by rank
    tokens: int  # of all ranks
    heads: Sequence[int]  # by tensor: the heads that this rank is sent
    head_dim: int

    def wait(self) -> Values:
        """Return every tensor as [all tokens, my heads, head_dim], a view."""
        self.builder.wait(self.post)
        return self.builder.arrived_heads(self.received, self.tokens, self.heads, self.head_dim)


class HeadExchange(NamedTuple):
    """The exchanges of one Ulysses group, seen from one of its ranks."""

    channel: Channel
    ranks: Sequence[int]
    """Global, contiguous."""
    own: int
    """Index of this rank among them."""
    tokens: Sequence[int]
    """Of each rank."""

    def seq_to_head(
        self, b: Builder, tensors: Values, pieces: Sequence[HeadRanges]
    ) -> list[ArrivingHeads]:
        """Post each [my tokens, all heads, head_dim] -> [all tokens, my heads, head_dim], piece by
        piece of the heads.

        pieces: the heads that each rank is sent with a piece.
        """
        head_dim = tensors[0].shape[2]
        layout = _layout(tuple(pieces), self.tokens[self.own])
        # [my tokens, all heads, head_dim] -> [my tokens, heads of rank i, head_dim], by piece and
        # i, flat
        packed = b.pack_heads(tensors, layout)
        arriving = []
        parts = _parts(layout, len(pieces), head_dim)
        for piece, (start, sent_counts) in enumerate(parts):
            own_heads = [len(by_rank[self.own]) for by_rank in pieces[piece]]
            received_counts = [tokens * sum(own_heads) * head_dim for tokens in self.tokens]
            received = b.empty((sum(received_counts),), packed.dtype)
            sent = b.part(packed, start, start + sum(sent_counts))
            tag = seq_to_head(piece)
            post = self.post(b, sent, received, sent_counts, received_counts, tag)
            arriving.append(
                ArrivingHeads(b, post, received, sum(self.tokens), own_heads, head_dim)
            )
        return arriving

    def post(
        self,
        b: Builder,
        sent: Value,
        received: Value,
        sent_counts: Sequence[int],
        received_counts: Sequence[int],
        message: int,
    ) -> int:
        """Exchange sent_counts[i], received_counts[i] elements with rank i; return the post."""
        label = Label(self.channel, self._describe)
        for rank in self.ranks:
            label.peers |= {(rank, True), (rank, False)}
        spec = AllToAllSpec(
            ranks=tuple(self.ranks),
            sent=tuple(sent_counts),
            received=tuple(received_counts),
            tag=self.channel.tag(message),
            label=label,
            own=self.own,
        )
        return b.all_to_all(sent, received, spec)

    def _describe(self, peer: int, sent: bool) -> str:
        return f"heads of its part of sequences {list(self.channel.group.sequences)}"


class LeavingHeads:
    """Tensors on their way back by piece: [all tokens, my heads] -> [my tokens, all heads]."""

    def __init__(
        self,
        b: Builder,
        exchange: HeadExchange,
        pieces: Sequence[HeadRanges],
        head_dim: int,
        dtype: str,
    ) -> None:
        """pieces: the heads that each rank has in a piece. dtype: of the tensors that travel."""
        self._builder = b
        self._exchange = exchange
        self._head_dim = head_dim
        self._layout = _layout(tuple(pieces), exchange.tokens[exchange.own])
        self._parts = _parts(self._layout, len(pieces), head_dim)
        self._dtype = dtype
        self._received: Value | None = None
        self._posts: list[int] = []

    @property
    def _buffer(self) -> Value:
        """Flat, by piece and rank: [my tokens, its heads, head_dim]; made at the first post."""
        if self._received is None:
            elements = sum(self._layout.slots) * self._head_dim
            self._received = self._builder.empty((elements,), self._dtype)
        return self._received

    def post(self, tensors: Values) -> None:
        """Post the tensors [all tokens, my heads, head_dim] of the next piece."""
        b = self._builder
        piece = len(self._posts)
        start, received_counts = self._parts[piece]
        own_heads = sum(x.shape[1] for x in tensors)
        sent_counts = [tokens * own_heads * self._head_dim for tokens in self._exchange.tokens]
        # [all tokens, my heads, head_dim] -> [all tokens, my heads of all tensors, head_dim], flat
        sent = b.flat_heads(tensors)
        received = b.part(self._buffer, start, start + sum(received_counts))
        self._posts.append(
            self._exchange.post(
                b, sent, received, sent_counts, received_counts, head_to_seq(piece)
            )
        )

    def wait(self) -> Values:
        """Wait for all pieces, and return each tensor as [my tokens, all heads, head_dim].

        Heads that several ranks had are summed.
        """
        for post in self._posts:
            self._builder.wait(post)
        return self._builder.unpack_heads(self._buffer, self._layout, self._head_dim)


@functools.lru_cache(maxsize=256)
def _layout(pieces: tuple[HeadRanges, ...], tokens: int) -> HeadLayout:
    """Return the layout of heads: parts by piece, and in a piece by rank."""
    ranges = []
    for by_piece in zip(*pieces, strict=True):  # by tensor
        ranges.append([one for by_rank in by_piece for one in by_rank])
    return HeadLayout(ranges, tokens)


def _parts(layout: HeadLayout, pieces: int, head_dim: int) -> list[tuple[int, list[int]]]:
    """Return where the elements of each piece begin in a buffer, and how many each rank has."""
    ranks = len(layout.slots) // pieces
    parts = []
    start = 0
    for piece in range(pieces):
        slots = layout.slots[piece * ranks : (piece + 1) * ranks]
        counts = [count * head_dim for count in slots]
        parts.append((start, counts))
        start += sum(counts)
    return parts
