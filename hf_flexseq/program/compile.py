"""The attention of one rank in one micro-batch, as programs.

    rows outside of attention  --remap-->  rows of the groups  --zones, woven-->  results of the
    groups  --remap-->  results outside of attention

    MicroBatchLayout    finds rows, turns and lengths of all zones: what does not depend on a layer
    forward, backward, backward_of_rows
                        compile them for layers of one shape
    of_rows             compiles what recurrent layers exchange (`segments.py`)

All layers of one shape share a program, so it is compiled once for a micro-batch. A backward saves
what every zone asks for; `backward_of_rows` is for layers under activation checkpointing, which
keep this rank's own rows alone (`attention/remat.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_flexseq.layers import Reach
from hf_flexseq.plan.shard import Shard, Zone, cuts
from hf_flexseq.program import segments
from hf_flexseq.program.builder import Builder, Tables, Values
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.halo import halo_zone
from hf_flexseq.program.hybrid import hybrid_zone
from hf_flexseq.program.instructions import (
    INPUT,
    WIDE,
    LayerShape,
    Program,
    RowShape,
    Value,
)
from hf_flexseq.program.local import LocalZone
from hf_flexseq.program.remap import TokenRemap
from hf_flexseq.program.ring import RingZone
from hf_flexseq.program.routes import Routes
from hf_flexseq.program.segments import RankSegments
from hf_flexseq.program.turns import WORTHY_PAIRS, ZoneLayout, make_turns
from hf_flexseq.program.ulysses import ulysses_zone
from hf_flexseq.program.weave import run_zones
from hf_flexseq.program.zones import NoZone, Sinks, ZoneAttention
from hf_flexseq.registry import RINGS
from hf_flexseq.schedule.routing import NicFigures
from hf_flexseq.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What programs depend on beside the plan and the layer; the same on all ranks."""

    topology: Topology

    device: str
    """"cpu" or "cuda": how large a piece of the heads must be to be worth a kernel call."""

    wide_gradients: bool
    """Whether the kernel leaves gradients of 16-bit tensors in float32."""

    links: NicFigures | None = None
    """Over which transfers between nodes may be routed; with None all of them go straight."""

    @property
    def worthy_pairs(self) -> int:
        """(query, key) pairs that make a turn of a ring worth its launches."""
        return WORTHY_PAIRS["cpu" if self.device == "cpu" else "cuda"]


class Parts(NamedTuple):
    """What the programs of some rows are compiled from."""

    rank: int
    wide: bool
    tables: Tables
    linear_tokens: int
    attention_tokens: int

    zones: Callable[[Reach], tuple[ZoneAttention, ...]]
    """The attention of every group, by which keys a query reads; the same objects every time."""

    remap: TokenRemap | None

    segments: Callable[[], RankSegments]
    """The segments that recurrent layers go through; the same object every time."""


class MicroBatchLayout:
    """A rank's zones in one micro-batch, as far as they do not depend on a layer."""

    __slots__ = ("_machine", "_segments", "_shard", "_zones", "parts", "tables")

    def __init__(self, shard: Shard, machine: Machine) -> None:
        """Find the way to and from the rows of attention; zones are laid out when the first layer
        asks for them."""
        self.tables = Tables()
        self._shard = shard
        self._machine = machine
        self._zones: dict[Reach, tuple[ZoneAttention, ...]] = {}
        self._segments: RankSegments | None = None
        remap = None
        if _takes_part_in_remap(shard, machine.links):
            remap = TokenRemap(shard, machine.links)
        self.parts = Parts(
            rank=shard.rank,
            wide=machine.wide_gradients,
            tables=self.tables,
            linear_tokens=shard.linear_tokens,
            attention_tokens=shard.attention_tokens,
            zones=self.zones,
            remap=remap,
            segments=self.segments,
        )

    def segments(self) -> RankSegments:
        """Return the segments that recurrent layers go through."""
        if self._segments is None:
            self._segments = RankSegments(self._shard.zones, self.tables)
        return self._segments

    def zones(self, reach: Reach) -> tuple[ZoneAttention, ...]:
        """Return the attention of every group, widest first, as the plan has them.

        reach: which keys a query reads.
        """
        if reach not in self._zones:
            self._zones[reach] = self._make_zones(reach)
        return self._zones[reach]

    def _make_zones(self, reach: Reach) -> tuple[ZoneAttention, ...]:
        """Find rows, turns and lengths of all zones."""
        shard = self._shard
        machine = self._machine
        # The widest zone waits for a transfer about this often: once for every rank of its group.
        waits = max((zone.group.degree for zone in shard.zones), default=1)
        zones: list[ZoneAttention] = []
        for number, zone in enumerate(shard.zones):
            channel = Channel(zone.group, number)
            attention = _zone_attention(
                zone,
                channel,
                self.tables,
                machine,
                reach=reach,
                rank=shard.rank,
                waits=waits,
            )
            zones.append(attention)
        return tuple(zones) or (NoZone(),)


