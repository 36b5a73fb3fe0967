"""Everything that attention must know of the chunk it works on; travels as `seq_ctx`, like the
context of a micro-batch.

A chunk's row is [the part of a cut sequence | whole sequences], either of which may be missing:

    ChunkContext    the chunk on one stage, with the programs of its attention
    LayerContext    its attention in one layer
    CutZone         the part of a cut sequence, which also reads the carry
    LocalZone       the whole sequences, as in a group of one rank

Where ranks share the chunk (`ulysses.py`), both zones are inside an exchange of tokens for heads.
"""

import functools
from functools import partial

import torch

from hf_flexseq.attention.programs import MicroBatchPrograms
from hf_flexseq.attention.remat import Hook, checkpointed_region
from hf_flexseq.attention.replay import CutAttention, Tensors
from hf_flexseq.layers import Reach, Scores
from hf_flexseq.pipeline.carry import Carried, CutPart, KVCarry
from hf_flexseq.pipeline.ulysses import Sharing, shared_chunk
from hf_flexseq.plan import Group
from hf_flexseq.plan.pipeline import Chunk
from hf_flexseq.plan.shard import Zone
from hf_flexseq.program.builder import Builder, Tables, Values
from hf_flexseq.program.compile import Parts
from hf_flexseq.program.instructions import INPUT, WIDE, LayerShape, Value
from hf_flexseq.program.local import LocalZone
from hf_flexseq.program.segments import RankSegments
from hf_flexseq.program.weave import ZoneSteps
from hf_flexseq.program.zones import Sinks, ZoneAttention
from hf_flexseq.recurrent.carry import Carrying, Part, StateCarry


class ChunkContext:
    """A chunk on a stage. A plain class, as `SequenceContext` is, and for the same reason."""

    __slots__ = ("_cut", "_lengths", "carry", "checkpointed", "programs", "states", "tokens")

    def __init__(
        self,
        chunk: Chunk,
        lengths: tuple[int, ...],
        carry: KVCarry,
        device: torch.device,
        *,
        states: StateCarry | None = None,
        checkpointed: frozenset[int] = frozenset(),
        sharing: Sharing | None = None,
    ) -> None:
        """Lay the chunk's row out.

        lengths: tokens of every sequence of the plan
        carry: of the stage
        states: of the recurrent layers of the stage
        checkpointed: layers, by index in the model, that drop their activations and compute them
            again in the backward
        sharing: with whom this rank shares the chunk's tokens; None when it has all
        """
        self.carry = carry
        self.states = StateCarry() if states is None else states
        self.checkpointed = checkpointed
        self._lengths = lengths
        # 1. the part of a cut sequence that it begins with
        part = chunk.cut(lengths)  # None without one
        self._cut = None if part is None else CutPart(part, device)

        # 2. this rank's tokens: all, a part of them, or a dummy token
        self.tokens = chunk.tokens
        if sharing is not None:
            start, stop = sharing.part(chunk.tokens)
            self.tokens = max(1, stop - start)

        # 3. what the attention of all layers does with them
        tables = Tables()
        parts = Parts(
            rank=0 if sharing is None else sharing.ranks[sharing.index],
            wide=carry.kernel.wide_gradients,
            tables=tables,
            linear_tokens=self.tokens,
            attention_tokens=self.tokens,
            zones=functools.cache(partial(_rank_zones, chunk, lengths, tables, sharing)),
            remap=None,
            segments=functools.cache(partial(_rank_segments, chunk, lengths, tables, sharing)),
        )
        communicator = None if sharing is None else sharing.communicator
        self.programs = MicroBatchPrograms(parts, communicator, carry.kernel, device)

    def of_layer(self, layer: int, *, keeps_grad: bool) -> "LayerContext":
        """Return the context of one layer's attention, for `sequence_parallel_attention`.

        layer: its index in the model
        keeps_grad: whether a backward will follow
        """
        cut = None
        if self._cut is not None:
            cut = LayerCut(self, self._cut, layer, keeps_grad=keeps_grad)
        return LayerContext(self.tokens, self.programs, cut)

    def in_layer(self, layer: int) -> "ChunkInLayer":
        """Return the chunk as one run of one layer sees it. layer: its index in the model"""
        return ChunkInLayer(self, layer)

    def carrying(self, layer: int, call: int, *, keeps_grad: bool) -> Carrying | None:
        """Return what a call of a recurrent layer carries; None where all sequences are whole.

        layer: its index in the model
        call: which of its recurrent calls this is
        keeps_grad: whether a backward will follow
        """
        if self._cut is None:
            return None
        cut = self._cut.part
        part = Part(cut.sequence, cut.start, cut.stop, self._lengths[cut.sequence])
        runs_again = checkpointed_region() is not None
        return Carrying(self.states, (layer, call), part, keeps_grad, runs_again)

    def carried(self, part: CutPart, layer: int, *, keeps_grad: bool, runs_again: bool) -> Carried:
        """Return what is carried in a layer of the sequence of a part; see `KVCarry.at`."""
        length = self._lengths[part.part.sequence]
        return self.carry.at(
            layer, part.part, length, keeps_grad=keeps_grad, runs_again=runs_again
        )


