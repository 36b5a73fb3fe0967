"""Keys and values first, then one kernel call: attention without partial results.

    keys, values  --gather by need-->  tokens 0..stop of each of this rank's chunks  --kernel-->  out

A rank holds two chunks of each sequence, as in `zigzag`, which evens out the work. It fetches, straight from their
owners, the chunks that its last one reads. One varlen call then takes each of its chunks as a sequence of its own,
with the chunk as the last of its keys, so that nothing is merged and a 16-bit result is as exact as on one rank. Keys
that both chunks of a sequence read are in the call twice, on average a quarter of the sequence.

Backward: the gathered keys and values are fetched again instead of kept, for they are whole sequences; gradients of
keys that several queries read are summed in float32 (float64 for float64), here and at their owner.

Llama 3 (arXiv 2407.21783, section 3.3.2) for the gather and the two chunks; there everything is gathered, here only
what is read, three quarters of it. Rejected: computing this rank's own block meanwhile, which would have to be merged;
the gather hides under nothing but other zones.
"""

from collections.abc import Iterable, Sequence

import torch

from hf_flexseq.attention.local import Tensors
from hf_flexseq.attention.turns import Layout, Piece, Rows, Share, name_pieces
from hf_flexseq.attention.zones import END, Steps
from hf_flexseq.distributed.communicator import Channel, Exchange, Label
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.shard import Cut, Zone, cuts, held_chunks

GATHER, RETURN = 0, 1  # tags


