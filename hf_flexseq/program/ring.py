"""The one compiler of the ring family: makes instructions of ring steps (`ring_steps.py`). Read
`tests/attention/reference_ring.py` first: the same ring, without the parts that make it fast.

A *step* of a ring is at most one attention call of this rank: some queries against some keys and
values of the same sequences. Either side may be held by another rank; which one, and when, is
decided by `plan/attention_schedule.py`.

Forward, at every step of this rank:

1. fetch the keys and values, or as a helper the queries, that the call reads; they travel while
   calls before it compute;
2. attend;
3. merge the partial result into the running one by its log-sum-exp, or send it to the rank that
   holds the queries, which merges it some steps later.

Backward: with the *merged* out and lse the gradient of every call is independent of the other
calls and is only summed. At every step:

1. fetch q, dout, out and lse, or keys and values, again;
2. compute dQ, dK and dV of the call;
3. send dK and dV straight to the owner of the keys, and dQ to the owner of the queries.

A step's results leave in one post with the inputs of the step `AHEAD` + 1 later, so a step has one
post, and as many steps' inputs are on their way as if each had left when the step before its
predecessor began.

The first call, over this rank's own chunks, reads all of its rows: its result begins the sums, and
nothing has to be cleared. Owners add up gradients in the order of the steps, so sums do not depend
on the order of arrival. A part of the work that reads nothing from others comes last, for the last
gradients to travel under (`ring_steps.backward_order`). Transfers are posted in the order of the
steps on all ranks, which is why nothing can hang (`weave.py`).

Ring Attention (arXiv 2310.01889) for the blockwise merge; DistFlashAttn (arXiv 2310.03294, section
3) for helpers and for fetching ahead. Everything travels in the dtype of the inputs (a log-sum-exp
in its own), and is merged and summed in float32 (float64 for float64) by one owner.

Rejected: handing sums on from rank to rank, which would need float32 on the wire; a 16-bit
accumulator costs several times the error of a single kernel. Rejected: keeping the fetched keys
and values for the backward, which would hold whole sequences on every rank.

Shapes: t rows of this rank, n queries and m keys of one call, H query heads, Hkv heads of keys and
values, D the head dimension.
"""

from collections import deque
from collections.abc import Sequence

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.units import UnitLayout
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.halo import halo_zone
from hf_flexseq.program.instructions import INPUT, WIDE, Value
from hf_flexseq.program.ring_exchanges import (
    AHEAD,
    Fetches,
    PendingReturn,
    RingExchanges,
    arrived_returns,
)
from hf_flexseq.program.ring_steps import (
    DIAGONAL_TIME,
    RingStep,
    ZoneLayout,
    backward_order,
    make_ring_steps,
)
from hf_flexseq.program.sums import RunningResult, Total
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.weave import END, ZoneSteps
from hf_flexseq.program.zones import LayerRows, Machine, Sinks, ZoneAttention