def _rank_zones(
    chunk: Chunk,
    lengths: tuple[int, ...],
    tables: Tables,
    sharing: Sharing | None,
    reach: Reach,
) -> tuple[ZoneAttention, ...]:
    """Return the zones of this rank's tokens.

    lengths: tokens of every sequence of the plan
    sharing: with whom this rank shares them; None when it has all
    reach: which keys a query reads
    """
    zones = _zones(chunk, lengths, tables, reach)
    if sharing is None:
        return tuple(zones)
    shared = shared_chunk(chunk.tokens, zones, sharing)
    start, stop = sharing.part(chunk.tokens)
    if start == stop:
        return (shared, LocalZone(slice(0, 1), (1,), tables))
    return (shared,)


def _rank_segments(
    chunk: Chunk, lengths: tuple[int, ...], tables: Tables, sharing: Sharing | None
) -> RankSegments:
    """Return the segments of this rank's tokens: the slices of the chunk, each as a sequence of
    its own, or its parts of them.

    lengths: tokens of every sequence of the plan
    sharing: with whom this rank shares them; None when it has all
    """
    goes_on = chunk.cut(lengths) is not None
    assert sharing is None or not goes_on, "no state is carried between ranks that share a chunk"
    group = Group(
        ranks=(0,) if sharing is None else sharing.ranks,
        sequences=tuple(one.sequence for one in chunk.slices),
        strategy="local" if sharing is None else "ulysses",
    )
    index = 0 if sharing is None else sharing.index
    start, stop = (0, chunk.tokens) if sharing is None else sharing.part(chunk.tokens)
    zone = Zone(
        group=group,
        index=index,
        lengths=tuple(one.tokens for one in chunk.slices),
        slices=(),
        start=0,
        stop=stop - start,
    )
    if start < stop:
        return RankSegments((zone,), tables, goes_on=goes_on)
    dummy = Group(ranks=group.ranks[index : index + 1], sequences=(0,), strategy="local")
    return RankSegments(
        (zone, Zone(group=dummy, index=0, lengths=(1,), slices=(), start=0, stop=1)), tables
    )


def _zones(
    chunk: Chunk, lengths: tuple[int, ...], tables: Tables, reach: Reach
) -> list[ZoneAttention]:
    """Return the zones of the whole row: the part of a cut sequence, and whole sequences.

    lengths: tokens of every sequence of the plan
    reach: which keys a query reads
    """
    zones: list[ZoneAttention] = []
    whole = chunk.slices
    part = chunk.cut(lengths)  # None without one
    if part is not None:
        zones.append(CutZone(part.tokens))
        whole = chunk.slices[1:]
    for one in whole:
        assert one.tokens == lengths[one.sequence], f"{chunk} has two parts of sequences"
    if whole:
        tokens = [one.tokens for one in whole]
        rows = slice(chunk.tokens - sum(tokens), chunk.tokens)
        zones.append(LocalZone(rows, tokens, tables, reach=reach))
    return zones


