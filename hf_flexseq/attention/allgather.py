"""Keys and values first, then one kernel call: attention without partial results.

    keys, values  --gather by need-->  tokens 0..stop of each of this rank's chunks  --kernel-->
    out

A rank holds two chunks of each sequence, as in `zigzag`, which evens out the work. It gathers the
chunks that its last one reads: inside a node straight from their owners, between nodes in two legs
(`schedule/gather.py`). One varlen call then takes each of its chunks as a sequence of its own,
with the chunk as the last of its keys, so that nothing is merged and a 16-bit result is as exact
as on one rank. Keys that both chunks of a sequence read are in the call twice, on average a
quarter of the sequence.

Backward: the gathered keys and values are fetched again instead of kept, for they are whole
sequences; gradients of keys that several queries read are summed in float32 (float64 for float64):
here, where they leave the node, and at their owner.

Llama 3 (arXiv 2407.21783, section 3.3.2) for the gather and the two chunks; there everything is
gathered, here only what is read, three quarters of it. Rejected: computing this rank's own block
meanwhile, which would have to be merged; the gather hides under nothing but other zones.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.local import Tensors
from hf_flexseq.attention.turns import Rows, Share, name_pieces
from hf_flexseq.attention.weave import END, ZoneSteps
from hf_flexseq.distributed.communicator import Channel, Exchange, Label
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.plan.shard import Cut, Zone, cuts, held_chunks
from hf_flexseq.schedule.gather import Hop, Piece, gather_hops

GATHER, RETURN = 0, 8  # tags, one for every leg


class Leg(NamedTuple):
    """This rank's part in one leg of the gather.

    before: rows that it has by then. lent: which of them go to others. fetched: what comes from
    them, behind those.
    """

    before: int
    lent: tuple[Share, ...]
    fetched: tuple[Share, ...]

    @property
    def sizes(self) -> list[int]:
        return [share.rows.tokens for share in self.fetched]

    @property
    def after(self) -> int:
        return self.before + sum(self.sizes)


class AllGatherZone:
    """This rank's part in an all-gather group."""

    __slots__ = ("channel", "gathered", "kernel", "legs", "rows", "segments")

    def __init__(self, zone: Zone, channel: Channel, kernel: Kernel, device: torch.device) -> None:
        self.rows = slice(zone.start, zone.stop)
        self.channel, self.kernel = channel, kernel
        degree = zone.group.degree
        group_cuts = cuts("allgather", zone.lengths, degree)
        held = GatheredChunks(group_cuts, zone.index, degree)
        hops = gather_hops(group_cuts, degree, channel.communicator.topology.ranks_per_node)
        self.legs = tuple(_leg(of_leg, zone, held, device) for of_leg in hops)
        self.gathered, self.segments = _call(zone, group_cuts, held, device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Tensors]]:
        """q [t, H, D], k, v [t, Hkv, D] of this rank's chunks -> out [t, H, D], and what
        `backward` needs."""
        kv = torch.stack((k, v), dim=1)  # [t, 2, Hkv, D]
        keys, values = (yield from self._gather(kv, until=1.0)).unbind(1)
        out, lse = self.kernel.forward(q, keys, values, self.segments, scale=scale)
        return out, (q, kv, out, lse)

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> ZoneSteps[Tensors]:
        q, kv, out, lse = saved
        keys, values = (yield from self._gather(kv, until=0.5)).unbind(1)
        dq, *dkv = self.kernel.backward(
            dout, q, keys, values, out, lse, self.segments, scale=scale
        )
        sums = yield from self._return(torch.stack(dkv, dim=1))
        return dq, *sums.unbind(1)

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> ZoneSteps[Tensors]:  # type: ignore[no-untyped-def]
        """`backward` from this rank's rows and the last of what `forward` left."""
        return self.backward(dout, (q, torch.stack((k, v), dim=1), out, lse), scale)

    def _gather(self, kv: torch.Tensor, *, until: float) -> ZoneSteps[torch.Tensor]:
        """[t, 2, Hkv, D] of this rank's chunks -> [keys of the call, 2, Hkv, D]. until: a time of
        the zone."""
        held = kv.new_empty(self.legs[-1].after, *kv.shape[1:])
        held[: len(kv)] = kv
        for n, leg in enumerate(self.legs):
            exchange = Exchange(self._label("keys of", sent=leg.lent, received=leg.fetched))
            for share in leg.lent:
                exchange.send([share.rows.take(held)], share.peer)
            for part, share in zip(
                held[leg.before : leg.after].split(leg.sizes), leg.fetched, strict=True
            ):
                exchange.recv_into([part], share.peer)
            exchange.post(self.channel.communicator, tag=self.channel.tag(GATHER + n))
            yield until * (n + 1) / len(self.legs)
            exchange.wait()
        return held.index_select(0, self.gathered)

    def _return(self, dkv: torch.Tensor) -> ZoneSteps[torch.Tensor]:
        """The transpose of `_gather`: [keys of the call, 2, Hkv, D] -> [t, 2, Hkv, D], with what
        other ranks made."""
        sums = dkv.new_zeros(self.legs[-1].after, *dkv.shape[1:], dtype=lse_dtype(dkv.dtype))
        sums.index_add_(0, self.gathered, dkv.to(sums.dtype))
        for n, leg in reversed(list(enumerate(self.legs))):
            sums, *parts = sums.split([leg.before, *leg.sizes])
            exchange = Exchange(self._label("gradients of", sent=leg.fetched, received=leg.lent))
            for part, share in zip(parts, leg.fetched, strict=True):
                exchange.send([part], share.peer)
            returned = [
                exchange.recv([sums], share.rows.tokens, share.peer)[0] for share in leg.lent
            ]
            exchange.post(self.channel.communicator, tag=self.channel.tag(RETURN + n))
            yield 0.75 if n else END
            exchange.wait()
            for part, share in zip(returned, leg.lent, strict=True):
                share.rows.add_to(sums, part)
        return sums

    def _label(self, what: str, *, sent: Sequence[Share], received: Sequence[Share]) -> Label:
        def describe(peer: int, to_peer: bool) -> str:
            pieces = next(
                share.pieces for share in (sent if to_peer else received) if share.peer == peer
            )
            return f"{what} {name_pieces(pieces, self.channel.group.sequences)}"

        return self.channel.label(describe)


