"""Ulysses: exchange a share of every sequence for a share of the heads, so that one kernel sees whole sequences.

    [my tokens, all heads]  --seq_to_head-->  [all tokens, my heads]  --kernel-->  ...  --head_to_seq-->  my tokens

DeepSpeed-Ulysses (arXiv 2309.14509), here for token shares of any size and head counts that do not divide: rank i of
d works on query heads [i H/d, (i+1) H/d), none at all when d > H, and is sent just the KV heads that those read, so a
KV head may go to several ranks. Where a rank's query heads do not fall evenly on its KV heads, it repeats KV heads
after the exchange. Gradients of KV heads sum over all ranks that had them.

What is kept for the backward is in the head layout; one exchange carries q, k and v together. Rejected: padding the
shares or the heads to equal size, which spends memory and bandwidth on nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.local import Tensors
from hf_flexseq.distributed.all_to_all import all_to_all
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.shard import Zone, contiguous_part


class HeadShare(NamedTuple):
    """The heads one rank works on: query heads [q_start, q_stop), KV heads [kv_start, kv_stop), and, where query heads
    do not fall evenly on KV heads, which of the latter each query head reads (else None)."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    repeats: tuple[int, ...] | None

    @property
    def q_heads(self) -> int:
        return self.q_stop - self.q_start

    @property
    def kv_heads(self) -> int:
        return self.kv_stop - self.kv_start


