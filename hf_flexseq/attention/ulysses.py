"""Ulysses: exchange a share of every sequence for a share of the heads, so that one kernel sees whole sequences.

    [my tokens, all heads]  --seq_to_head-->  [all tokens, my heads]  --kernel-->  ...  --head_to_seq-->  my tokens

DeepSpeed-Ulysses (arXiv 2309.14509), here for token shares of any size and head counts that do not divide: rank i of
d works on query heads [i H/d, (i+1) H/d), none at all when d > H, and is sent just the KV heads that those read, so a
KV head may go to several ranks. Where a rank's query heads do not fall evenly on its KV heads, it repeats KV heads
after the exchange. Gradients of KV heads sum over all ranks that had them.

What is kept for the backward is in the head layout; one exchange carries q, k and v together. In checkpointed layers
(`remat.py`) only the log-sum-exp is, and q, k, v and out travel again in the backward, in one exchange with dout: the
replay of the layer has q, k and v in the token layout only. What computes between the exchanges is a kernel call, or
in `hybrid.py` a ring. Rejected: padding the shares or the heads to equal size, which spends memory and bandwidth on
nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from hf_flexseq.attention.local import LocalZone, Tensors
from hf_flexseq.attention.zones import END, Steps, within
from hf_flexseq.distributed.all_to_all import AllToAll, all_to_all
from hf_flexseq.distributed.communicator import Channel
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.shard import Zone, contiguous_part

Arriving = Callable[[], list[torch.Tensor]]  # waits for tensors that are on their way


class Span(NamedTuple):
    """A part of a zone's time."""

    start: float
    stop: float


HALF_WAY = Span(0.5, 0.5)


