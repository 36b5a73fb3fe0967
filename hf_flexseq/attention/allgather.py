"""Keys and values first, then one kernel call: attention without partial results.

    keys, values  --gather by need-->  tokens 0..stop of each of this rank's chunks  --kernel-->
    out

1. A rank holds two chunks of each sequence, as in `zigzag`, which evens out the work. It gathers
   the chunks that its last one reads: inside a node straight from their owners, between nodes in
   two legs (`schedule/gather.py`).
2. One varlen call takes each of its chunks as a sequence of its own, with the chunk as the last of
   its keys, so that nothing is merged and a 16-bit result is as exact as on one rank. Keys that
   both chunks of a sequence read are in the call twice, on average a quarter of the sequence.
3. Backward: the gathered keys and values are fetched again instead of kept, for they are whole
   sequences. Gradients of keys that several queries read go the way back, and are summed in
   float32 (float64 for float64): here, where they leave the node, and at their owner.

Llama 3 (arXiv 2407.21783, section 3.3.2) for the gather and the two chunks; there everything is
gathered, here only what is read, three quarters of it. Rejected: computing this rank's own block
meanwhile, which would have to be merged; the gather hides under nothing but other zones.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.turns import Rows, name_chunks
from hf_flexseq.attention.types import Saved, Tensors
from hf_flexseq.attention.weave import END, ZoneSteps
from hf_flexseq.distributed.communicator import Channel, Exchange
from hf_flexseq.distributed.tags import gather_leg, return_leg
from hf_flexseq.distributed.transport import Label
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan.shard import Cut, Zone, cuts, held_chunks
from hf_flexseq.schedule.attention import ChunkKey
from hf_flexseq.schedule.gather import RankLeg, gather_of_rank


class ChunkMessage(NamedTuple):
    """Rows of some chunks that travel between this rank and another one."""

    peer: int  # global rank
    rows: Rows  # which rows; only their number where they are received
    chunks: tuple[ChunkKey, ...]  # what the rows are


class Leg(NamedTuple):
    """This rank's part in one leg of the gather."""

    before: int  # rows that this rank has when the leg begins
    sent: tuple[ChunkMessage, ...]  # which of these rows go to other ranks
    received: tuple[ChunkMessage, ...]  # what comes from other ranks, behind these rows

    @property
    def sizes(self) -> list[int]:
        """Rows of each message that is received."""
        return [message.rows.tokens for message in self.received]

    @property
    def after(self) -> int:
        """Rows that this rank has when the leg has ended."""
        return self.before + sum(self.sizes)


