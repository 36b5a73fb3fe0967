"""Everything that attention must know of the chunk it works on; travels as `seq_ctx`, like the
context of a micro-batch.

A chunk's row is [the part of a cut sequence | whole sequences], either of which may be missing:

    ChunkContext    the chunk on one stage, with the programs of its attention; and, as a copy, in
                    one run of a layer, for its recurrent calls
    ChunkAttention  its attention in one layer
    CutZone         the part of a cut sequence, which also reads the carry
    CallsZone       the whole sequences, as in a group of one rank

Where ranks share the chunk (`ulysses.py`), both zones are inside an exchange of tokens for heads.
"""

import functools
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_flexseq.attention.programs import MicroBatchPrograms
from hf_flexseq.attention.recurrent.carry import CarriedState, Carry, Carrying
from hf_flexseq.attention.remat import Hook, checkpointed_region
from hf_flexseq.attention.replay import CutAttention
from hf_flexseq.base.layers import Reach
from hf_flexseq.kernels import Kernel
from hf_flexseq.pipeline.carry import CarriedKeys, CutCall, CutPart
from hf_flexseq.pipeline.planning.plan import Chunk
from hf_flexseq.pipeline.ulysses import Sharing, shared_chunk
from hf_flexseq.plan import Group
from hf_flexseq.plan.shard import Zone
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.calls import whole_zone
from hf_flexseq.program.compile import Parts
from hf_flexseq.program.instructions import INPUT, WIDE, LayerShape, Value
from hf_flexseq.program.segments import RankSegments
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.weave import ZoneSteps
from hf_flexseq.program.zones import Sinks, ZoneAttention


class ChunkContext:
    """A chunk on a stage. A plain class, as `SequenceContext` is, and for the same reason."""

    def __init__(
        self,
        chunk: Chunk,
        lengths: tuple[int, ...],
        carry: Carry,
        device: torch.device,
        *,
        kernel: Kernel,
        sharing: Sharing | None = None,
        checkpointed: frozenset[int] = frozenset(),
    ) -> None:
        """Lay the chunk's row out.

        lengths: tokens per sequence of the plan
        carry: of the stage
        kernel: of its attention
        sharing: with whom this rank shares the chunk's tokens; None when it has all
        checkpointed: layers, by index in the model, that drop their activations and compute them
            again in the backward
        """
        self.calls: list[Any] | None = None
        """Modules that have called attention in the forward that runs; None outside of one."""
        self.checkpointed = checkpointed
        self.kept = None  # replays read the carry
        self._carry = carry
        # 1. the part of a cut sequence that it begins with
        cut = chunk.cut(lengths)
        self._cut: CutPart | None = None
        if cut is not None:
            self._cut = CutPart(cut, lengths[cut.sequence], kernel, device)

        # 2. what the attention of all layers does with the tokens of this rank
        programs = _programs_of(chunk, 0 if cut is None else cut.tokens, kernel, sharing, device)
        self.programs = programs
        self.tokens = programs.parts.tokens
        for one in chunk.slices if cut is None else chunk.slices[1:]:
            assert one.tokens == lengths[one.sequence], f"{chunk} has two parts of sequences"

        # 3. the run of a layer: see `in_layer`
        self._layer: int | None = None
        self._recurrent_calls = 0
        self._replay: Hook | None = None  # that runs now; None in the forward

    def in_layer(self, layer: int) -> "ChunkContext":
        """Return the chunk as one run of a layer sees it, whose recurrent calls it counts. layer:
        index in the model."""
        run = copy(self)
        run._layer = layer
        return run

    def of_layer(self, layer: int | None, *, keeps_grad: bool) -> "ChunkAttention":
        """Return the context of one layer's attention, by its index in the model. keeps_grad: True
        if a backward will follow"""
        assert layer is not None, "a layer without an index cannot carry keys and values"
        cut = None
        if self._cut is not None:
            part, length = self._cut.part, self._cut.length
            carried = self._carry.find(CarriedKeys, layer, part, length, keeps_grad=keeps_grad)
            cut = CutCall(carried, self._cut)
        return ChunkAttention(self.programs, self.tokens, cut)

    def carrying(self, *, keeps_grad: bool) -> Carrying | None:
        """Return the state that the next recurrent call of this run carries; None if all sequences
        are whole. keeps_grad: True if a backward will follow"""
        if self._cut is None:
            return None
        region = checkpointed_region()
        replay = region.hook if region is not None and region.replays else None
        if replay is not self._replay:  # of a layer that checkpoints itself: a new run begins
            self._replay = replay
            self._recurrent_calls = 0
        self._recurrent_calls += 1
        call = (self._layer, self._recurrent_calls)
        part, length = self._cut.part, self._cut.length
        carried = self._carry.find(CarriedState, call, part, length, keeps_grad=keeps_grad)
        return Carrying(carried, part)