class GatheredChunks:
    """Where chunks lie in the rows that this rank has: its own, and then what every leg brings."""

    __slots__ = ("_cuts", "_starts", "tokens")

    def __init__(self, group_cuts: Sequence[Cut], index: int, degree: int) -> None:
        self._cuts, self._starts, self.tokens = group_cuts, {}, 0
        for place, cut in enumerate(group_cuts):
            self.append(
                (place, chunk)
                for chunk in held_chunks("allgather", index, degree, mirrored=cut.mirrored)
            )

    def append(self, pieces: Iterable[Piece]) -> int:
        """Their tokens."""
        before = self.tokens
        for place, chunk in pieces:
            self._starts[place, chunk] = self.tokens
            self.tokens += self._cuts[place].tokens((chunk,))
        return self.tokens - before

    def index(self, pieces: Iterable[Piece]) -> torch.Tensor:
        """The rows of those that have any."""
        sizes = ((piece, self._cuts[piece[0]].tokens(piece[1:])) for piece in pieces)
        ranges = [
            torch.arange(self._starts[piece], self._starts[piece] + n) for piece, n in sizes if n
        ]
        return torch.cat([torch.arange(0), *ranges])


def _leg(hops: Sequence[Hop], zone: Zone, held: GatheredChunks, device: torch.device) -> Leg:
    """This rank's part in these hops, which it then has more rows of."""
    before, to, of = held.tokens, defaultdict(list), defaultdict(list)
    for hop in hops:
        if hop.source == zone.index:
            to[hop.target].append(hop.piece)
        elif hop.target == zone.index:
            of[hop.source].append(hop.piece)
    lent, fetched = [], []
    for i, pieces in sorted(to.items()):
        rows = held.index(pieces).to(device)
        lent.append(Share(zone.group.ranks[i], Rows(len(rows), rows), tuple(pieces)))
    for i, pieces in sorted(of.items()):
        fetched.append(Share(zone.group.ranks[i], Rows(held.append(pieces), None), tuple(pieces)))
    return Leg(before, tuple(lent), tuple(fetched))


def _call(
    zone: Zone, group_cuts: Sequence[Cut], held: GatheredChunks, device: torch.device
) -> tuple[torch.Tensor, Segments]:
    """Which of the rows that it has at last are the keys of the call, and the call's sequences."""
    keys, q_lens, k_lens = [torch.arange(0)], [], []
    for place, cut in enumerate(group_cuts):
        for own in held_chunks("allgather", zone.index, zone.group.degree, mirrored=cut.mirrored):
            q_lens.append(cut.tokens((own,)))
            before = range(own + 1) if q_lens[-1] else ()
            k_lens.append(cut.tokens(before))
            keys.append(held.index((place, chunk) for chunk in before))
    return torch.cat(keys).to(device), Segments(q_lens, k_lens, causal=True, device=device)
