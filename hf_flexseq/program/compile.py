"""The attention of one rank in one micro-batch, as programs.

    rows of all groups  --zones, woven-->  their results

    parts_of            finds rows, ring steps and lengths of all zones, which no layer changes
    compile_program     compiles them for layers of one shape: FORWARD, BACKWARD, BACKWARD_OF_ROWS,
                        and the exchanges of recurrent layers (`segments.py`)

All layers of one shape share a program, so it is compiled once for a micro-batch. `backward` reads
the values that every zone has saved; `backward_of_rows` is for layers under activation
checkpointing, which keep this rank's own rows alone (`attention/remat.py`). A planner's passes may
rewrite a finished program (`passes.py`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_flexseq.base.layers import Reach
from hf_flexseq.base.registry import RINGS
from hf_flexseq.plan.blocks import NO_BLOCKS, Blocks, Range, block_rows
from hf_flexseq.plan.shard import Shard, cuts
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.calls import CallsZone, whole_zone
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.hybrid import hybrid_zone
from hf_flexseq.program.instructions import (
    INPUT,
    WIDE,
    LayerShape,
    Program,
    RowShape,
    Value,
)
from hf_flexseq.program.ring import ring_zone
from hf_flexseq.program.ring_steps import ZoneLayout
from hf_flexseq.program.row_exchange import gather, give_back
from hf_flexseq.program.segment_halo import Halo
from hf_flexseq.program.segments import RankSegments
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.tags import RECURRENT_BACKWARD, RECURRENT_FORWARD
from hf_flexseq.program.ulysses import ulysses_zone
from hf_flexseq.program.weave import run_zones
from hf_flexseq.program.zones import LayerRows, Machine, Sinks, ZoneAttention


class Parts(NamedTuple):
    """Sources that the programs of some rows are compiled from."""

    rank: int
    wide: bool
    tables: Tables

    tokens: int
    """Rows of all zones."""
    zones: Callable[[Reach], tuple[ZoneAttention, ...]]
    """The attention of every group, by which keys a query reads; the same objects every time."""
    segments: Callable[[], RankSegments]
    """The segments that recurrent layers go through; the same object every time."""
    both_ways: Callable[[Reach], tuple[ZoneAttention, ...]] | None = None
    """`zones` in which the tokens of blocks read each other both ways; None without blocks."""

    def zones_of(self, shape: LayerShape) -> tuple[ZoneAttention, ...]:
        """Return the attention of every group in a layer of this shape."""
        if shape.both_ways and self.both_ways is not None:
            return self.both_ways(shape.reach)
        return self.zones(shape.reach)


def parts_of(shard: Shard, machine: Machine, blocks: Blocks = NO_BLOCKS) -> Parts:
    """Return the sources of a rank's programs in one micro-batch, independent of the layer.

    Zones are laid out when the first layer asks for them. blocks: of all sequences of this rank's
    groups, whoever holds them. Raises ValueError for blocks that do not fit.
    """
    tables = Tables()
    rows_by_zone = [block_rows(zone, blocks) for zone in shard.zones]
    zones = functools.partial(_zones, shard, tables, machine)
    both_ways = functools.cache(functools.partial(zones, rows_by_zone))
    return Parts(
        rank=shard.rank,
        wide=machine.wide_gradients,
        tables=tables,
        tokens=shard.zones[-1].stop if shard.zones else 0,
        zones=functools.cache(functools.partial(zones, [()] * len(rows_by_zone))),
        segments=functools.cache(lambda: RankSegments(shard.zones, tables)),
        both_ways=both_ways if any(rows_by_zone) else None,
    )


def _zones(
    shard: Shard,
    tables: Tables,
    machine: Machine,
    blocks: Sequence[Sequence[Range]],
    reach: Reach,
) -> tuple[ZoneAttention, ...]:
    """Find rows, ring steps and lengths of all zones, widest first. blocks: by zone, the rows of
    its group's sequences whose queries read both ways. reach: keys that a query reads."""
    # The widest zone waits for a transfer about this often: once for every rank of its group.
    # A local zone cuts its work into as many calls.
    waits = max((zone.group.degree for zone in shard.zones), default=1)
    zones: list[ZoneAttention] = []
    for number, (zone, of_zone) in enumerate(zip(shard.zones, blocks, strict=True)):
        rows, trees = slice(zone.start, zone.stop), zone.group.trees
        channel = Channel(zone.group, number)
        match zone.group.strategy:
            case "local":
                local = whole_zone(
                    rows,
                    zone.lengths,
                    tables,
                    reach=reach,
                    trees=trees,
                    blocks=of_zone,
                    most_calls=waits,
                )
                zones.append(local)
            case "ulysses":
                zones.append(ulysses_zone(zone, channel, tables, machine, reach, of_zone))
            case "hybrid":
                zones.append(hybrid_zone(zone, channel, tables, machine, reach))
            case ring if ring in RINGS:
                group_cuts = cuts(ring, zone.lengths, zone.group.degree)
                layout = ZoneLayout(group_cuts, ring, zone.index, zone.group.ranks, tables)
                zones.append(ring_zone(rows, layout, reach, channel, machine, trees))
            case other:
                raise AssertionError(f"no attention for strategy {other!r}")
    return tuple(zones) or (CallsZone(slice(0, 0)),)