class RingZone:
    """This rank's part in a group of the ring family."""

    __slots__ = ("backward_steps", "channel", "rows", "steps")

    def __init__(
        self, rows: slice, steps: Sequence[RingStep], channel: Channel, tables: Tables
    ) -> None:
        """rows: the rows [start, stop) of this zone among all rows of the rank.
        steps: of this rank, in order. tables: of the steps.
        """
        self.rows = rows
        self.steps = steps
        self.backward_steps = backward_order(steps, tables)
        self.channel = channel

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [t, H, D], and the values for `backward`. q [t, H, D], k and v [t, Hkv,
        D]."""
        kv = b.pair(k, v)  # 2 x [t, Hkv, D] -> [t, 2, Hkv, D]
        lse_like = Value(-1, q.shape[:2], WIDE)  # [t, H]
        running = RunningResult(b, q)
        exchanges = RingExchanges(b, self.channel)
        fetches = Fetches(exchanges, self.steps, (q,), kv)
        returned: deque[PendingReturn] = deque()
        fetches.post_first([1] * AHEAD)
        for t, step in enumerate(self.steps):
            yield (t + 1) / len(self.steps)
            # 1. fetch: q [t, H, D] -> [n, H, D], kv [t, 2, Hkv, D] -> [m, 2, Hkv, D]
            call_queries, call_keys = fetches.next()
            for arrived in arrived_returns(returned, leave=AHEAD):
                running.merge_all(arrived.of_queries)
            # 2. attend: (out [n, H, D], lse [n, H])
            result = _attend(b, step, call_queries, call_keys)
            # 3. merge here, or send to where the queries are
            read = step.read
            if read is not None and read.queries.peer == b.rank:
                running.take(read.queries.rows, result, first=step.time == DIAGONAL_TIME)
            back = exchanges.returned(
                step, of_queries=result, like_queries=(q, lse_like), of_keys=(), like_keys=()
            )
            returned.append(back)
            fetches.post_with(back.exchange)
        yield END
        for arrived in arrived_returns(returned):
            running.merge_all(arrived.of_queries)
        if sinks is not None:
            sinks.apply(b, running.out, b.turned(running.lse))
        out = b.cast(running.out, INPUT)
        return out, (q, kv, out, running.lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [t, H, D], dk and dv [t, Hkv, D] of this rank's rows, still in float32.

        dout [t, H, D]: gradient of `forward`'s out. saved: the values that `forward` returned
        beside it.
        """
        q, kv, out, lse = saved
        if sinks is not None:
            sinks.add_gradient(b, dout, out, b.turned(lse))
        dq = Total(b, q)
        dkv = Total(b, kv)
        steps = self.backward_steps
        exchanges = RingExchanges(b, self.channel)
        fetches = Fetches(exchanges, steps, (q, dout, out, lse), kv)
        returned: deque[PendingReturn] = deque()
        # The first step, half of the diagonal, is too short for a post of its own after it.
        fetches.post_first([1, AHEAD])
        for t, step in enumerate(steps):
            yield (t + 1) / (len(steps) + 1)  # the last gradients have the rest to travel
            # 1. fetch: rows [t, ...] -> [n, ...] of queries and [m, ...] of keys
            call_queries, call_keys = fetches.next()
            for arrived in arrived_returns(returned, leave=AHEAD):
                _add_arrived(dq, dkv, arrived)
            # 2. gradients: (dq [n, H, D],) and (dkv [m, 2, Hkv, D],)
            call_dq, call_dkv = _call_backward(b, step, call_queries, call_keys)
            # 3. add here, or send to where the rows are
            read = step.read
            if read is not None and read.queries.peer == b.rank:
                dq.add(read.queries.rows, call_dq)
            if read is not None and read.keys.peer == b.rank:
                dkv.add(read.keys.rows, call_dkv)
            back = exchanges.returned(
                step, of_queries=call_dq, like_queries=(q,), of_keys=call_dkv, like_keys=(kv,)
            )
            returned.append(back)
            fetches.post_with(back.exchange)
        yield END
        for arrived in arrived_returns(returned):
            _add_arrived(dq, dkv, arrived)
        dk, dv = b.unpair(dkv.value())  # [t, 2, Hkv, D] -> 2 x [t, Hkv, D]
        return dq.value(), dk, dv

    def backward_of_rows(
        self, b: Builder, rows: LayerRows, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return the same gradients as `backward`. rows: lse is [t, H]."""
        saved = (rows.q, b.pair(rows.k, rows.v), rows.out, rows.lse)
        return self.backward(b, rows.dout, saved, sinks)


def ring_zone(
    rows: slice,
    layout: ZoneLayout,
    reach: Reach,
    channel: Channel,
    machine: Machine,
    trees: Sequence[UnitLayout | None],
) -> ZoneAttention:
    """Make this rank's part in a ring group: halos for a window, a chunk or units, or ring steps.

    rows: of the zone among all rows of the rank. trees: of each sequence, if any is a unit.
    """
    if trees or not reach.is_full:
        return halo_zone(rows, layout, reach, channel, trees)
    steps = make_ring_steps(layout, device=machine.device)
    return RingZone(rows, steps, channel, layout.tables)


# ---- one call


def _attend(b: Builder, step: RingStep, of_queries: Values, of_keys: Values) -> Values:
    """Return (out [n, H, D], lse [n, H]) of the step's call; nothing without a call.

    of_queries: (q [n, H, D],), of_keys: (kv [m, 2, Hkv, D],), the rows that it reads.
    """
    if step.call is None:
        return ()
    (q,) = of_queries
    (kv,) = of_keys
    k, v = b.unpair(kv)  # [m, 2, Hkv, D] -> 2 x [m, Hkv, D]
    out, lse = b.attend(q, k, v, step.call)
    return out, b.turned(lse)  # [H, n] -> [n, H]


def _call_backward(
    b: Builder, step: RingStep, of_queries: Values, of_keys: Values
) -> tuple[Values, Values]:
    """Return (dq [n, H, D],) and (dkv [m, 2, Hkv, D],) of the step's call; nothing without one.

    of_queries: q, dout, out [n, H, D] and lse [n, H]. of_keys: (kv [m, 2, Hkv, D],).
    """
    if step.call is None:
        return (), ()
    (kv,) = of_keys
    q, dout, out, lse = of_queries
    k, v = b.unpair(kv)  # [m, 2, Hkv, D] -> 2 x [m, Hkv, D]
    dq, dk, dv = b.gradients(dout, q, k, v, out, b.kernel_lse(lse), step.call)
    return (dq,), (b.pair(dk, dv),)  # 2 x [m, Hkv, D] -> [m, 2, Hkv, D]


def _add_arrived(dq: Total, dkv: Total, arrived: PendingReturn) -> None:
    """Add the gradients that have come back from a step."""
    for rows, parts in arrived.of_queries:
        dq.add(rows, parts)
    for rows, parts in arrived.of_keys:
        dkv.add(rows, parts)