def head_share(heads: int, kv_heads: int, index: int, degree: int) -> HeadShare:
    """The share of the rank of `index` in a group of `degree`."""
    start, stop = contiguous_part(heads, index, degree)
    if start == stop:
        return HeadShare(start, stop, 0, 0, None)
    reads = [q * kv_heads // heads for q in range(start, stop)]
    kv_start, kv_stop = reads[0], reads[-1] + 1
    shares = [reads.count(kv) for kv in range(kv_start, kv_stop)]
    even = len(set(shares)) == 1
    return HeadShare(start, stop, kv_start, kv_stop, None if even else tuple(kv - kv_start for kv in reads))


class UlyssesZone:
    """This rank's part in an Ulysses group."""

    __slots__ = ("communicator", "index", "kernel", "ranks", "rows", "segments", "tokens")

    def __init__(self, zone: Zone, communicator: Communicator, kernel: Kernel, device: torch.device) -> None:
        degree = zone.group.degree
        total = sum(zone.lengths)
        self.rows = slice(zone.start, zone.stop)
        self.index, self.ranks = zone.index, zone.group.ranks
        self.communicator, self.kernel = communicator, kernel
        parts = [contiguous_part(total, i, degree) for i in range(degree)]
        self.tokens = [stop - start for start, stop in parts]
        self.segments = Segments(zone.lengths, zone.lengths, causal=True, device=device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, Tensors]:
        """q [t, H, D], k, v [t, Hkv, D] of this rank's tokens -> out [t, H, D], and what `backward` needs."""
        shares = self._shares(q.shape[1], k.shape[1])
        q_spans, kv_spans = _spans(shares)
        qh, kh, vh = self._seq_to_head((q, k, v), (q_spans, kv_spans, kv_spans))  # [T, my heads, D]
        mine = shares[self.index]
        oh, kept = self._attend(qh, kh, vh, mine, scale) if mine.q_heads else (qh, ())
        (out,) = self._head_to_seq((oh,), (q_spans,))  # [t, H, D]
        # The last one carries nothing but the number of KV heads.
        return out, (*kept, k.new_empty(0, k.shape[1]))

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> Tensors:
        *kept, kv_like = saved
        shares = self._shares(dout.shape[1], kv_like.shape[1])
        mine = shares[self.index]
        q_spans, kv_spans = _spans(shares)
        (doh,) = self._seq_to_head((dout,), (q_spans,))
        # Without heads here the gradients have none either, as doh.
        gradients = self._attend_backward(doh, tuple(kept), mine, scale) if mine.q_heads else (doh, doh, doh)
        dq, dk, dv = self._head_to_seq(gradients, (q_spans, kv_spans, kv_spans))
        return dq, dk, dv

    def _attend(
        self, qh: torch.Tensor, kh: torch.Tensor, vh: torch.Tensor, share: HeadShare, scale: float
    ) -> tuple[torch.Tensor, Tensors]:
        """Attention over all tokens with this rank's heads: out [T, my heads, D], and what its backward needs."""
        kr, vr = (repeat_heads(x, share) for x in (kh, vh))
        oh, lse = self.kernel.forward(qh, kr, vr, self.segments, scale=scale)
        return oh, (qh, kh, vh, oh, lse)

    def _attend_backward(self, doh: torch.Tensor, kept: Tensors, share: HeadShare, scale: float) -> Tensors:
        qh, kh, vh, oh, lse = kept
        kr, vr = (repeat_heads(x, share) for x in (kh, vh))
        dqh, dkr, dvr = self.kernel.backward(doh, qh, kr, vr, oh, lse, self.segments, scale=scale)
        return dqh, sum_heads(dkr, share), sum_heads(dvr, share)

    def _shares(self, heads: int, kv_heads: int) -> list[HeadShare]:
        return [head_share(heads, kv_heads, i, len(self.ranks)) for i in range(len(self.ranks))]

    def _seq_to_head(self, tensors: Tensors, spans: Sequence[Sequence[slice]]) -> list[torch.Tensor]:
        """Each [my tokens, heads, D] -> [all tokens, my heads, D]; `spans[x][i]` are the heads of rank i in x."""
        parts = [_flat_cat([x[:, span[i]] for x, span in zip(tensors, spans, strict=True)]) for i in self._indices]
        widths = [_width(x, span[self.index]) for x, span in zip(tensors, spans, strict=True)]
        received = all_to_all(self.communicator, self.ranks, parts, [t * sum(widths) for t in self.tokens])
        columns = zip(
            *(r.split([t * w for w in widths]) for r, t in zip(received, self.tokens, strict=True)), strict=True
        )
        return [
            torch.cat(column).view(sum(self.tokens), -1, x.shape[2])
            if width
            else x.new_empty(sum(self.tokens), 0, x.shape[2])
            for column, width, x in zip(columns, widths, tensors, strict=True)
        ]

    def _head_to_seq(self, tensors: Tensors, spans: Sequence[Sequence[slice]]) -> list[torch.Tensor]:
        """Each [all tokens, my heads, D] -> [my tokens, heads, D]; heads that several ranks had are summed."""
        by_rank = [x.split(self.tokens) for x in tensors]
        parts = [_flat_cat([pieces[i] for pieces in by_rank]) for i in self._indices]
        mine = self.tokens[self.index]
        head_dim = tensors[0].shape[2]
        sizes = [[mine * (span[i].stop - span[i].start) * head_dim for span in spans] for i in self._indices]
        received = all_to_all(self.communicator, self.ranks, parts, [sum(s) for s in sizes])
        results = [
            x.new_zeros(mine, max(s.stop for s in span), head_dim) for x, span in zip(tensors, spans, strict=True)
        ]
        for i, flat in enumerate(received):
            for result, span, piece in zip(results, spans, flat.split(sizes[i]), strict=True):
                if piece.numel():
                    result[:, span[i]] += piece.view(mine, -1, head_dim)
        return results

    @property
    def _indices(self) -> range:
        return range(len(self.ranks))


def _spans(shares: Sequence[HeadShare]) -> tuple[list[slice], list[slice]]:
    return [slice(s.q_start, s.q_stop) for s in shares], [slice(s.kv_start, s.kv_stop) for s in shares]


def _width(x: torch.Tensor, span: slice) -> int:
    return int(span.stop - span.start) * x.shape[2]


def _flat_cat(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def repeat_heads(x: torch.Tensor, share: HeadShare) -> torch.Tensor:
    """[T, KV heads, D] -> one KV head per query head, where the kernel could not group them itself."""
    return x if share.repeats is None else x[:, list(share.repeats)]


def sum_heads(dx: torch.Tensor, share: HeadShare) -> torch.Tensor:
    """The transpose of `repeat_heads`."""
    if share.repeats is None:
        return dx
    index = torch.tensor(share.repeats, device=dx.device)
    return dx.new_zeros(dx.shape[0], share.kv_heads, dx.shape[2]).index_add_(1, index, dx)
