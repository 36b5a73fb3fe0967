"""Everything that attention must know of the chunk it works on; travels as `seq_ctx`, like the
context of a micro-batch.

A chunk's row is [the part of a cut sequence | whole sequences], either of which may be missing:

    ChunkContext    the chunk on one stage
    LayerContext    its attention in one layer: the zones of the row
    CutZone         the part of a cut sequence, which also reads the carry
    LocalZone       the whole sequences, as in a group of one rank

Where ranks share the chunk (`ulysses.py`), both zones are inside an exchange of tokens for heads.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from hf_flexseq.attention.heads import Repeats
from hf_flexseq.attention.local import LocalZone
from hf_flexseq.attention.types import Saved, Tensors, ZoneAttention
from hf_flexseq.attention.weave import ZoneSteps
from hf_flexseq.pipeline.carry import Carried, CutPart, KVCarry
from hf_flexseq.pipeline.ulysses import Sharing, shared_chunk
from hf_flexseq.plan.pipeline import Chunk


class ChunkContext:
    """A chunk on a stage. A plain class, as `SequenceContext` is, and for the same reason."""

    __slots__ = (
        "_chunk_tokens",
        "_cut",
        "_dummy",
        "_lengths",
        "_repeats",
        "_sharing",
        "_whole",
        "carry",
        "checkpointed",
        "tokens",
    )

    def __init__(
        self,
        chunk: Chunk,
        lengths: tuple[int, ...],
        carry: KVCarry,
        device: torch.device,
        *,
        checkpointed: frozenset[int] = frozenset(),
        sharing: Sharing | None = None,
    ) -> None:
        """Lay the chunk's row out.

        lengths: tokens of every sequence of the plan
        carry: of the stage
        checkpointed: layers, by index in the model, that drop their activations and compute them
            again in the backward
        sharing: with whom this rank shares the chunk's tokens; None when it has all
        """
        self.carry = carry
        self.checkpointed = checkpointed
        self._lengths = lengths
        self._repeats = Repeats()  # of KV heads, in all layers
        self._sharing = sharing

        # 1. this rank's tokens: a part of the row, or a dummy token
        self._chunk_tokens = chunk.tokens
        self.tokens = chunk.tokens
        self._dummy: LocalZone | None = None
        if sharing is not None:
            start, stop = sharing.part(chunk.tokens)
            self.tokens = stop - start
            if start == stop:
                self.tokens = 1
                self._dummy = _local_zone((1,), 1, carry, device)

        # 2. the whole row: the part of a cut sequence, and whole sequences
        self._cut: CutPart | None = None
        whole = chunk.slices
        part = chunk.cut(lengths)  # None without one
        if part is not None:
            self._cut = CutPart(part, device)
            whole = chunk.slices[1:]
        for one in whole:
            assert one.tokens == lengths[one.sequence], f"{chunk} has two parts of sequences"
        self._whole: LocalZone | None = None
        if whole:
            tokens = [one.tokens for one in whole]
            self._whole = _local_zone(tokens, chunk.tokens, carry, device)

    def of_layer(self, layer: int, *, keeps_grad: bool) -> "LayerContext":
        """Return the context of one layer's attention, for `sequence_parallel_attention`.

        layer: its index in the model
        keeps_grad: whether a backward will follow
        """
        zones: list[ZoneAttention] = []
        if self._cut is not None:
            part = self._cut.part
            length = self._lengths[part.sequence]
            find = partial(self.carry.at, layer, part, length, keeps_grad=keeps_grad)
            zones.append(CutZone(self._cut, find))
        if self._whole is not None:
            zones.append(self._whole)
        if self._sharing is not None:
            wide = self.carry.kernel.wide_gradients
            zones = [
                shared_chunk(
                    self._chunk_tokens, zones, self._sharing, repeats=self._repeats, wide=wide
                )
            ]
        if self._dummy is not None:
            zones.append(self._dummy)
        return LayerContext(self.tokens, tuple(zones))


class LayerContext:
    """The context that `sequence_parallel_attention` asks for.

    Nothing is kept for a replay, which finds keys and values in the carry, and no token stands
    elsewhere outside of attention.
    """

    __slots__ = ("kept", "linear_tokens", "zones")

    def __init__(self, linear_tokens: int, zones: tuple[ZoneAttention, ...]) -> None:
        self.kept = None
        self.linear_tokens = linear_tokens
        self.zones = zones

    def linear_to_attention(self, *tensors: torch.Tensor) -> Tensors:
        """Return the tensors [tokens, ...] as they are."""
        return tensors

    def attention_to_linear(self, *tensors: torch.Tensor) -> Tensors:
        """Return the tensors [tokens, ...] as they are."""
        return tensors


class CutZone(ZoneAttention):
    """The part of a sequence that a chunk begins with. For the backward it keeps q, out and lse
    alone; keys and values are in the carry."""

    __slots__ = ("_carried", "_cut", "_find", "rows")

    def __init__(self, cut: CutPart, find: Callable[[], Carried]) -> None:
        """Carry nothing yet.

        find: returns what is carried of the part's sequence; called when there is something to
            carry
        """
        self._cut = cut
        self.rows = slice(0, cut.part.tokens)
        self._find = find
        self._carried: Carried | None = None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """Return out [tokens, heads, head_dim], and what `backward` needs.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]
        """
        yield 0.0
        self._carried = self._find()
        out, lse = self._carried.forward(self._cut, q, k, v, scale)
        return out, Saved((q, out, lse))

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        yield 0.0
        q, out, lse = saved.tensors
        assert self._carried is not None, "a backward without its forward"
        return self._carried.backward(self._cut, dout, q, out, lse, scale)


def _local_zone(
    lengths: Sequence[int], stop: int, carry: KVCarry, device: torch.device
) -> LocalZone:
    """Return whole sequences as a group of this rank alone.

    lengths: tokens of each; stop: where they end in the row
    """
    return LocalZone(slice(stop - sum(lengths), stop), lengths, carry.kernel, device)