class AllGatherZone:
    """This rank's part in an all-gather group."""

    __slots__ = ("channel", "kernel", "key_rows", "legs", "rows", "segments")

    def __init__(self, zone: Zone, channel: Channel, kernel: Kernel, device: torch.device) -> None:
        """Find what every leg moves, and the kernel call after the last one."""
        self.rows = slice(zone.start, zone.stop)
        self.channel = channel
        self.kernel = kernel

        # 1. what every leg moves
        degree = zone.group.degree
        ranks_per_node = channel.communicator.topology.ranks_per_node
        group_cuts = cuts("allgather", zone.lengths, degree)
        gathered = GatheredChunks(group_cuts, zone.index, degree)
        legs = []
        for messages in gather_of_rank(group_cuts, degree, ranks_per_node, zone.index):
            legs.append(_leg(messages, zone, gathered, device))
        self.legs = tuple(legs)

        # 2. what the kernel reads; key_rows: [keys of the call], indices of gathered rows
        self.key_rows, self.segments = _kernel_call(zone, group_cuts, gathered, device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """Return out [tokens, heads, head_dim], and save q, k with v, out, lse [heads, tokens].

        q: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim].
        """
        kv = torch.stack((k, v), dim=1)  # [tokens, 2, kv_heads, head_dim]
        gathered = yield from self._gather(kv, until=1.0)  # [keys, 2, kv_heads, head_dim]
        keys, values = gathered.unbind(1)  # [keys, kv_heads, head_dim]
        out, lse = self.kernel.forward(q, keys, values, self.segments, scale=scale)
        return out, Saved((q, kv, out, lse))

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        q, kv, out, lse = saved.tensors
        gathered = yield from self._gather(kv, until=0.5)  # [keys, 2, kv_heads, head_dim]
        keys, values = gathered.unbind(1)  # [keys, kv_heads, head_dim]
        dq, dkeys, dvalues = self.kernel.backward(
            dout, q, keys, values, out, lse, self.segments, scale=scale
        )
        # [keys, 2, kv_heads, head_dim] -> [tokens, 2, kv_heads, head_dim]
        dkv = yield from self._return(torch.stack((dkeys, dvalues), dim=1))
        dk, dv = dkv.unbind(1)
        return dq, dk, dv

    def backward_of_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> ZoneSteps[Tensors]:
        """Return what `backward` does.

        q, out, dout: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim]. lse: [heads,
        tokens].
        """
        kv = torch.stack((k, v), dim=1)  # [tokens, 2, kv_heads, head_dim]
        return self.backward(dout, Saved((q, kv, out, lse)), scale)

    def _gather(self, kv: torch.Tensor, *, until: float) -> ZoneSteps[torch.Tensor]:
        """Gather [tokens, 2, kv_heads, head_dim] of all ranks -> [keys, 2, kv_heads, head_dim].

        until: the time of the zone at which all keys are there.
        """
        # [rows after the last leg, 2, kv_heads, head_dim]: this rank's own rows come first
        gathered = kv.new_empty(self.legs[-1].after, *kv.shape[1:])
        gathered[: len(kv)] = kv
        for n, leg in enumerate(self.legs):
            # 1. rows that other ranks read
            label = self._label("keys of", sent=leg.sent, received=leg.received)
            exchange = Exchange(label)
            for message in leg.sent:
                exchange.send([message.rows.take(gathered)], message.peer)
            # 2. rows that this rank reads, or passes on: straight to where they belong
            parts = gathered[leg.before : leg.after].split(leg.sizes)
            for part, message in zip(parts, leg.received, strict=True):
                exchange.recv_into([part], message.peer)
            exchange.post(self.channel.communicator, tag=self.channel.tag(gather_leg(n)))
            yield until * (n + 1) / len(self.legs)
            exchange.wait()
        return gathered.index_select(0, self.key_rows)

    def _return(self, dkv: torch.Tensor) -> ZoneSteps[torch.Tensor]:
        """Return gradients to the owners of the keys and sum them: [keys, 2, kv_heads, head_dim]
        -> [tokens, 2, kv_heads, head_dim]. The transpose of `_gather`.
        """
        # [rows after the last leg, 2, kv_heads, head_dim]
        sums = dkv.new_zeros(self.legs[-1].after, *dkv.shape[1:], dtype=lse_dtype(dkv.dtype))
        sums.index_add_(0, self.key_rows, dkv.to(sums.dtype))
        for n in reversed(range(len(self.legs))):
            leg = self.legs[n]
            # 1. what the leg brought goes back: [rows after, ...] -> [rows before, ...]
            sums, *parts = sums.split([leg.before, *leg.sizes])
            label = self._label("gradients of", sent=leg.received, received=leg.sent)
            exchange = Exchange(label)
            for part, message in zip(parts, leg.received, strict=True):
                exchange.send([part], message.peer)
            # 2. and what it took away comes back, from every reader
            returned = []
            for message in leg.sent:
                (part,) = exchange.recv([sums], message.rows.tokens, message.peer)
                returned.append(part)
            exchange.post(self.channel.communicator, tag=self.channel.tag(return_leg(n)))
            yield 0.75 if n else END
            exchange.wait()
            for part, message in zip(returned, leg.sent, strict=True):
                message.rows.add_to(sums, part)
        return sums

    def _label(
        self, what: str, *, sent: Sequence[ChunkMessage], received: Sequence[ChunkMessage]
    ) -> Label:
        """Make the label that names the chunks of these messages in errors."""

        def describe(peer: int, to_peer: bool) -> str:
            messages = sent if to_peer else received
            (chunks,) = [message.chunks for message in messages if message.peer == peer]
            return f"{what} {name_chunks(chunks, self.channel.group.sequences)}"

        return self.channel.label(describe)


class GatheredChunks:
    """Which rows the chunks fill that this rank has: first its own, then what every leg brings."""

    __slots__ = ("_cuts", "_starts", "tokens")

    def __init__(self, group_cuts: Sequence[Cut], index: int, degree: int) -> None:
        """index: this rank's index in the group of `degree` ranks."""
        self._cuts = group_cuts
        self._starts: dict[ChunkKey, int] = {}
        self.tokens = 0  # rows so far
        for sequence, cut in enumerate(group_cuts):
            chunks = held_chunks("allgather", index, degree, mirrored=cut.mirrored)
            self.append((sequence, chunk) for chunk in chunks)

    def append(self, keys: Iterable[ChunkKey]) -> int:
        """Put chunks behind the rows so far, and return how many rows they fill."""
        before = self.tokens
        for key in keys:
            self._starts[key] = self.tokens
            self.tokens += self._tokens(key)
        return self.tokens - before

    def rows(self, keys: Iterable[ChunkKey]) -> torch.Tensor:
        """Return [tokens of the chunks], the rows of those that are not empty."""
        ranges = [torch.arange(0)]  # for `cat`, which wants a tensor at least
        for key in keys:
            tokens = self._tokens(key)
            if tokens:
                start = self._starts[key]
                ranges.append(torch.arange(start, start + tokens))
        return torch.cat(ranges)

    def _tokens(self, key: ChunkKey) -> int:
        sequence, chunk = key
        return self._cuts[sequence].tokens((chunk,))


def _leg(messages: RankLeg, zone: Zone, gathered: GatheredChunks, device: torch.device) -> Leg:
    """Make this rank's part in a leg, and append the chunks that it brings to `gathered`."""
    before = gathered.tokens
    sent = []
    for i, chunks in messages.sent:
        index = to_device(gathered.rows(chunks), device)
        sent.append(ChunkMessage(zone.group.ranks[i], Rows(len(index), index), chunks))
    received = []
    for i, chunks in messages.received:
        rows = Rows(gathered.append(chunks), None)
        received.append(ChunkMessage(zone.group.ranks[i], rows, chunks))
    return Leg(before, tuple(sent), tuple(received))


def _kernel_call(
    zone: Zone, group_cuts: Sequence[Cut], gathered: GatheredChunks, device: torch.device
) -> tuple[torch.Tensor, Segments]:
    """Return which of the gathered rows are keys of the kernel call, [keys], and the call's
    sequences: one for each chunk that this rank holds, over all tokens up to its end."""
    key_rows = [torch.arange(0)]
    q_lens = []
    k_lens = []
    for sequence, cut in enumerate(group_cuts):
        chunks = held_chunks("allgather", zone.index, zone.group.degree, mirrored=cut.mirrored)
        for chunk in chunks:
            queries = cut.tokens((chunk,))
            read = range(chunk + 1) if queries else range(0)
            q_lens.append(queries)
            k_lens.append(cut.tokens(read))
            key_rows.append(gathered.rows((sequence, earlier) for earlier in read))
    segments = Segments(q_lens, k_lens, causal=True, device=device)
    return to_device(torch.cat(key_rows), device), segments
