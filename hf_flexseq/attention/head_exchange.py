"""The two all-to-alls of Ulysses, between a share of the tokens and a share of the heads.

    seq_to_head    [my tokens, all heads, head_dim]  ->  [all tokens, my heads, head_dim]
    head_to_seq    [all tokens, my heads, head_dim]  ->  [my tokens, all heads, head_dim]

Several tensors travel in one message, and each may have another number of heads. Both directions
are posted by one call and waited for by another one, for something to compute in between.

Shares are of any size, none included. Of KV heads a rank is sent just those that its query heads
read, so several ranks may have one; their gradients are summed where they arrive.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.heads import overlapping
from hf_flexseq.attention.types import Tensors
from hf_flexseq.distributed.all_to_all import AllToAll, all_to_all
from hf_flexseq.distributed.communicator import Channel
from hf_flexseq.kernels import lse_dtype


class ArrivingHeads(NamedTuple):
    """Tensors on their way to this rank, [my tokens, heads, head_dim] of every rank."""

    moving: AllToAll
    tokens: Sequence[int]  # by rank: the tokens it sends of
    heads: Sequence[int]  # by tensor: the heads that this rank is sent
    head_dim: int

    def wait(self) -> Tensors:
        """Return every tensor as [all tokens, my heads, head_dim]."""
        parts_by_tensor: list[list[torch.Tensor]] = [[] for _ in self.heads]
        for flat, tokens in zip(self.moving.wait(), self.tokens, strict=True):
            # [tokens of the rank * heads of all tensors * head_dim] -> one flat part per tensor
            sizes = [tokens * heads * self.head_dim for heads in self.heads]
            for parts, part in zip(parts_by_tensor, flat.split(sizes), strict=True):
                parts.append(part)
        all_tokens = sum(self.tokens)
        tensors = []
        for parts, heads in zip(parts_by_tensor, self.heads, strict=True):
            # parts by rank -> [all tokens, my heads, head_dim]
            tensors.append(torch.cat(parts).view(all_tokens, heads, self.head_dim))
        return tuple(tensors)


class ArrivingTokens(NamedTuple):
    """Tensors on their way to this rank, [all tokens, heads, head_dim] of every rank."""

    moving: AllToAll
    head_ranges: Sequence[Sequence[slice]]  # by tensor, by rank: the heads that the rank sends
    numels: Sequence[Sequence[int]]  # by rank, by tensor: elements that arrive here
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
        self, tensors: Tensors, head_ranges: Sequence[Sequence[slice]], *, message: int
    ) -> ArrivingHeads:
        """Post each [my tokens, all heads, head_dim] -> [all tokens, my heads, head_dim].

        head_ranges: by tensor, by rank, the heads that the rank is sent. message: number of the
        exchange among those of the group.
        """
        head_dim = tensors[0].shape[2]

        # 1. what leaves: a flat part for each rank, one tensor after the other
        parts = []
        for i in range(len(self.ranks)):
            flat_heads = []
            for x, ranges in zip(tensors, head_ranges, strict=True):
                # [my tokens, all heads, head_dim] -> [my tokens * heads of rank i * head_dim]
                flat_heads.append(x[:, ranges[i]].reshape(-1))
            parts.append(torch.cat(flat_heads))

        # 2. what arrives: my heads of every tensor, for the tokens of each rank
        heads = [_heads_in(ranges[self.index]) for ranges in head_ranges]
        numels = [tokens * sum(heads) * head_dim for tokens in self.tokens]

        moving = self._post(parts, numels, message)
        return ArrivingHeads(moving, self.tokens, heads, head_dim)

    def head_to_seq(
        self, tensors: Tensors, head_ranges: Sequence[Sequence[slice]], *, message: int
    ) -> ArrivingTokens:
        """Post each [all tokens, my heads, head_dim] -> [my tokens, all heads, head_dim].

        head_ranges: by tensor, by rank, the heads that the rank has. message: number of the
        exchange among those of the group. `wait_for_tokens` ends what is posted here.
        """
        head_dim = tensors[0].shape[2]
        my_tokens = self.tokens[self.index]

        # 1. what leaves: a flat part for each rank, one tensor after the other
        # [all tokens, my heads, head_dim] -> [tokens of rank i, my heads, head_dim] by rank
        tensors_by_rank = [x.split(list(self.tokens)) for x in tensors]
        parts = []
        for i in range(len(self.ranks)):
            flat_tokens = [by_rank[i].reshape(-1) for by_rank in tensors_by_rank]
            parts.append(torch.cat(flat_tokens))

        # 2. what arrives: the heads of each rank, for my tokens
        numels = []
        for i in range(len(self.ranks)):
            numels.append([my_tokens * _heads_in(ranges[i]) * head_dim for ranges in head_ranges])

        moving = self._post(parts, [sum(sizes) for sizes in numels], message)
        return ArrivingTokens(moving, head_ranges, numels, head_dim)

    def wait_for_tokens(self, pieces: Sequence[ArrivingTokens]) -> Tensors:
        """Wait for all pieces of the heads, and return each tensor as [my tokens, all heads,
        head_dim].

        Heads that several ranks had are summed.
        """
        totals: list[_HeadTotal] = []
        for piece in pieces:
            flat_by_rank = piece.moving.wait()
            if not totals:
                totals = self._empty_totals(pieces, like=flat_by_rank[0])
            for i, flat in enumerate(flat_by_rank):
                # [my tokens * heads of rank i * head_dim], one tensor after the other
                parts = flat.split(list(piece.numels[i]))
                for total, ranges, part in zip(totals, piece.head_ranges, parts, strict=True):
                    total.add(part, ranges[i])
        return tuple(total.x for total in totals)

    def _empty_totals(
        self, pieces: Sequence[ArrivingTokens], *, like: torch.Tensor
    ) -> list["_HeadTotal"]:
        """Make the results of an exchange, each [my tokens, all heads, head_dim]."""
        my_tokens = self.tokens[self.index]
        head_dim = pieces[0].head_dim
        totals = []
        for ranges_by_piece in zip(*(piece.head_ranges for piece in pieces), strict=True):
            totals.append(_HeadTotal(my_tokens, head_dim, ranges_by_piece, like=like))
        return totals

    def _post(
        self, parts: Sequence[torch.Tensor], numels: Sequence[int], message: int
    ) -> AllToAll:
        """Send parts[i], flat, to the i-th rank, and expect numels[i] elements from it."""
        return all_to_all(
            self.channel.communicator,
            self.ranks,
            parts,
            numels,
            tag=self.channel.tag(message),
            label=self.channel.label(self._describe),
        )

    def _describe(self, peer: int, sent: bool) -> str:
        return f"heads of its part of sequences {list(self.channel.group.sequences)}"


class _HeadTotal:
    """A tensor [tokens, all heads, head_dim] put together from the heads of several ranks.

    Where ranks share a head their parts are summed, in float32 (float64 for float64): many ranks
    may share a KV head, and a 16-bit sum would lose with each of them.
    """

    __slots__ = ("_shared", "x")

    def __init__(
        self,
        tokens: int,
        head_dim: int,
        head_ranges: Sequence[Sequence[slice]],
        *,
        like: torch.Tensor,
    ) -> None:
        """head_ranges: by piece, by rank, the heads of the rank. like: a tensor of the dtype and
        device of the parts."""
        heads = max(head_range.stop for by_rank in head_ranges for head_range in by_rank)
        self._shared = overlapping(head_ranges)
        if self._shared:
            self.x = like.new_zeros(tokens, heads, head_dim, dtype=lse_dtype(like.dtype))
        else:
            self.x = like.new_empty(tokens, heads, head_dim)

    def add(self, part: torch.Tensor, head_range: slice) -> None:
        """Add a flat part [tokens * heads of the range * head_dim] to these heads."""
        if not part.numel():
            return
        target = self.x[:, head_range]  # [tokens, heads of the range, head_dim]
        if self._shared:
            target.add_(part.view(target.shape))
        else:
            target.copy_(part.view(target.shape))


def _heads_in(head_range: slice) -> int:
    """Return the number of heads in the range."""
    return int(head_range.stop - head_range.start)