class ChunkAttention(NamedTuple):
    """A chunk as the attention of one layer sees it."""

    programs: MicroBatchPrograms
    tokens: int
    cut: CutAttention | None
    """Attention of the part of a cut sequence, to the carry, too; None where all are whole."""
    kept: None = None
    """A replay finds keys and values in the carry, so nothing is kept for it."""


def _programs_of(
    chunk: Chunk, cut: int, kernel: Kernel, sharing: Sharing | None, device: torch.device
) -> MicroBatchPrograms:
    """Return the uncompiled programs of a chunk. cut: tokens of the part of a cut sequence at the
    start of its row; 0 without one. sharing: None for a rank alone."""
    tables = Tables()
    rank, tokens, communicator = 0, chunk.tokens, None
    if sharing is not None:
        rank, communicator = sharing.ranks[sharing.index], sharing.communicator
        start, stop = sharing.part(chunk.tokens)
        tokens = max(1, stop - start)  # a dummy token where this rank has no part
    parts = Parts(
        rank=rank,
        wide=kernel.wide_gradients,
        tables=tables,
        tokens=tokens,
        zones=functools.cache(partial(_rank_zones, chunk, cut, tables, sharing)),
        segments=functools.cache(partial(_rank_segments, chunk, cut, tables)),
    )
    return MicroBatchPrograms(parts, communicator, kernel, device)


def _rank_zones(
    chunk: Chunk, cut: int, tables: Tables, sharing: Sharing | None, reach: Reach
) -> tuple[ZoneAttention, ...]:
    """Return the zones of this rank's tokens. sharing: None for a rank alone."""
    zones = _zones(chunk, cut, tables, reach)
    if sharing is None:
        return tuple(zones)
    shared = shared_chunk(chunk.tokens, zones, sharing)
    start, stop = sharing.part(chunk.tokens)
    if start == stop:
        return (shared, whole_zone(slice(0, 1), (1,), tables))
    return (shared,)


def _rank_segments(chunk: Chunk, cut: int, tables: Tables) -> RankSegments:
    """Return the segments of a rank that has whole chunks: each slice, as a sequence. Models with
    recurrent layers, which read them, have one rank per stage."""
    sequences = tuple(one.sequence for one in chunk.slices)
    zone = Zone(
        group=Group(ranks=(0,), sequences=sequences, strategy="local"),
        index=0,
        lengths=tuple(one.tokens for one in chunk.slices),
        slices=(),
        start=0,
        stop=chunk.tokens,
    )
    return RankSegments((zone,), tables, goes_on=cut > 0)


def _zones(chunk: Chunk, cut: int, tables: Tables, reach: Reach) -> list[ZoneAttention]:
    """Return the zones of the whole row: the part of a cut sequence, and whole sequences."""
    zones: list[ZoneAttention] = []
    whole = tuple(one.tokens for one in chunk.slices)
    if cut:
        zones.append(CutZone(cut))
        whole = whole[1:]
    if whole:
        zones.append(whole_zone(slice(cut, chunk.tokens), whole, tables, reach=reach))
    return zones


class CutZone(ZoneAttention):
    """The part of a sequence that a chunk begins with. For the backward it keeps q, out and lse
    alone; keys and values are in the carry."""

    def __init__(self, tokens: int) -> None:
        """tokens: of the part, which are the first of the row."""
        self.rows = slice(0, tokens)
        self._key_shapes: dict[LayerShape, tuple[int, ...]] = {}  # of the forward's keys

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim] of q, k and v [tokens, ...], and the backward's
        needs."""
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
