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
    tokens: int  # of all ranks
    heads: Sequence[int]  # by tensor: the heads that this rank is sent
    head_dim: int

    def wait(self) -> Tensors:
        """Return every tensor as [all tokens, my heads, head_dim], a view."""
        # flat, by rank -> [all tokens, my heads of all tensors, head_dim]
        together = self.moving.wait().view(self.tokens, sum(self.heads), self.head_dim)
        return tuple(together.split(list(self.heads), dim=1))


class ArrivingTokens(NamedTuple):
    """Tensors on their way to this rank, [all tokens, heads, head_dim] of every rank."""

    moving: AllToAll
    head_ranges: Sequence[Sequence[slice]]  # by tensor, by rank: the heads that the rank sends
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
        own_tokens, _, head_dim = tensors[0].shape
        heads_by_rank = _heads_by_rank(head_ranges)
        own_heads = [_heads_in(ranges[self.index]) for ranges in head_ranges]
        sent_counts = [own_tokens * heads * head_dim for heads in heads_by_rank]
        received_counts = [tokens * sum(own_heads) * head_dim for tokens in self.tokens]
        # [my tokens, all heads, head_dim] -> [my tokens, heads of rank i, head_dim], by i, flat
        sent = _dealt(tensors, head_ranges, sent_counts)
        moving = self._post(sent, sent_counts, received_counts, message)
        return ArrivingHeads(moving, sum(self.tokens), own_heads, head_dim)

    def head_to_seq(
        self, tensors: Tensors, head_ranges: Sequence[Sequence[slice]], *, message: int
    ) -> ArrivingTokens:
        """Post each [all tokens, my heads, head_dim] -> [my tokens, all heads, head_dim].

        head_ranges: by tensor, by rank, the heads that the rank has. message: number of the
        exchange among those of the group. `wait_for_tokens` ends what is posted here.
        """
        head_dim = tensors[0].shape[2]
        own_tokens = self.tokens[self.index]
        own_heads = sum(x.shape[1] for x in tensors)
        sent_counts = [tokens * own_heads * head_dim for tokens in self.tokens]
        received_counts = []
        for heads in _heads_by_rank(head_ranges):
            received_counts.append(own_tokens * heads * head_dim)
        # [all tokens, my heads, head_dim] -> [all tokens, my heads of all tensors, head_dim], flat
        sent = torch.cat(tensors, dim=1).view(-1)
        moving = self._post(sent, sent_counts, received_counts, message)
        return ArrivingTokens(moving, head_ranges, head_dim)

    def wait_for_tokens(self, pieces: Sequence[ArrivingTokens]) -> Tensors:
        """Wait for all pieces of the heads, and return each tensor as [my tokens, all heads,
        head_dim].

        Heads that several ranks had are summed.
        """
        totals: list[_HeadTotal] = []
        for piece in pieces:
            received = piece.moving.wait()
            if not totals:
                totals = self._empty_totals(pieces, like=received)
            self._add_piece(totals, piece, received)
        return tuple(total.x for total in totals)

    def _add_piece(
        self, totals: Sequence["_HeadTotal"], piece: ArrivingTokens, received: torch.Tensor
    ) -> None:
        """Add a piece of the heads to the totals, one for each tensor.

        received: of every rank, flat, [my tokens, its heads of all tensors, head_dim].
        """
        own_tokens = self.tokens[self.index]
        ranks = len(self.ranks)
        combs = _combs(piece.head_ranges, [total.x.shape[1] for total in totals])
        if combs is not None:
            widths = [comb.width for comb in combs]
            shape = (ranks, own_tokens, sum(widths), piece.head_dim)
            # flat, by rank -> [my tokens, ranks, heads of a rank, head_dim] per tensor
            parts = received.view(shape).transpose(0, 1).split(widths, dim=2)
            for total, comb, part in zip(totals, combs, parts, strict=True):
                comb.of(total.x, ranks).copy_(part)
            return
        heads_by_rank = _heads_by_rank(piece.head_ranges)
        counts = [own_tokens * heads * piece.head_dim for heads in heads_by_rank]
        for i, flat in enumerate(received.split(counts)):
            rows = flat.view(own_tokens, heads_by_rank[i], piece.head_dim)
            ranges_of_rank = [ranges[i] for ranges in piece.head_ranges]
            # [my tokens, heads of rank i, head_dim] -> one part per tensor
            parts = rows.split([_heads_in(one) for one in ranges_of_rank], dim=1)
            for total, one, part in zip(totals, ranges_of_rank, parts, strict=True):
                total.add(part, one)

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
        self,
        sent: torch.Tensor,
        sent_counts: Sequence[int],
        received_counts: Sequence[int],
        message: int,
    ) -> AllToAll:
        """Send sent_counts[i] elements of `sent`, flat, to the i-th rank, and expect
        received_counts[i] from it."""
        return all_to_all(
            self.channel.communicator,
            self.ranks,
            sent,
            sent_counts,
            received_counts,
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
        """Add a part [tokens, heads of the range, head_dim] to these heads."""
        target = self.x[:, head_range]
        if self._shared:
            target.add_(part)
        else:
            target.copy_(part)


# ---- heads by rank


class Comb(NamedTuple):
    """Heads that stand alike on all ranks: of each `stride` heads rank after rank has `width`,
    from the one of number `start` on."""

    start: int
    width: int
    stride: int

    def of(self, x: torch.Tensor, ranks: int) -> torch.Tensor:
        """Return a view of these heads: [tokens, all heads, head_dim] -> [tokens, ranks, width,
        head_dim]."""
        by_rank = x.unflatten(1, (ranks, self.stride))
        return by_rank[:, :, self.start : self.start + self.width]


def _combs(head_ranges: Sequence[Sequence[slice]], heads: Sequence[int]) -> list[Comb] | None:
    """Return the heads of every tensor as a comb; None where those of one are no comb.

    head_ranges: by tensor, by rank. heads: all heads of each tensor.
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
    return combs


def _dealt(
    tensors: Tensors, head_ranges: Sequence[Sequence[slice]], counts: Sequence[int]
) -> torch.Tensor:
    """Return what each rank is sent, flat, by rank: [tokens, its heads of all tensors, head_dim].

    tensors: [tokens, all heads, head_dim] each. head_ranges: by tensor, by rank, the heads of the
    rank. counts: elements for each rank.
    """
    tokens, _, head_dim = tensors[0].shape
    ranks = len(counts)
    sent = tensors[0].new_empty(sum(counts))
    combs = _combs(head_ranges, [x.shape[1] for x in tensors])
    if combs is not None:
        # [tokens, ranks, heads of a rank, head_dim] per tensor -> of all tensors together
        columns = [comb.of(x, ranks) for x, comb in zip(tensors, combs, strict=True)]
        together = sent.view(ranks, tokens, sum(comb.width for comb in combs), head_dim)
        torch.cat(columns, dim=2, out=together.transpose(0, 1))
        return sent
    for i, flat in enumerate(sent.split(list(counts))):
        heads = [x[:, ranges[i]] for x, ranges in zip(tensors, head_ranges, strict=True)]
        torch.cat(heads, dim=1, out=flat.view(tokens, sum(x.shape[1] for x in heads), head_dim))
    return sent


def _heads_by_rank(head_ranges: Sequence[Sequence[slice]]) -> list[int]:
    """Return how many heads of all tensors together each rank has.

    head_ranges: by tensor, by rank.
    """
    heads = []
    for ranges_of_rank in zip(*head_ranges, strict=True):
        heads.append(sum(_heads_in(one) for one in ranges_of_rank))
    return heads


def _heads_in(head_range: slice) -> int:
    """Return the number of heads in the range."""
    return int(head_range.stop - head_range.start)