def forward(parts: Parts, shape: LayerShape) -> Program:
    """Compile the forward: q, k, v -> out, [linear tokens, heads, head_dim] each.

    The sinks [heads] of a layer that has any are the fourth input.
    """
    b = _builder(parts, shape)
    q, k, v = _inputs(b, parts.linear_tokens, "qkv")
    sinks = _sinks(b)
    # 1. to the rows of the groups: each [linear tokens, ...] -> [attention tokens, ...]
    q, k, v = _to_attention(b, parts, (q, k, v))

    # 2. all zones together, each on rows of its own
    steps = []
    for zone in parts.zones(shape.reach):
        zone_q, zone_k, zone_v = (b.part(x, zone.rows.start, zone.rows.stop) for x in (q, k, v))
        steps.append(zone.forward(b, zone_q, zone_k, zone_v, sinks))
    results = run_zones(steps)
    outs = [out for out, _ in results]

    # 3. and back: [attention tokens, heads, head_dim] -> [linear tokens, heads, head_dim]
    (out,) = _to_linear(b, parts, (b.join(outs),))
    return b.program((out,), [saved for _, saved in results])


def backward(parts: Parts, shape: LayerShape, saved: Sequence[Values]) -> Program:
    """Compile the backward: dout, and by zone what the forward saved -> dq, dk, dv, [linear
    tokens, heads, head_dim] each.

    saved: of the program of the forward. The sinks [heads] of a layer that has any come behind
    dout, and their gradient comes last.
    """
    b = _builder(parts, shape)
    (dout,) = _inputs(b, parts.linear_tokens, "q")
    sinks = _sinks(b, with_grads=True)
    inputs = []
    for of_zone in saved:
        inputs.append(tuple(b.input(value.shape, value.dtype) for value in of_zone))
    (dout,) = _to_attention(b, parts, (dout,))
    steps = []
    for zone, of_zone in zip(parts.zones(shape.reach), inputs, strict=True):
        zone_dout = b.part(dout, zone.rows.start, zone.rows.stop)
        steps.append(zone.backward(b, zone_dout, of_zone, sinks))
    grads = _to_linear(b, parts, _joined(b, run_zones(steps)))
    return b.program((*grads, *_grads_of(sinks)))


def backward_of_rows(parts: Parts, shape: LayerShape, saved: Sequence[Values]) -> Program:
    """Compile the backward of a replayed layer: q, k, v, out, dout, and by zone the log-sum-exp
    -> dq, dk, dv, [linear tokens, heads, head_dim] each.

    saved: of the program of the forward; its log-sum-exps alone are kept. The sinks [heads] of a
    layer that has any come before these, and their gradient comes last.
    """
    b = _builder(parts, shape)
    inputs = _inputs(b, parts.linear_tokens, "qkvqq")
    sinks = _sinks(b, with_grads=True)
    lses = [b.input(of_zone[-1].shape, of_zone[-1].dtype) for of_zone in saved]
    q, k, v, out, dout = _to_attention(b, parts, inputs)
    steps = []
    for zone, lse in zip(parts.zones(shape.reach), lses, strict=True):
        start, stop = zone.rows.start, zone.rows.stop
        zone_steps = zone.backward_of_rows(
            b,
            q=b.part(q, start, stop),
            k=b.part(k, start, stop),
            v=b.part(v, start, stop),
            out=b.part(out, start, stop),
            dout=b.part(dout, start, stop),
            lse=lse,
            sinks=sinks,
        )
        steps.append(zone_steps)
    grads = _to_linear(b, parts, _joined(b, run_zones(steps)))
    return b.program((*grads, *_grads_of(sinks)))


# What the rows of recurrent layers go through; see `of_rows`.
LINEAR_TO_ATTENTION = "linear to attention"
ATTENTION_TO_LINEAR = "attention to linear"
BETWEEN_LAYOUTS = (LINEAR_TO_ATTENTION, ATTENTION_TO_LINEAR)  # of remapped micro-batches
HALO = "halo"
HALO_RETURN = "halo return"
SUMMARIES_BEFORE = "summaries before"
SUMMARIES_BEHIND = "summaries behind"


def of_rows(parts: Parts, what: str, shape: RowShape) -> Program:
    """Compile what a recurrent layer exchanges: rows [n, columns] -> [m, columns].

    what: LINEAR_TO_ATTENTION or ATTENTION_TO_LINEAR, of a remapped micro-batch; HALO or
    HALO_RETURN, of a convolution; SUMMARIES_BEFORE or SUMMARIES_BEHIND, of a scan.
    """
    b = _builder(parts, shape.as_layer)
    if what in BETWEEN_LAYOUTS:
        assert parts.remap is not None, "no rows stand elsewhere"
        if what == LINEAR_TO_ATTENTION:
            return segments.linear_to_attention(b, shape, parts.remap, parts.linear_tokens)
        return segments.attention_to_linear(b, shape, parts.remap, parts.attention_tokens)
    if what == HALO:
        return segments.halo(b, shape, parts.segments())
    if what == HALO_RETURN:
        return segments.halo_return(b, shape, parts.segments())
    assert what in (SUMMARIES_BEFORE, SUMMARIES_BEHIND), f"recurrent layers exchange no {what!r}"
    return segments.summaries(b, shape, parts.segments(), behind=what == SUMMARIES_BEHIND)


