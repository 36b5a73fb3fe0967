"""The two all-to-alls of Ulysses, between a share of the tokens and a share of the heads.

    seq_to_head    [my tokens, all heads, head_dim]  ->  [all tokens, my heads, head_dim]
    head_to_seq    [all tokens, my heads, head_dim]  ->  [my tokens, all heads, head_dim]

Several tensors travel in one message, and each may have another number of heads. Both directions
are posted by one call and waited for by another one, for something to compute in between.

Shares are of any size, none included. Of KV heads a rank is sent just those that its query heads
read, so several ranks may have one; their gradients are summed where they arrive, in float32
(float64 for float64): many ranks may share a KV head, and a 16-bit sum would lose with each.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel, Label
from hf_flexseq.program.heads import overlapping
from hf_flexseq.program.instructions import WIDE, AllToAllSpec, Comb, HeadsSpec, Value

HeadRanges = Sequence[Sequence[slice]]  # by tensor, by rank


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


class ArrivingTokens(NamedTuple):
    """Tensors on their way to this rank, [all tokens, heads, head_dim] of every rank."""

    post: int
    received: Value  # flat, by rank
    head_ranges: HeadRanges  # the heads that each rank sends
    head_dim: int


class HeadExchange:
    """The exchanges of one Ulysses group, seen from one of its ranks."""

    __slots__ = ("channel", "index", "ranks", "tokens")

    def __init__(
        self, channel: Channel, ranks: Sequence[int], index: int, tokens: Sequence[int]
    ) -> None:
        """ranks: those that exchange, global, contiguous. index: of this rank among `ranks`.
        tokens: how many each of them holds."""
        self.channel = channel
        self.ranks = ranks
        self.index = index
        self.tokens = tokens

    def seq_to_head(
        self, b: Builder, tensors: Values, head_ranges: HeadRanges, *, message: int
    ) -> ArrivingHeads:
        """Post each [my tokens, all heads, head_dim] -> [all tokens, my heads, head_dim].

        head_ranges: the heads that each rank is sent. message: number of the exchange among those
        of the group.
        """
        own_tokens, _, head_dim = tensors[0].shape
        spec = heads_spec(own_tokens, head_ranges, [x.shape[1] for x in tensors])
        own_heads = [_heads_in(ranges[self.index]) for ranges in head_ranges]
        sent_counts = [own_tokens * heads * head_dim for heads in spec.heads_by_rank]
        received_counts = [tokens * sum(own_heads) * head_dim for tokens in self.tokens]
        # [my tokens, all heads, head_dim] -> [my tokens, heads of rank i, head_dim], by i, flat
        sent = b.deal_heads(tensors, spec)
        post, received = self._post(b, sent, sent_counts, received_counts, message)
        return ArrivingHeads(b, post, received, sum(self.tokens), own_heads, head_dim)

    def head_to_seq(
        self, b: Builder, tensors: Values, head_ranges: HeadRanges, *, message: int
    ) -> ArrivingTokens:
        """Post each [all tokens, my heads, head_dim] -> [my tokens, all heads, head_dim].

        head_ranges: the heads that each rank has. message: number of the exchange among those of
        the group. `wait_for_tokens` ends what is posted here.
        """
        head_dim = tensors[0].shape[2]
        own_tokens = self.tokens[self.index]
        own_heads = sum(x.shape[1] for x in tensors)
        sent_counts = [tokens * own_heads * head_dim for tokens in self.tokens]
        received_counts = []
        for heads in _heads_by_rank(head_ranges):
            received_counts.append(own_tokens * heads * head_dim)
        # [all tokens, my heads, head_dim] -> [all tokens, my heads of all tensors, head_dim], flat
        sent = b.flat_heads(tensors)
        post, received = self._post(b, sent, sent_counts, received_counts, message)
        return ArrivingTokens(post, received, head_ranges, head_dim)

    def wait_for_tokens(self, b: Builder, pieces: Sequence[ArrivingTokens]) -> Values:
        """Wait for all pieces of the heads, and return each tensor as [my tokens, all heads,
        head_dim].

        Heads that several ranks had are summed.
        """
        own_tokens = self.tokens[self.index]
        totals: list[Value] = []
        heads: list[int] = []  # by tensor
        shared: list[bool] = []
        for piece in pieces:
            b.wait(piece.post)
            if not totals:
                # [my tokens, all heads, head_dim] by tensor
                for by_piece in zip(*(one.head_ranges for one in pieces), strict=True):
                    heads.append(max(part.stop for by_rank in by_piece for part in by_rank))
                    shared.append(overlapping(by_piece))
                    shape = (own_tokens, heads[-1], piece.head_dim)
                    if shared[-1]:
                        totals.append(b.zeros(shape, WIDE))
                    else:
                        totals.append(b.empty(shape, piece.received.dtype))
            spec = heads_spec(own_tokens, piece.head_ranges, heads, shared)
            b.place_heads(tuple(totals), piece.received, spec)
        return tuple(totals)

    def _post(
        self,
        b: Builder,
        sent: Value,
        sent_counts: Sequence[int],
        received_counts: Sequence[int],
        message: int,
    ) -> tuple[int, Value]:
        """Send sent_counts[i] elements of `sent`, flat, to the i-th rank, and expect
        received_counts[i] from it."""
        label = Label(self.channel, self._describe)
        for rank in self.ranks:
            label.peers |= {(rank, True), (rank, False)}
        spec = AllToAllSpec(
            ranks=tuple(self.ranks),
            sent=tuple(sent_counts),
            received=tuple(received_counts),
            tag=self.channel.tag(message),
            label=label,
        )
        return b.all_to_all(sent, spec)

    def _describe(self, peer: int, sent: bool) -> str:
        return f"heads of its part of sequences {list(self.channel.group.sequences)}"


def heads_spec(
    tokens: int, head_ranges: HeadRanges, heads: Sequence[int], shared: Sequence[bool] = ()
) -> HeadsSpec:
    """Return which heads of some tensors each rank has.

    tokens: rows of the tensors. heads: all heads of each. shared: by tensor, whether ranks share
    heads; empty where nothing is summed.
    """
    ranges = []
    for of_tensor in head_ranges:
        ranges.append(tuple((one.start, one.stop) for one in of_tensor))
    any_shared = any(shared)
    return HeadsSpec(
        tokens=tokens,
        ranges=tuple(ranges),
        heads_by_rank=tuple(_heads_by_rank(head_ranges)),
        combs=None if any_shared else _combs(head_ranges, heads),
        shared=tuple(shared) or (False,) * len(ranges),
    )


def _combs(head_ranges: HeadRanges, heads: Sequence[int]) -> tuple[Comb, ...] | None:
    """Return the heads of every tensor as a comb; None where those of one are no comb.

    heads: all heads of each tensor.
    """
    combs = []
    for ranges, all_heads in zip(head_ranges, heads, strict=True):
        stride, left = divmod(all_heads, len(ranges))
        start = ranges[0].start
        width = _heads_in(ranges[0])
        if left or start + width > stride:
            return None
        for i, one in enumerate(ranges):
            if one.start != start + i * stride or _heads_in(one) != width:
                return None
        combs.append(Comb(start, width, stride))
    return tuple(combs)


def _heads_by_rank(head_ranges: HeadRanges) -> list[int]:
    """Return how many heads of all tensors together each rank has."""
    heads = []
    for ranges_of_rank in zip(*head_ranges, strict=True):
        heads.append(sum(_heads_in(one) for one in ranges_of_rank))
    return heads


def _heads_in(head_range: slice) -> int:
    """Return the number of heads in the range."""
    return int(head_range.stop - head_range.start)