class HeadAttention(Protocol):
    """Attention over all tokens of the group, for some heads."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Steps[tuple[torch.Tensor, Tensors]]: ...

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> Steps[Tensors]: ...

    def backward_of_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> Steps[Tensors]: ...


def ulysses_zone(zone: Zone, channel: Channel, kernel: Kernel, device: torch.device) -> "UlyssesZone":
    """A group's heads dealt to its ranks, each of which then sees whole sequences."""
    parts = [contiguous_part(sum(zone.lengths), i, zone.group.degree) for i in range(zone.group.degree)]
    tokens = [stop - start for start, stop in parts]
    inner = LocalZone(slice(zone.start, zone.stop), zone.lengths, kernel, device)
    return UlyssesZone(inner.rows, tokens, zone.index, zone.group.ranks, channel, inner)


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

    __slots__ = ("channel", "index", "inner", "ranks", "rows", "span", "tokens")

    def __init__(
        self,
        rows: slice,
        tokens: Sequence[int],
        index: int,
        ranks: Sequence[int],
        channel: Channel,
        inner: HeadAttention,
        *,
        span: Span = HALF_WAY,
    ) -> None:
        """tokens: how many each of `ranks` holds. index: this rank's place among them. inner: what computes. span: at
        which times of the zone; the exchanges have the time before and after it to travel."""
        self.rows, self.tokens, self.index, self.ranks = rows, tokens, index, ranks
        self.channel, self.inner, self.span = channel, inner, span

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Steps[tuple[torch.Tensor, Tensors]]:
        """q [t, H, D], k, v [t, Hkv, D] of this rank's tokens -> out [t, H, D], and what `backward` needs."""
        shares = self._shares(q.shape[1], k.shape[1])
        q_spans, kv_spans = _spans(shares)
        arriving = self._seq_to_head((q, k, v), (q_spans, kv_spans, kv_spans))
        yield self.span.start
        qh, kh, vh = arriving()  # [T, my heads, D]
        oh, saved = qh, ()
        if shares[self.index].q_heads:
            kr, vr = (_repeat(x, shares[self.index]) for x in (kh, vh))
            oh, saved = yield from within(*self.span, self.inner.forward(qh, kr, vr, scale))
        yield self.span.stop
        arriving = self._head_to_seq((oh,), (q_spans,))
        yield END
        (out,) = arriving()  # [t, H, D]
        # The first one carries nothing but the number of KV heads.
        return out, (k.new_empty(0, k.shape[1]), *saved)

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> Steps[Tensors]:
        kv_like, *of_inner = saved
        shares = self._shares(dout.shape[1], kv_like.shape[1])
        arriving = self._seq_to_head((dout,), (_spans(shares)[0],))
        yield self.span.start
        (doh,) = arriving()
        grads = (doh, doh, doh)  # of no heads
        if shares[self.index].q_heads:
            grads = yield from within(*self.span, self.inner.backward(doh, tuple(of_inner), scale))
        return (yield from self._gradients(shares, grads))

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> Steps[Tensors]:  # type: ignore[no-untyped-def]
        """`backward` where nothing is kept in the head layout but lse: what it lacks travels together with dout."""
        shares = self._shares(q.shape[1], k.shape[1])
        q_spans, kv_spans = _spans(shares)
        arriving = self._seq_to_head((q, k, v, out, dout), (q_spans, kv_spans, kv_spans, q_spans, q_spans))
        yield self.span.start
        qh, kh, vh, oh, doh = arriving()
        grads = (doh, doh, doh)
        if shares[self.index].q_heads:
            kr, vr = (_repeat(x, shares[self.index]) for x in (kh, vh))
            grads = yield from within(*self.span, self.inner.backward_of_rows(qh, kr, vr, oh, doh, lse, scale))
        return (yield from self._gradients(shares, grads))

    def _gradients(self, shares: list[HeadShare], of_heads: Tensors) -> Steps[Tensors]:
        """dq, dk, dv of this rank's heads, which repeats of KV heads may be among -> those of its tokens."""
        dqh, dkh, dvh = of_heads
        if shares[self.index].q_heads:
            dkh, dvh = (_sum_repeats(x, shares[self.index]) for x in (dkh, dvh))
        q_spans, kv_spans = _spans(shares)
        yield self.span.stop
        arriving = self._head_to_seq((dqh, dkh, dvh), (q_spans, kv_spans, kv_spans))
        yield END
        return tuple(arriving())

    def _shares(self, heads: int, kv_heads: int) -> list[HeadShare]:
        return [head_share(heads, kv_heads, i, len(self.ranks)) for i in range(len(self.ranks))]

    def _seq_to_head(self, tensors: Tensors, spans: Sequence[Sequence[slice]]) -> Arriving:
        """Each [my tokens, heads, D] -> [all tokens, my heads, D]; `spans[x][i]` are the heads of rank i in x."""
        parts = [_flat_cat([x[:, span[i]] for x, span in zip(tensors, spans, strict=True)]) for i in self._indices]
        widths = [_width(x, span[self.index]) for x, span in zip(tensors, spans, strict=True)]
        moving = self._all_to_all(parts, [t * sum(widths) for t in self.tokens])
        return partial(self._as_heads, moving, widths, tensors[0].shape[2])

    def _as_heads(self, moving: AllToAll, widths: Sequence[int], head_dim: int) -> list[torch.Tensor]:
        by_rank = [part.split([t * w for w in widths]) for part, t in zip(moving.wait(), self.tokens, strict=True)]
        return [
            torch.cat(column).view(sum(self.tokens), width // head_dim, head_dim)
            for column, width in zip(zip(*by_rank, strict=True), widths, strict=True)
        ]

    def _head_to_seq(self, tensors: Tensors, spans: Sequence[Sequence[slice]]) -> Arriving:
        """Each [all tokens, my heads, D] -> [my tokens, heads, D]; heads that several ranks had are summed, in float32
        (float64 for float64): many ranks may share a KV head, and a 16-bit sum would lose with each of them."""
        by_rank = [x.split(self.tokens) for x in tensors]
        parts = [_flat_cat([pieces[i] for pieces in by_rank]) for i in self._indices]
        mine, head_dim = self.tokens[self.index], tensors[0].shape[2]
        sizes = [[mine * (span[i].stop - span[i].start) * head_dim for span in spans] for i in self._indices]
        moving = self._all_to_all(parts, [sum(s) for s in sizes])
        return partial(self._as_tokens, moving, spans, sizes, head_dim)

    def _as_tokens(
        self, moving: AllToAll, spans: Sequence[Sequence[slice]], sizes: Sequence[Sequence[int]], head_dim: int
    ) -> list[torch.Tensor]:
        received, mine = moving.wait(), self.tokens[self.index]
        results = [_sums(received[0], mine, head_dim, span) for span in spans]
        for i, flat in enumerate(received):
            for result, span, piece in zip(results, spans, flat.split(sizes[i]), strict=True):
                if piece.numel():
                    result[:, span[i]] += piece.view(mine, -1, head_dim)
        return [result.to(received[0].dtype) for result in results]

    def _all_to_all(self, parts: Sequence[torch.Tensor], numels: Sequence[int]) -> AllToAll:
        label = self.channel.label(self._describe)
        return all_to_all(self.channel.communicator, self.ranks, parts, numels, tag=self.channel.tag(0), label=label)

    def _describe(self, peer: int, sent: bool) -> str:
        return f"heads of its part of sequences {list(self.channel.group.sequences)}"

    @property
    def _indices(self) -> range:
        return range(len(self.ranks))


def _spans(shares: Sequence[HeadShare]) -> tuple[list[slice], list[slice]]:
    return [slice(s.q_start, s.q_stop) for s in shares], [slice(s.kv_start, s.kv_stop) for s in shares]


def _sums(like: torch.Tensor, tokens: int, head_dim: int, spans: Sequence[slice]) -> torch.Tensor:
    """Zeros [tokens, all heads, D], wider than 16 bits if several ranks add to a head."""
    heads = max(span.stop for span in spans)
    shared = sum(span.stop - span.start for span in spans) > heads
    return like.new_zeros(tokens, heads, head_dim, dtype=lse_dtype(like.dtype) if shared else like.dtype)


def _width(x: torch.Tensor, span: slice) -> int:
    return int(span.stop - span.start) * x.shape[2]


def _flat_cat(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _repeat(x: torch.Tensor, share: HeadShare) -> torch.Tensor:
    """[T, KV heads, D] -> one KV head per query head, where the kernel could not group them itself."""
    return x if share.repeats is None else x[:, list(share.repeats)]


def _sum_repeats(dx: torch.Tensor, share: HeadShare) -> torch.Tensor:
    """The transpose of `_repeat`."""
    if share.repeats is None:
        return dx
    index = torch.tensor(share.repeats, device=dx.device)
    return dx.new_zeros(dx.shape[0], share.kv_heads, dx.shape[2]).index_add_(1, index, dx)