def _builder(parts: Parts, shape: LayerShape) -> Builder:
    return Builder(parts.tables, shape, rank=parts.rank, wide=parts.wide)


def _inputs(b: Builder, tokens: int, kinds: str) -> Values:
    """Return inputs of [tokens, heads, head_dim], one for each letter: q has the query heads."""
    inputs = []
    for kind in kinds:
        heads = b.shape.query_heads if kind == "q" else b.shape.kv_heads
        inputs.append(b.input((tokens, heads, b.shape.head_dim)))
    return tuple(inputs)


def _sinks(b: Builder, *, with_grads: bool = False) -> Sinks | None:
    """Return the sinks of the layer, an input [heads], with their gradient, which is zero so far;
    None where it has none."""
    if not b.shape.sinks:
        return None
    values = b.input((b.shape.query_heads,), WIDE)
    return Sinks(values, b.zeros(values.shape, WIDE) if with_grads else None)


def _grads_of(sinks: Sinks | None) -> Values:
    """Return the gradient of the sinks [heads], where there are any."""
    if sinks is None or sinks.grads is None:
        return ()
    return (sinks.grads,)


def _to_attention(b: Builder, parts: Parts, values: Values) -> Values:
    if parts.remap is None:
        return values
    return parts.remap.linear_to_attention(b, values)


def _to_linear(b: Builder, parts: Parts, values: Values) -> Values:
    if parts.remap is None:
        return values
    return parts.remap.attention_to_linear(b, values)


def _joined(b: Builder, grads: Sequence[Values]) -> Values:
    """Join dq, dk and dv of all zones, each [tokens of the zone, ...] -> [tokens, ...].

    They are complete sums by now, and so are rounded, once.
    """
    complete: list[Value] = []
    for of_zones in zip(*grads, strict=True):
        complete.append(b.join([b.cast(part, INPUT) for part in of_zones]))
    return tuple(complete)


def _takes_part_in_remap(shard: Shard, links: NicFigures | None) -> bool:
    """Return True where this rank moves tokens in remapping, its own or routed ones of others."""
    if links is not None:
        return bool(shard.moves)
    return bool(shard.given or shard.got)


def _zone_attention(
    zone: Zone,
    channel: Channel,
    tables: Tables,
    machine: Machine,
    *,
    reach: Reach,
    rank: int,
    waits: int,
) -> ZoneAttention:
    """Make the attention of a zone by its group's strategy.

    reach: which keys a query reads. rank: the global rank that works in it. waits: how often about
    the widest zone of this rank waits for transfers; a local zone cuts its work into as many runs.
    """
    rows = slice(zone.start, zone.stop)
    ranks = zone.group.ranks
    ranks_per_node = machine.topology.ranks_per_node
    match zone.group.strategy:
        case "local":
            return LocalZone(rows, zone.lengths, tables, most_runs=waits, reach=reach)
        case "ulysses":
            return ulysses_zone(zone, channel, tables, machine.device, reach)
        case strategy if strategy in RINGS and not reach.is_full:
            group_cuts = cuts(strategy, zone.lengths, len(ranks))
            layout = ZoneLayout(group_cuts, strategy, zone.index, ranks, tables)
            return halo_zone(rows, layout, reach, channel)
        case strategy if strategy in RINGS:
            group_cuts = cuts(strategy, zone.lengths, len(ranks))
            # Between nodes transfers may be routed, time by time of the schedule, and turns are
            # not joined: routed or straight, sums have the same order.
            across = machine.topology.spans_nodes(zone.group.start, zone.group.stop)
            worthy_pairs = 1 if across else machine.worthy_pairs
            turns = make_turns(
                strategy,
                group_cuts,
                zone.index,
                ranks,
                tables,
                worthy_pairs=worthy_pairs,
                device=machine.device,
            )
            routes = _routes(zone, machine, rank) if across else None
            return RingZone(rows, turns, channel, tables, routes)
        case "hybrid":
            return hybrid_zone(
                zone,
                channel,
                tables,
                ranks_per_node,
                worthy_pairs=machine.worthy_pairs,
                device=machine.device,
                reach=reach,
            )
        case other:
            raise AssertionError(f"no attention for strategy {other!r}")


def _routes(zone: Zone, machine: Machine, rank: int) -> Routes | None:
    """Return the routes of a ring across nodes; None where every transfer goes straight.

    A group across nodes consists of whole nodes, so any rank that passes something on is in it.
    """
    group = zone.group
    if machine.links is None:
        return None
    return Routes(group, zone.lengths, machine.links, rank=rank, device=machine.device)