class ChunkInLayer:
    """A chunk as one layer sees it: recurrent layers carry states, and are told apart by the order
    of their calls in one run, be it the forward or a replay."""

    __slots__ = ("_calls", "_layer", "_replay", "chunk", "kept", "linear_tokens", "programs")

    def __init__(self, chunk: ChunkContext, layer: int) -> None:
        self.chunk = chunk
        self.programs = chunk.programs
        self.linear_tokens = chunk.tokens
        self.kept = None  # what a replay needs is in the carry
        self._layer = layer
        self._calls = 0
        self._replay: Hook | None = None  # that runs now; None in the forward

    def of_layer(self, layer: int, *, keeps_grad: bool) -> "LayerContext":
        """Return the context of attention; see `ChunkContext.of_layer`."""
        return self.chunk.of_layer(layer, keeps_grad=keeps_grad)

    def carrying(self, *, keeps_grad: bool) -> Carrying | None:
        """Return what the next recurrent call of the layer carries; None where all sequences are
        whole. keeps_grad: whether a backward will follow"""
        region = checkpointed_region()
        replay = region.hook if region is not None and region.replays else None
        if replay is not self._replay:  # of a layer that checkpoints itself: a new run begins
            self._replay = replay
            self._calls = 0
        self._calls += 1
        return self.chunk.carrying(self._layer, self._calls, keeps_grad=keeps_grad)


class LayerContext:
    """The context that `sequence_parallel_attention` asks for.

    Nothing is kept for a replay, which finds keys and values in the carry, and no token stands
    elsewhere outside of attention.
    """

    __slots__ = ("cut", "kept", "linear_tokens", "programs")

    def __init__(
        self, linear_tokens: int, programs: MicroBatchPrograms, cut: CutAttention | None
    ) -> None:
        self.kept = None
        self.linear_tokens = linear_tokens
        self.programs = programs
        self.cut = cut


class LayerCut:
    """The part of a cut sequence in one layer: it attends to the carry, too."""

    __slots__ = ("_carried", "_chunk", "_keeps_grad", "_layer", "_part", "_runs_again")

    def __init__(
        self, chunk: ChunkContext, part: CutPart, layer: int, *, keeps_grad: bool
    ) -> None:
        """Carry nothing yet. keeps_grad: whether a backward will follow."""
        self._chunk = chunk
        self._part = part
        self._layer = layer
        self._keeps_grad = keeps_grad
        self._runs_again = checkpointed_region() is not None
        self._carried: Carried | None = None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, reach: Reach
    ) -> Tensors:
        """Return out [tokens, heads, head_dim] and lse [heads, tokens].

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]
        """
        self._carried = self._chunk.carried(
            self._part,
            self._layer,
            keeps_grad=self._keeps_grad,
            runs_again=self._runs_again,
        )
        return self._carried.forward(self._part, q, k, v, scores, reach)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scores: Scores,
        reach: Reach,
    ) -> Tensors:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim], in the
        dtype of lse.

        dout, q, out: [tokens, heads, head_dim]; lse: [heads, tokens]
        """
        assert self._carried is not None, "a backward without its forward"
        grads = self._carried.backward(self._part, dout, q, out, lse, scores, reach)
        return tuple(grad.to(lse.dtype) for grad in grads)


class CutZone(ZoneAttention):
    """The part of a sequence that a chunk begins with. For the backward it keeps q, out and lse
    alone; keys and values are in the carry."""

    __slots__ = ("_key_shapes", "rows")

    def __init__(self, tokens: int) -> None:
        """tokens: of the part, which are the first of the row."""
        self.rows = slice(0, tokens)
        self._key_shapes: dict[LayerShape, tuple[int, ...]] = {}  # of the forward's keys

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim], and what `backward` needs.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]
        """
        yield 0.0
        self._key_shapes[b.shape] = k.shape
        made = ((q.shape, INPUT), ((q.shape[1], q.rows), WIDE))
        out, lse = b.special("attend_cut", (q, k, v), made, b.shape.reach)
        if sinks is not None:
            sinks.apply(b, out, lse)
        return out, (q, out, lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        yield 0.0
        q, out, lse = saved
        if sinks is not None:
            sinks.add_gradient(b, dout, out, lse)
        key_shape = self._key_shapes[b.shape]
        made = ((q.shape, WIDE), (key_shape, WIDE), (key_shape, WIDE))
        return b.special("gradients_of_cut", (dout, q, out, lse), made, b.shape.reach)
