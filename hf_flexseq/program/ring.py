"""The one compiler of the ring family: makes instructions of ring steps (`ring_steps.py`).

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

What a step sends back leaves in one post with what a step `AHEAD` + 1 later reads, so a step has
one post, and as many steps' inputs are on their way as if each had left when the step before its
predecessor began.

The first call, over this rank's own chunks, reads all of its rows: its result begins the sums, and
nothing has to be cleared. Owners add up gradients in the order of the steps, so that sums do not
depend on what arrives first. A part of the work that reads nothing from others comes last, for the
last gradients to travel under (`ring_steps.backward_order`). Transfers are posted in the order of
the steps on all ranks, which is why nothing can hang (`weave.py`).

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
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from hf_flexseq.plan.attention_schedule import ChunkKey
from hf_flexseq.program.builder import Builder, Tables, Values
from hf_flexseq.program.exchange import Channel, Exchange, Label, post
from hf_flexseq.program.instructions import INPUT, WIDE, Rows, Value
from hf_flexseq.program.ring_steps import (
    DIAGONAL_TIME,
    Operand,
    RingStep,
    Share,
    backward_order,
    name_chunks,
)
from hf_flexseq.program.sums import RunningResult, Total
from hf_flexseq.program.tags import ring_fetch, ring_return
from hf_flexseq.program.weave import END, ZoneSteps
from hf_flexseq.program.zones import LayerRows, Sinks

AHEAD = 2  # steps whose inputs are on their way when a step begins


# ---- what is under way


class PendingFetch(NamedTuple):
    """The rows that a call of this rank reads, while some of them are on their way."""

    exchange: Exchange

    of_queries: Sequence[Values]
    """By read, values of the n queries: (q [n, H, D],), in the backward (q, dout, out, lse [n,
    H])."""

    of_keys: Sequence[Values]
    """By read, values of the m keys: (kv [m, 2, Hkv, D],)."""


class PendingReturn(NamedTuple):
    """Results of other ranks' calls about rows of this rank, while they are on their way."""

    exchange: Exchange

    of_queries: tuple[tuple[Rows, Values], ...]
    """(the n rows, (out [n, H, D], lse [n, H])), in the backward (the n rows, (dq [n, H, D],))."""

    of_keys: tuple[tuple[Rows, Values], ...]
    """Nothing in the forward; in the backward (the m rows, (dkv [m, 2, Hkv, D],))."""


# ---- the compiler


