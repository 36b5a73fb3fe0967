"""What attention must know of the chunk it works on; travels as `seq_ctx`, like the context of a micro-batch."""

import torch

from hf_flexseq.attention.local import LocalZone, Tensors
from hf_flexseq.pipeline.carry import Carried, KVCarry
from hf_flexseq.plan import Group
from hf_flexseq.schedule.pipeline.actions import Chunk
from hf_flexseq.shard import Slice, Zone


class ChunkContext:
    """One chunk on one stage. A plain class, as `SequenceContext` is, and for the same reason.

    carry: of the stage. checkpointed: layers, by index in the model, that drop their activations and compute them
    again in the backward.
    """

    __slots__ = ("_cut", "_lengths", "_whole", "carry", "checkpointed", "tokens")

    def __init__(
        self,
        chunk: Chunk,
        lengths: tuple[int, ...],
        carry: KVCarry,
        device: torch.device,
        *,
        checkpointed: frozenset[int] = frozenset(),
    ) -> None:
        self.carry, self.checkpointed, self.tokens = carry, checkpointed, chunk.tokens
        self._lengths, self._cut = lengths, chunk.cut(lengths)
        whole = chunk.slices if self._cut is None else chunk.slices[1:]
        assert all(part.tokens == lengths[part.sequence] for part in whole), f"{chunk} has two parts of sequences"
        self._whole = _whole_zone(whole, chunk.tokens, carry, device) if whole else None

    def of_layer(self, layer: int, *, keeps_grad: bool) -> "LayerContext":
        """The context of one layer's attention, for `sequence_parallel_attention`. keeps_grad: see `KVCarry.at`."""
        zones: list[CutZone | LocalZone] = []
        if self._cut is not None:
            length = self._lengths[self._cut.sequence]
            zones.append(CutZone(self._cut, self.carry.at(layer, self._cut, length, keeps_grad=keeps_grad)))
        if self._whole is not None:
            zones.append(self._whole)
        return LayerContext(self.tokens, tuple(zones))


class LayerContext:
    """What `sequence_parallel_attention` asks of a context."""

    __slots__ = ("tokens", "zones")

    def __init__(self, tokens: int, zones: "tuple[CutZone | LocalZone, ...]") -> None:
        self.tokens, self.zones = tokens, zones


class CutZone:
    """The part of a sequence that a chunk begins with. For the backward it keeps q, out and lse alone; keys and values
    are in the carry."""

    __slots__ = ("carried", "piece", "rows")

    def __init__(self, piece: Slice, carried: Carried) -> None:
        self.rows = slice(0, piece.tokens)
        self.piece, self.carried = piece, carried

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, Tensors]:
        """q [t, H, D], k, v [t, Hkv, D] -> out [t, H, D], and what `backward` needs."""
        out, lse = self.carried.forward(self.piece, q, k, v, scale)
        return out, (q, out, lse)

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> Tensors:
        q, out, lse = saved
        return self.carried.backward(self.piece, dout, q, out, lse, scale)


def _whole_zone(whole: tuple[Slice, ...], stop: int, carry: KVCarry, device: torch.device) -> LocalZone:
    """Whole sequences, at the end of a row that stops at `stop`, as a group of this rank alone."""
    group = Group(ranks=(0,), sequences=tuple(part.sequence for part in whole), strategy="local")
    lengths = tuple(part.tokens for part in whole)
    zone = Zone(group=group, index=0, lengths=lengths, slices=whole, start=stop - sum(lengths), stop=stop)
    return LocalZone(zone, carry.kernel, device)