class AllGatherZone:
    """This rank's part in an all-gather group."""

    __slots__ = ("channel", "fetched", "gathered", "kernel", "lent", "rows", "segments")

    def __init__(self, zone: Zone, channel: Channel, kernel: Kernel, device: torch.device) -> None:
        self.rows = slice(zone.start, zone.stop)
        self.channel, self.kernel = channel, kernel
        group_cuts, index, degree = cuts("allgather", zone.lengths, zone.group.degree), zone.index, zone.group.degree
        layout = Layout(group_cuts, "allgather", index, degree, device)
        others = [i for i in range(degree) if i != index]
        lent = {zone.group.ranks[i]: pieces_read(group_cuts, index, i, degree) for i in others}
        fetched = {zone.group.ranks[i]: pieces_read(group_cuts, i, index, degree) for i in others}
        self.lent = [Share(peer, layout.rows(pieces), pieces) for peer, pieces in lent.items()]
        self.fetched = [
            Share(peer, Rows(sum(group_cuts[place].tokens((chunk,)) for place, chunk in pieces), None), pieces)
            for peer, pieces in fetched.items()
        ]
        arrived = [*layout.pieces, *(piece for pieces in fetched.values() for piece in pieces)]
        self.gathered, self.segments = _call(group_cuts, index, degree, arrived, device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Steps[tuple[torch.Tensor, Tensors]]:
        """q [t, H, D], k, v [t, Hkv, D] of this rank's chunks -> out [t, H, D], and what `backward` needs."""
        kv = torch.stack((k, v), dim=1)  # [t, 2, Hkv, D]
        exchange, parts = self._gather(kv)
        yield 1.0
        exchange.wait()
        keys, values = self._in_order(kv, parts).unbind(1)
        out, lse = self.kernel.forward(q, keys, values, self.segments, scale=scale)
        return out, (q, kv, out, lse)

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> Steps[Tensors]:
        q, kv, out, lse = saved
        exchange, parts = self._gather(kv)
        yield 0.5  # the gradients have the rest to travel
        exchange.wait()
        keys, values = self._in_order(kv, parts).unbind(1)
        dq, *dkv = self.kernel.backward(dout, q, keys, values, out, lse, self.segments, scale=scale)
        exchange, own, returned = self._return(torch.stack(dkv, dim=1), kv)
        yield END
        exchange.wait()
        for rows, part in returned:
            rows.add_to(own, part)
        dk, dv = own.to(q.dtype).unbind(1)
        return dq, dk, dv

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> Steps[Tensors]:  # type: ignore[no-untyped-def]
        """`backward` from this rank's rows and the last of what `forward` left."""
        return self.backward(dout, (q, torch.stack((k, v), dim=1), out, lse), scale)

    def _gather(self, kv: torch.Tensor) -> tuple[Exchange, list[torch.Tensor]]:
        """[t, 2, Hkv, D] of this rank's chunks on their way to others, and what comes from them."""
        exchange = Exchange(self._label("keys of", sent=self.lent, received=self.fetched))
        for share in self.lent:
            exchange.send([share.rows.take(kv)], share.peer)
        parts = [exchange.recv([kv], share.rows.tokens, share.peer)[0] for share in self.fetched]
        exchange.post(self.channel.communicator, tag=self.channel.tag(GATHER))
        return exchange, parts

    def _in_order(self, kv: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's rows and those of the others -> [keys of the call, 2, Hkv, D]."""
        return torch.cat([kv, *parts]).index_select(0, self.gathered)

    def _return(
        self, dkv: torch.Tensor, kv: torch.Tensor
    ) -> tuple[Exchange, torch.Tensor, list[tuple[Rows, torch.Tensor]]]:
        """Gradients [keys of the call, 2, Hkv, D] on their way to the owners; the sum of this rank's own so far, and
        what comes from others to be added to it."""
        sizes = [kv.shape[0], *(share.rows.tokens for share in self.fetched)]
        sums = torch.zeros(sum(sizes), *kv.shape[1:], dtype=lse_dtype(kv.dtype), device=kv.device)
        sums.index_add_(0, self.gathered, dkv.to(sums.dtype))
        own, *parts = sums.split(sizes)
        exchange = Exchange(self._label("gradients of", sent=self.fetched, received=self.lent))
        for part, share in zip(parts, self.fetched, strict=True):
            exchange.send([part], share.peer)
        returned = [(share.rows, exchange.recv([own], share.rows.tokens, share.peer)[0]) for share in self.lent]
        exchange.post(self.channel.communicator, tag=self.channel.tag(RETURN))
        return exchange, own, returned

    def _label(self, what: str, *, sent: Sequence[Share], received: Sequence[Share]) -> Label:
        def describe(peer: int, to_peer: bool) -> str:
            pieces = next(share.pieces for share in (sent if to_peer else received) if share.peer == peer)
            return f"{what} {name_pieces(pieces, self.channel.group.sequences)}"

        return self.channel.label(describe)


def pieces_read(cuts: Sequence[Cut], owner: int, reader: int, degree: int) -> tuple[Piece, ...]:
    """What the rank of index `owner` holds and queries of the rank of index `reader` read, in the owner's order."""
    pieces = []
    for place, cut in enumerate(cuts):
        queries = [c for c in held_chunks("allgather", reader, degree, mirrored=cut.mirrored) if cut.tokens((c,))]
        keys = held_chunks("allgather", owner, degree, mirrored=cut.mirrored)
        pieces += [(place, chunk) for chunk in keys if queries and chunk <= max(queries)]
    return tuple(pieces)


def _call(
    cuts: Sequence[Cut], index: int, degree: int, arrived: Iterable[Piece], device: torch.device
) -> tuple[torch.Tensor, Segments]:
    """Which of the rows that arrived, in the order of `arrived`, are the keys of the call, and its sequences."""
    starts, row = {}, 0
    for place, chunk in arrived:
        starts[place, chunk] = row
        row += cuts[place].tokens((chunk,))
    keys, q_lens, k_lens = [torch.arange(0)], [], []
    for place, cut in enumerate(cuts):
        for own in held_chunks("allgather", index, degree, mirrored=cut.mirrored):
            q_lens.append(cut.tokens((own,)))
            before = range(own + 1) if q_lens[-1] else ()
            k_lens.append(cut.tokens(before))
            keys += [torch.arange(starts[place, c], starts[place, c] + cut.tokens((c,))) for c in before]
    return torch.cat(keys).to(device), Segments(q_lens, k_lens, causal=True, device=device)