class RingZone:
    """This rank's part in a group of the ring family."""

    __slots__ = ("backward_steps", "channel", "rows", "steps")

    def __init__(
        self, rows: slice, steps: Sequence[RingStep], channel: Channel, tables: Tables
    ) -> None:
        """rows: the rows [start, stop) of this zone among all rows of the rank.
        steps: what this rank does, in order. tables: of the steps.
        """
        self.rows = rows
        self.steps = steps
        self.backward_steps = backward_order(steps, tables)
        self.channel = channel

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [t, H, D] of this rank's queries, and what `backward` needs.

        q [t, H, D], k and v [t, Hkv, D]: this rank's chunks.
        """
        kv = b.pair(k, v)  # 2 x [t, Hkv, D] -> [t, 2, Hkv, D]
        lse_like = Value(-1, q.shape[:2], WIDE)  # [t, H]
        running = RunningResult(b, q)
        fetches = Fetches(self, b, self.steps, (q,), kv)
        returned: deque[PendingReturn] = deque()
        fetches.post_first([1] * AHEAD)
        for t, step in enumerate(self.steps):
            yield (t + 1) / len(self.steps)
            # 1. fetch: q [t, H, D] -> [n, H, D], kv [t, 2, Hkv, D] -> [m, 2, Hkv, D]
            call_queries, call_keys = fetches.next()
            for arrived in _arrived(returned, leave=AHEAD):
                running.merge_all(arrived.of_queries)
            # 2. attend: (out [n, H, D], lse [n, H]) for each read
            results = _attend(b, step, call_queries, call_keys)
            # 3. merge here, or send to where the queries are
            for read, result in zip(step.reads, results, strict=True):
                if read.queries.peer is None:
                    running.take(read.queries.rows, result, first=step.time == DIAGONAL_TIME)
            back = self._return(
                b,
                step,
                of_queries=results,
                like_queries=(q, lse_like),
                of_keys=[()] * len(results),
                like_keys=(),
            )
            returned.append(back)
            fetches.post_with(back.exchange)
        yield END
        for arrived in _arrived(returned):
            running.merge_all(arrived.of_queries)
        if sinks is not None:
            sinks.apply(b, running.out, b.turned(running.lse))
        out = b.cast(running.out, INPUT)
        return out, (q, kv, out, running.lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [t, H, D], dk and dv [t, Hkv, D] of this rank's rows, still in float32.

        dout [t, H, D]: gradient of `forward`'s out. saved: what `forward` returned beside it.
        """
        q, kv, out, lse = saved
        if sinks is not None:
            sinks.add_gradient(b, dout, out, b.turned(lse))
        dq = Total(b, q)
        dkv = Total(b, kv)
        steps = self.backward_steps
        fetches = Fetches(self, b, steps, (q, dout, out, lse), kv)
        returned: deque[PendingReturn] = deque()
        # The first step, half of the diagonal, is too short for a post of its own behind it.
        fetches.post_first([1, AHEAD])
        for t, step in enumerate(steps):
            yield (t + 1) / (len(steps) + 1)  # the last gradients have the rest to travel
            # 1. fetch: rows [t, ...] -> [n, ...] of queries and [m, ...] of keys
            call_queries, call_keys = fetches.next()
            for arrived in _arrived(returned, leave=AHEAD):
                _add_arrived(dq, dkv, arrived)
            # 2. gradients: (dq [n, H, D],) and (dkv [m, 2, Hkv, D],) for each read
            call_dq, call_dkv = _call_backward(b, step, call_queries, call_keys)
            # 3. add here, or send to where the rows are
            for read, read_dq, read_dkv in zip(step.reads, call_dq, call_dkv, strict=True):
                if read.queries.peer is None:
                    dq.add(read.queries.rows, read_dq)
                if read.keys.peer is None:
                    dkv.add(read.keys.rows, read_dkv)
            back = self._return(
                b, step, of_queries=call_dq, like_queries=(q,), of_keys=call_dkv, like_keys=(kv,)
            )
            returned.append(back)
            fetches.post_with(back.exchange)
        yield END
        for arrived in _arrived(returned):
            _add_arrived(dq, dkv, arrived)
        dk, dv = b.unpair(dkv.value())  # [t, 2, Hkv, D] -> 2 x [t, Hkv, D]
        return dq.value(), dk, dv

    def backward_of_rows(
        self, b: Builder, rows: LayerRows, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return what `backward` returns. rows: lse is [t, H]."""
        saved = (rows.q, b.pair(rows.k, rows.v), rows.out, rows.lse)
        return self.backward(b, rows.dout, saved, sinks)

    # -- exchanges

    def fetch(self, b: Builder, step: RingStep, of_queries: Values, kv: Value) -> PendingFetch:
        """Collect what the calls of a step read: from peers to this rank, and from here to peers.

        Rows [t, ...] on the rank that holds them -> [n, ...] on the rank that reads them.
        """
        exchange = self._new_exchange(b, step, returns=False)
        for share in step.sent_queries:
            exchange.send(b.take_all(of_queries, share.rows), share.peer)
        for share in step.sent_keys:
            exchange.send([b.take(kv, share.rows)], share.peer)
        if step.call is None:
            return PendingFetch(exchange, [], [])
        # All queries before all keys, as they are sent.
        call_queries = [_read(b, exchange, read.queries, of_queries) for read in step.reads]
        call_keys = [_read(b, exchange, read.keys, (kv,)) for read in step.reads]
        return PendingFetch(exchange, call_queries, call_keys)

    def _return(
        self,
        b: Builder,
        step: RingStep,
        *,
        of_queries: Sequence[Values],
        like_queries: Values,
        of_keys: Sequence[Values],
        like_keys: Values,
    ) -> PendingReturn:
        """Collect the results of a step's calls: from this rank to peers, and from peers to here.

        of_queries, of_keys: by read, results [n, ...] of this rank's call, about its queries and
            its keys.
        like_queries, like_keys: values [t, ...] of this rank that are like such results but for
            the number of rows; results travel in their dtypes.
        Rows [n, ...] on the rank that computes -> [n, ...] on the rank that holds their tokens.
        """
        exchange = self._new_exchange(b, step, returns=True)
        # The order of these four decides the tags: queries before keys.
        for read, results in zip(step.reads, of_queries, strict=True):
            _send_results(b, exchange, read.queries, results, like_queries)
        coming_queries = _receive_results(exchange, step.sent_queries, like_queries)
        for read, results in zip(step.reads, of_keys, strict=True):
            _send_results(b, exchange, read.keys, results, like_keys)
        coming_keys = _receive_results(exchange, step.sent_keys, like_keys)
        return PendingReturn(exchange, coming_queries, coming_keys)

    def _new_exchange(self, b: Builder, step: RingStep, *, returns: bool) -> Exchange:
        """Return the empty exchange of a step's inputs, or of its results."""
        message = ring_return(step.number) if returns else ring_fetch(step.number)
        label = Label(self.channel, partial(self._describe, step, returns))
        return Exchange(b, self.channel.tag(message), label)

    def _describe(self, step: RingStep, returns: bool, peer: int, sent: bool) -> str:
        """Return the name of a message of a step, for errors."""
        # Inputs leave for the peers that read them; results leave the rank that has read.
        read_here = sent == returns
        sides: Sequence[Operand | Share]
        if read_here:
            sides = [side for read in step.reads for side in read]
        else:
            sides = (*step.sent_queries, *step.sent_keys)
        chunks: list[ChunkKey] = []
        for side in sides:
            if side.peer == peer:
                chunks += side.chunks
        names = name_chunks(chunks, self.channel.group.sequences)
        what = "results for" if returns else "rows of"
        return f"{what} {names}, ring step {step.number}"


class Fetches:
    """The fetches of all steps: posted ahead, and waited for one by one."""

    def __init__(
        self, zone: RingZone, b: Builder, steps: Sequence[RingStep], of_queries: Values, kv: Value
    ) -> None:
        """of_queries: values [t, ...] of this rank's queries. kv: [t, 2, Hkv, D]."""
        self._zone = zone
        self._builder = b
        self._steps = steps
        self._of_queries = of_queries
        self._kv = kv
        self._pending: deque[PendingFetch] = deque()
        self._posted = 0  # steps whose fetches are posted, the first ones
        self._taken = 0  # steps whose fetches have been waited for

    def post_first(self, counts: Iterable[int]) -> None:
        """Post the fetches of the diagonal steps, which are empty, and of some steps after them.

        counts: of steps whose fetches leave in one post, by post.
        """
        while self._posted < len(self._steps) and self._next.time == DIAGONAL_TIME:
            self._pending.append(self._collected())
        for count in counts:
            post(self._builder, self._collect_until(self._posted + count))

    def post_with(self, back: Exchange) -> None:
        """Post the return of the step that has been taken last, together with the fetch that is
        due: that of the step `AHEAD` + 1 later, so that `AHEAD` are on their way when the next
        step begins."""
        post(self._builder, [back, *self._collect_until(self._taken + AHEAD + 1)])

    def next(self) -> tuple[Values, Values]:
        """Wait for what the next step's call reads: values [n, ...] of all its queries and [m,
        ...] of all its keys; nothing where there is no call."""
        fetch = self._pending.popleft()
        self._taken += 1
        fetch.exchange.wait()
        return _together(self._builder, fetch.of_queries), _together(self._builder, fetch.of_keys)

    @property
    def _next(self) -> RingStep:
        return self._steps[self._posted]

    def _collected(self) -> PendingFetch:
        """Collect the fetch of the next step."""
        fetch = self._zone.fetch(self._builder, self._next, self._of_queries, self._kv)
        self._posted += 1
        return fetch

    def _collect_until(self, stop: int) -> list[Exchange]:
        """Collect the fetches of all steps before number `stop`, and return those to be posted."""
        collected = []
        while self._posted < min(stop, len(self._steps)):
            fetch = self._collected()
            self._pending.append(fetch)
            collected.append(fetch.exchange)
        return collected


def _read(b: Builder, exchange: Exchange, operand: Operand, values: Values) -> Values:
    """Return the n rows of a call's operand: [t, ...] here or at a peer -> [n, ...] here.

    The rows of a peer have come when `exchange` has been waited for.
    """
    if operand.peer is None:
        return b.take_all(values, operand.rows)
    return exchange.recv(values, operand.rows.tokens, operand.peer)


def _together(b: Builder, parts: Sequence[Values]) -> Values:
    """Return the values of several reads one after the other: [n, ...] each -> [all n, ...]."""
    return tuple(b.join(of_reads) for of_reads in zip(*parts, strict=True))


def _apart(b: Builder, values: Values, counts: Sequence[int]) -> list[Values]:
    """Return the values of a call by read: [all n, ...] each -> [n, ...], views."""
    parts = []
    start = 0
    for count in counts:
        parts.append(tuple(b.part(x, start, start + count) for x in values))
        start += count
    return parts


def _send_results(
    b: Builder, exchange: Exchange, operand: Operand, results: Values, likes: Values
) -> None:
    """Add the results [n, ...] about an operand to what is sent to the rank that holds it.

    likes: values with the dtypes in which the results travel.
    """
    if operand.peer is None or not results:
        return
    travelling = [b.cast(x, like.dtype) for x, like in zip(results, likes, strict=True)]
    exchange.send(travelling, operand.peer)


def _receive_results(
    exchange: Exchange, shares: Sequence[Share], likes: Values
) -> tuple[tuple[Rows, Values], ...]:
    """Return (rows, results [n, ...]) of what peers compute about each of the shares.

    The results have come when `exchange` has been waited for.
    likes: values [t, ...] that are like the results but for the number of rows.
    """
    coming = []
    for share in shares:
        results = exchange.recv(likes, share.rows.tokens, share.peer)
        if results:
            coming.append((share.rows, results))
    return tuple(coming)


def _arrived(returned: deque[PendingReturn], leave: int = 0) -> Iterable[PendingReturn]:
    """Wait for all but the latest `leave` returns; yield each and drop it from `returned`."""
    while len(returned) > leave:
        returned[0].exchange.wait()
        yield returned.popleft()


# ---- one call


def _attend(b: Builder, step: RingStep, of_queries: Values, of_keys: Values) -> list[Values]:
    """Return (out [n, H, D], lse [n, H]) of the step's call for each read; nothing where there is
    no call.

    of_queries: (q [all n, H, D],), of_keys: (kv [all m, 2, Hkv, D],), the rows that it reads.
    """
    if step.call is None:
        return []
    (q,) = of_queries
    (kv,) = of_keys
    k, v = b.unpair(kv)  # [m, 2, Hkv, D] -> 2 x [m, Hkv, D]
    out, lse = b.attend(q, k, v, step.call)
    # lse [H, n] -> [n, H]
    return _apart(b, (out, b.turned(lse)), [read.queries.rows.tokens for read in step.reads])


def _call_backward(
    b: Builder, step: RingStep, of_queries: Values, of_keys: Values
) -> tuple[list[Values], list[Values]]:
    """Return (dq [n, H, D],) and (dkv [m, 2, Hkv, D],) of the step's call for each read; nothing
    where there is no call.

    of_queries: q, dout, out [all n, H, D] and lse [all n, H]. of_keys: (kv [all m, 2, Hkv, D],).
    """
    if step.call is None:
        return [], []
    (kv,) = of_keys
    q, dout, out, lse = of_queries
    k, v = b.unpair(kv)  # [m, 2, Hkv, D] -> 2 x [m, Hkv, D]
    dq, dk, dv = b.gradients(dout, q, k, v, out, b.kernel_lse(lse), step.call)
    dkv = b.pair(dk, dv)  # 2 x [m, Hkv, D] -> [m, 2, Hkv, D]
    of_reads = [read.queries.rows.tokens for read in step.reads]
    return (
        _apart(b, (dq,), of_reads),
        _apart(b, (dkv,), [read.keys.rows.tokens for read in step.reads]),
    )


def _add_arrived(dq: Total, dkv: Total, arrived: PendingReturn) -> None:
    """Add the gradients that have come back from a step."""
    for rows, parts in arrived.of_queries:
        dq.add(rows, parts)
    for rows, parts in arrived.of_keys:
        dkv.add(rows, parts)