# What a program of attention does.
FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_OF_ROWS = "backward of rows"  # of a layer that is replayed (`attention/remat.py`)

# How many inputs, and how many outputs, are [tokens, heads, head_dim]: the first ones.
ROW_INPUTS = {FORWARD: 3, BACKWARD: 1, BACKWARD_OF_ROWS: 5}
ROW_OUTPUTS = {FORWARD: 1, BACKWARD: 3, BACKWARD_OF_ROWS: 3}


def compile_program(
    parts: Parts, what: str, shape: LayerShape | RowShape, forward_program: Program | None = None
) -> Program:
    """Compile a program of a layer.

    what: FORWARD, BACKWARD or BACKWARD_OF_ROWS for attention; for recurrent layers see `of_rows`.
    forward_program: of the same layer, for the backward.
    """
    if isinstance(shape, RowShape):
        return of_rows(parts, what, shape)
    if what == FORWARD:
        return forward(parts, shape)
    assert forward_program is not None, "a backward reads what the forward has saved"
    if what == BACKWARD:
        return backward(parts, shape, forward_program.saved)
    return backward_of_rows(parts, shape, forward_program.saved)


def forward(parts: Parts, shape: LayerShape) -> Program:
    """Compile the forward: q, k, v, sinks [heads] if any -> out, [tokens, heads, head_dim]."""
    b = _builder(parts, shape)
    q, k, v = _inputs(b, parts.tokens, "qkv")
    sinks = _sinks(b)
    # All zones together, each on rows of its own.
    steps = []
    for zone in parts.zones_of(shape):
        zone_q, zone_k, zone_v = (b.part(x, zone.rows.start, zone.rows.stop) for x in (q, k, v))
        steps.append(zone.forward(b, zone_q, zone_k, zone_v, sinks))
    results = run_zones(steps)
    outs = [out for out, _ in results]
    return b.program((b.join(outs),), [saved for _, saved in results])


def backward(parts: Parts, shape: LayerShape, saved: Sequence[Values]) -> Program:
    """Compile the backward: dout, and by zone the values that the forward saved -> dq, dk, dv,
    [tokens, heads, head_dim] each.

    saved: of the program of the forward. The sinks [heads] of a layer that has any come behind
    dout, and their gradient comes last.
    """
    b = _builder(parts, shape)
    (dout,) = _inputs(b, parts.tokens, "q")
    sinks = _sinks(b, with_grads=True)
    inputs = []
    for of_zone in saved:
        inputs.append(tuple(b.input(value.shape, value.dtype) for value in of_zone))
    steps = []
    for zone, of_zone in zip(parts.zones_of(shape), inputs, strict=True):
        zone_dout = b.part(dout, zone.rows.start, zone.rows.stop)
        steps.append(zone.backward(b, zone_dout, of_zone, sinks))
    grads = _joined(b, run_zones(steps))
    return b.program((*grads, *_grads_of(sinks)))


