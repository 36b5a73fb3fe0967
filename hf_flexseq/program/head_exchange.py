"""The two all-to-alls of Ulysses, between a share of the tokens and a share of the heads.

    seq_to_head    [my tokens, all heads, head_dim]  ->  [all tokens, my heads, head_dim]
    head_to_seq    [all tokens, my heads, head_dim]  ->  [my tokens, all heads, head_dim]

Several tensors travel in one message, and each may have another number of heads. Both directions
are posted by one call and waited for by another one, for other zones to compute in between.

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
from hf_flexseq.program.tags import HEAD_TO_SEQ, SEQ_TO_HEAD

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


class ReturningHeads(NamedTuple):
    """Tensors on their way back to this rank, [my tokens, its heads, head_dim] of every rank."""

    builder: Builder
    post: int
    received: Value  # flat, by rank
    layout: HeadLayout
    head_dim: int

    def wait(self) -> Values:
        """Return every tensor as [my tokens, all heads, head_dim].

        Heads that several ranks had are summed.
        """
        self.builder.wait(self.post)
        return self.builder.unpack_heads(self.received, self.layout, self.head_dim)


class HeadExchange:
    """The exchanges of one Ulysses group, seen from one of its ranks."""

    __slots__ = ("channel", "index", "ranks", "tokens")

    def __init__(
        self, channel: Channel, ranks: Sequence[int], index: int, tokens: Sequence[int]
    ) -> None:
        """ranks: global, contiguous. index: of this rank among them. tokens: of each rank."""
        self.channel = channel
        self.ranks = ranks
        self.index = index
        self.tokens = tokens

    def seq_to_head(self, b: Builder, tensors: Values, heads: HeadRanges) -> ArrivingHeads:
        """Post each [my tokens, all heads, head_dim] -> [all tokens, my heads, head_dim].

        heads: that each rank is sent of each tensor.
        """
        head_dim = tensors[0].shape[2]
        layout = _layout(heads, self.tokens[self.index])
        # [my tokens, all heads, head_dim] -> [my tokens, heads of rank i, head_dim], by i, flat
        sent = b.pack_heads(tensors, layout)
        sent_counts = [slots * head_dim for slots in layout.slots]
        own_heads = [len(by_rank[self.index]) for by_rank in heads]
        received_counts = [tokens * sum(own_heads) * head_dim for tokens in self.tokens]
        received = b.empty((sum(received_counts),), sent.dtype)
        post = self._post(b, sent, received, sent_counts, received_counts, SEQ_TO_HEAD)
        return ArrivingHeads(b, post, received, sum(self.tokens), own_heads, head_dim)

    def head_to_seq(self, b: Builder, tensors: Values, heads: HeadRanges) -> ReturningHeads:
        """Post each [all tokens, my heads, head_dim] -> [my tokens, all heads, head_dim].

        heads: that each rank has of each tensor.
        """
        head_dim = tensors[0].shape[2]
        layout = _layout(heads, self.tokens[self.index])
        # [all tokens, my heads, head_dim] -> [all tokens, my heads of all tensors, head_dim], flat
        sent = b.flat_heads(tensors)
        own_heads = sum(x.shape[1] for x in tensors)
        sent_counts = [tokens * own_heads * head_dim for tokens in self.tokens]
        received_counts = [slots * head_dim for slots in layout.slots]
        received = b.empty((sum(received_counts),), sent.dtype)
        post = self._post(b, sent, received, sent_counts, received_counts, HEAD_TO_SEQ)
        return ReturningHeads(b, post, received, layout, head_dim)

    def _post(
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
            own=self.index,
        )
        return b.all_to_all(sent, received, spec)

    def _describe(self, peer: int, sent: bool) -> str:
        return f"heads of its part of sequences {list(self.channel.group.sequences)}"


@functools.lru_cache(maxsize=256)
def _layout(heads: HeadRanges, tokens: int) -> HeadLayout:
    """Return the layout of heads, whose parts are those of the ranks."""
    return HeadLayout(heads, tokens)