def backward_of_rows(parts: Parts, shape: LayerShape, saved: Sequence[Values]) -> Program:
    """Compile the backward of a replayed layer: q, k, v, out, dout, and by zone the log-sum-exp
    -> dq, dk, dv, [tokens, heads, head_dim] each.

    saved: of the program of the forward; its log-sum-exps alone are kept. The sinks [heads] of a
    layer that has any come before these, and their gradient comes last.
    """
    b = _builder(parts, shape)
    inputs = _inputs(b, parts.tokens, "qkvqq")
    sinks = _sinks(b, with_grads=True)
    lses = [b.input(of_zone[-1].shape, of_zone[-1].dtype) for of_zone in saved]
    steps = []
    for zone, lse in zip(parts.zones_of(shape), lses, strict=True):
        start, stop = zone.rows.start, zone.rows.stop
        rows = LayerRows._make((*(b.part(x, start, stop) for x in inputs), lse))
        steps.append(zone.backward_of_rows(b, rows, sinks))
    grads = _joined(b, run_zones(steps))
    return b.program((*grads, *_grads_of(sinks)))


# What the rows of recurrent layers go through; see `of_rows`.
HALO = "halo"
HALO_RETURN = "halo return"
SUMMARIES_BEFORE = "summaries before"
SUMMARIES_AFTER = "summaries after"


def of_rows(parts: Parts, what: str, shape: RowShape) -> Program:
    """Compile an exchange of a recurrent layer: rows [n, columns] -> [m, columns].

    what: HALO or HALO_RETURN, of a convolution; SUMMARIES_BEFORE or SUMMARIES_AFTER, of a scan.
    """
    b = _builder(parts, shape.as_layer)
    segments = parts.segments()
    if what == HALO_RETURN:
        return _halo_return(b, shape, segments.halo(shape.width))
    # rows of this rank [n, columns] -> those received [m, columns], by group and peer
    if what == HALO:
        halo = segments.halo(shape.width)
        messages, rows, tag = halo.messages, halo.edge_rows, RECURRENT_FORWARD
    else:
        assert what in (SUMMARIES_BEFORE, SUMMARIES_AFTER), f"unknown exchange {what!r}"
        after = what == SUMMARIES_AFTER
        summaries = segments.neighbours(after=after)
        messages, rows = summaries.messages, summaries.rows.takers
        tag = RECURRENT_BACKWARD if after else RECURRENT_FORWARD
    own = b.input((rows, shape.columns))
    exchanges, received = gather(b, messages, own, tag)
    exchanges.wait()
    return b.program((b.join(received) if received else b.empty((0, shape.columns), own.dtype),))


def _halo_return(b: Builder, shape: RowShape, halo: Halo) -> Program:
    """Compile: gradients of received rows [R, columns] -> sums of edge rows [E, columns]."""
    received = b.input((halo.received_rows, shape.columns))
    sums = b.zeros((halo.edge_rows, shape.columns), WIDE)
    exchanges, returned = give_back(b, halo.messages, received, RECURRENT_BACKWARD)
    exchanges.wait()
    for rows, value in returned:
        b.add(sums, rows, value)
    return b.program((b.cast(sums, INPUT),))


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
    """Return the layer's sinks, an input [heads], with zero gradients if asked for, or None."""
    if not b.shape.sinks:
        return None
    values = b.input((b.shape.query_heads,), WIDE)
    return Sinks(values, b.zeros(values.shape, WIDE) if with_grads else None)


def _grads_of(sinks: Sinks | None) -> Values:
    """Return the gradient of the sinks [heads], where there are any."""
    if sinks is None or sinks.grads is None:
        return ()
    return (sinks.grads,)


def _joined(b: Builder, grads: Sequence[Values]) -> Values:
    """Join and round dq, dk, dv of all zones: [tokens of the zone, ...] -> [tokens, ...]."""
    complete: list[Value] = []
    for of_zones in zip(*grads, strict=True):
        complete.append(b.join([b.cast(part, INPUT) for part in of_zones]))
    return tuple(complete)
