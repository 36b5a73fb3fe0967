"""The one executor of the ring family: obeys a list of turns (`turns.py`).

A *turn* is at most one attention call of this rank: some queries against some keys and values of
the same sequences. Either side may be held by another rank; which one, and when, is decided by
`schedule/attention.py`.

Forward, at every turn of this rank:

1. fetch the keys and values, or as a helper the queries, that the call reads; they travel while
   the call before computes;
2. attend;
3. merge the partial result into the running one by its log-sum-exp, or send it to the rank that
   holds the queries, which merges it some turns later.

Backward: with the *merged* out and lse the gradient of every call is independent of the other
calls and is only summed. At every turn:

1. fetch q, dout, out and lse, or keys and values, again;
2. compute dQ, dK and dV of the call;
3. send dK and dV straight to the owner of the keys, and dQ to the owner of the queries.

Owners add up gradients in the order of the turns, so that sums do not depend on what arrives
first. A part of the work that reads nothing from others comes last, for the last gradients to
travel under (`turns.backward_order`). Transfers are posted in the order of the turns on all ranks,
which is why nothing can hang (`weave.py`).

Ring Attention (arXiv 2310.01889) for the blockwise merge; DistFlashAttn (arXiv 2310.03294, section
3) for helpers and for fetching ahead. Everything travels in the dtype of the inputs (a log-sum-exp
in its own), and is merged and summed in float32 (float64 for float64) by one owner. Between nodes
the same bytes may travel over the NICs of other ranks, too (`schedule/routing.py`).

Rejected: handing sums on from rank to rank, which would need float32 on the wire; a 16-bit
accumulator costs several times the error of a single kernel. Rejected: keeping the fetched keys
and values for the backward, which would hold whole sequences on every rank.

Shapes: t rows of this rank, n queries and m keys of one call, H query heads, Hkv KV heads, D the
head dimension.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from hf_flexseq.attention.turns import (
    DIAGONAL_TIME,
    Operand,
    Rows,
    Share,
    Turn,
    backward_order,
    name_chunks,
)
from hf_flexseq.attention.types import Saved, Tensors
from hf_flexseq.attention.weave import END, ZoneSteps
from hf_flexseq.distributed.communicator import Channel, Exchange
from hf_flexseq.distributed.routing import RoutedExchange
from hf_flexseq.distributed.tags import EXCHANGES_IN_FLIGHT, ring_fetch, ring_return
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.merge import merge_into
from hf_flexseq.plan import Group
from hf_flexseq.schedule.attention import ChunkKey
from hf_flexseq.schedule.ring_routing import ring_routings
from hf_flexseq.schedule.routing import NicFigures, Routing
from hf_flexseq.schedule.transfers import RowBytes

AHEAD = 2  # turns whose inputs, and whose results, are on their way at once

# Every turn has two exchanges, its fetch and its return. When the fetch of turn t + AHEAD is
# posted, the oldest one under way is the return of turn t - AHEAD: 4 * AHEAD exchanges together.
assert 4 * AHEAD <= EXCHANGES_IN_FLIGHT, "tags of routed packets repeat too early for AHEAD"


# ---- what is under way


class PendingFetch(NamedTuple):
    """The rows that a call of this rank reads, while some of them are on their way."""

    exchange: Exchange

    of_queries: Tensors
    """Tensors of the n queries: (q [n, H, D],), in the backward (q, dout, out, lse [n, H])."""

    of_keys: Tensors
    """Tensors of the m keys: (kv [m, 2, Hkv, D],)."""

    def result(self) -> tuple[Tensors, Tensors]:
        """Return (of_queries, of_keys) once all of it is here, with the shapes of the fields."""
        self.exchange.wait()
        return self.of_queries, self.of_keys


class PendingReturn(NamedTuple):
    """Results of other ranks' calls about rows of this rank, while they are on their way."""

    exchange: Exchange

    of_queries: tuple[tuple[Rows, Tensors], ...]
    """(the n rows, (out [n, H, D], lse [n, H])), in the backward (the n rows, (dq [n, H, D],))."""

    of_keys: tuple[tuple[Rows, Tensors], ...]
    """Nothing in the forward; in the backward (the m rows, (dkv [m, 2, Hkv, D],))."""


class Routes:
    """The routings of a ring's exchanges, made when the sizes of their tensors are known.

    All ranks of the group make the same ones, each as far as its node is concerned.
    """

    __slots__ = ("_group", "_lengths", "_links", "_rank", "_routings")

    def __init__(
        self, group: Group, lengths: Sequence[int], links: NicFigures, *, rank: int
    ) -> None:
        """lengths: tokens of each sequence of the group. rank: this rank."""
        self._group = group
        self._lengths = lengths
        self._links = links
        self._rank = rank
        # by turn
        self._routings: dict[tuple[bool, RowBytes, RowBytes], tuple[Routing, ...]] = {}

    def find(self, turn: int, returns: bool, of_queries: Tensors, of_keys: Tensors) -> Routing:
        """Return the routing of the fetch of a turn, or with `returns` of its return.

        of_queries, of_keys: tensors [any rows, ...] that are otherwise like those that travel.
        """
        key = (returns, _row_bytes(of_queries), _row_bytes(of_keys))
        if key not in self._routings:
            _, query_bytes, key_bytes = key
            self._routings[key] = ring_routings(
                self._group,
                self._lengths,
                self._links,
                query_bytes,
                key_bytes,
                returns=returns,
                rank=self._rank,
            )
        return self._routings[key][turn]


def _row_bytes(tensors: Tensors) -> RowBytes:
    """Return the bytes of one row of each of the tensors [rows, ...]."""
    sizes = []
    for x in tensors:
        elements = x.shape[1:].numel()  # of one row
        sizes.append(elements * x.element_size())
    return tuple(sizes)


# ---- the executor


class RingZone:
    """This rank's part in a group of the ring family."""

    __slots__ = ("backward_turns", "channel", "kernel", "routes", "rows", "turns")

    def __init__(
        self,
        rows: slice,
        turns: Sequence[Turn],
        channel: Channel,
        kernel: Kernel,
        routes: Routes | None = None,
    ) -> None:
        """rows: the rows [start, stop) of this zone among all rows of the rank.
        turns: what this rank does, in order.
        routes: how exchanges travel between nodes; None where everything goes straight.
        """
        self.rows = rows
        self.turns = turns
        self.backward_turns = backward_order(turns)
        self.channel = channel
        self.kernel = kernel
        self.routes = routes

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """Return out [t, H, D] of this rank's queries, and what `backward` needs.

        q [t, H, D], k and v [t, Hkv, D]: this rank's chunks.
        """
        kv = torch.stack((k, v), dim=1)  # 2 x [t, Hkv, D] -> [t, 2, Hkv, D]
        out = torch.zeros(q.shape, dtype=lse_dtype(q.dtype), device=q.device)  # [t, H, D]
        # In memory as kernels have it, so that whole rows need no copy on their way to a kernel.
        lse = out.new_full((q.shape[1], q.shape[0]), -torch.inf).t()  # [H, t] -> [t, H]
        turns = self.turns
        pending = self._first_fetches(turns, (q,), kv)
        returned: deque[PendingReturn] = deque()
        for t, turn in enumerate(turns):
            yield (t + 1) / len(turns)
            # 1. fetch: q [t, H, D] -> [n, H, D], kv [t, 2, Hkv, D] -> [m, 2, Hkv, D]
            (call_q,), (call_kv,) = self._next_fetched(pending, turns, t, (q,), kv)
            # 2. attend: (out [n, H, D], lse [n, H]), or nothing
            result = self._attend(turn, call_q, call_kv, scale)
            # 3. merge here, or send to where the queries are
            if turn.queries.peer is None:
                merge(out, lse, turn.queries.rows, result)
            _merge_returned(out, lse, returned, leave=AHEAD - 1)
            returned.append(
                self._return(
                    turn, of_queries=result, like_queries=(q, lse), of_keys=(), like_keys=()
                )
            )
        yield END
        _merge_returned(out, lse, returned)
        out = out.to(q.dtype)
        return out, Saved((q, kv, out, lse))

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        """Return dq [t, H, D], dk and dv [t, Hkv, D] of this rank's rows, still in float32.

        dout [t, H, D]: gradient of `forward`'s out. saved: what `forward` returned beside it.
        """
        q, kv, out, lse = saved.tensors
        of_queries = (q, dout, out, lse)
        dq = torch.zeros(q.shape, dtype=lse_dtype(q.dtype), device=q.device)  # [t, H, D]
        dkv = torch.zeros(kv.shape, dtype=dq.dtype, device=q.device)  # [t, 2, Hkv, D]
        turns = self.backward_turns
        pending = self._first_fetches(turns, of_queries, kv)
        returned: deque[PendingReturn] = deque()
        for t, turn in enumerate(turns):
            yield (t + 1) / (len(turns) + 1)  # the last gradients have the rest to travel
            # 1. fetch: rows [t, ...] -> [n, ...] of queries and [m, ...] of keys
            call_queries, (call_kv,) = self._next_fetched(pending, turns, t, of_queries, kv)
            # 2. gradients of the call: (dq [n, H, D],) and (dkv [m, 2, Hkv, D],), or nothing
            call_dq, call_dkv = self._call_backward(turn, call_queries, call_kv, scale)
            # 3. add here, or send to where the rows are
            if turn.queries.peer is None:
                _add(dq, turn.queries.rows, call_dq)
            if turn.keys.peer is None:
                _add(dkv, turn.keys.rows, call_dkv)
            _add_returned(dq, dkv, returned, leave=AHEAD - 1)
            returned.append(
                self._return(
                    turn, of_queries=call_dq, like_queries=(q,), of_keys=call_dkv, like_keys=(kv,)
                )
            )
        yield END
        _add_returned(dq, dkv, returned)
        dk, dv = dkv.unbind(1)  # [t, 2, Hkv, D] -> 2 x [t, Hkv, D]
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
        """Return what `backward` returns, from this rank's rows in a replayed layer (`remat.py`).

        q, out, dout [t, H, D]; k, v [t, Hkv, D]; lse [t, H], the last tensor that `forward` left.
        """
        kv = torch.stack((k, v), dim=1)  # 2 x [t, Hkv, D] -> [t, 2, Hkv, D]
        return self.backward(dout, Saved((q, kv, out, lse)), scale)

    # -- one call

    def _attend(self, turn: Turn, q: torch.Tensor, kv: torch.Tensor, scale: float) -> Tensors:
        """Return (out [n, H, D], lse [n, H]) of the turn's call; nothing where it has none.

        q [n, H, D], kv [m, 2, Hkv, D]: the rows that the call reads.
        """
        if turn.segments is None:
            return ()
        k, v = kv.unbind(1)  # [m, 2, Hkv, D] -> 2 x [m, Hkv, D]
        out, lse = self.kernel.forward(q, k, v, turn.segments, scale=scale)
        return out, lse.t()  # lse [H, n] -> [n, H]

    def _call_backward(
        self, turn: Turn, of_queries: Tensors, kv: torch.Tensor, scale: float
    ) -> tuple[Tensors, Tensors]:
        """Return (dq [n, H, D],) and (dkv [m, 2, Hkv, D],) of the turn's call, or nothing.

        of_queries: q, dout, out [n, H, D] and lse [n, H]. kv [m, 2, Hkv, D].
        """
        if turn.segments is None:
            return (), ()
        q, dout, out, lse = of_queries
        k, v = kv.unbind(1)  # [m, 2, Hkv, D] -> 2 x [m, Hkv, D]
        kernel_lse = lse.t().contiguous()  # [n, H] -> [H, n]
        dq, dk, dv = self.kernel.backward(
            dout, q, k, v, out, kernel_lse, turn.segments, scale=scale
        )
        dkv = torch.stack((dk, dv), dim=1)  # 2 x [m, Hkv, D] -> [m, 2, Hkv, D]
        return (dq,), (dkv,)

    # -- fetching what calls read

    def _first_fetches(
        self, turns: Sequence[Turn], of_queries: Tensors, kv: torch.Tensor
    ) -> deque[PendingFetch]:
        """Post the fetches of the diagonal turns, which are empty, and of the next AHEAD turns.

        of_queries: tensors [t, ...] of this rank's queries.
        kv: [t, 2, Hkv, D], its keys and values.
        """
        diagonal_turns = 0
        while diagonal_turns < len(turns) and turns[diagonal_turns].time == DIAGONAL_TIME:
            diagonal_turns += 1
        first_turns = turns[: diagonal_turns + AHEAD]
        return deque(self._fetch(turn, of_queries, kv) for turn in first_turns)

    def _next_fetched(
        self,
        pending: deque[PendingFetch],
        turns: Sequence[Turn],
        t: int,
        of_queries: Tensors,
        kv: torch.Tensor,
    ) -> tuple[Tensors, Tensors]:
        """Return what the call of turn t reads, and post the fetch of a later turn.

        Inputs [t, ...] of this rank -> tensors [n, ...] of the call's queries and [m, ...] of its
        keys. The fetch that is posted travels while the call computes.
        """
        fetched = pending.popleft().result()
        next_turn = t + 1 + len(pending)  # the first turn without a fetch
        if len(pending) < AHEAD and next_turn < len(turns):
            pending.append(self._fetch(turns[next_turn], of_queries, kv))
        return fetched

    def _fetch(self, turn: Turn, of_queries: Tensors, kv: torch.Tensor) -> PendingFetch:
        """Post what the calls of a turn read: from peers to this rank, and from here to peers.

        Rows [t, ...] on the rank that holds them -> [n, ...] on the rank that reads them.
        """
        exchange = self._new_exchange(turn, of_queries, (kv,), returns=False)
        for share in turn.sent_queries:
            exchange.send([share.rows.take(x) for x in of_queries], share.peer)
        for share in turn.sent_keys:
            exchange.send([share.rows.take(kv)], share.peer)
        call_queries = _read(exchange, turn.queries, of_queries)
        call_keys = _read(exchange, turn.keys, (kv,))
        tag = self.channel.tag(ring_fetch(turn.number))
        exchange.post(self.channel.communicator, tag=tag)
        return PendingFetch(exchange, call_queries, call_keys)

    # -- returning what calls have made

    def _return(
        self,
        turn: Turn,
        *,
        of_queries: Tensors,
        like_queries: Tensors,
        of_keys: Tensors,
        like_keys: Tensors,
    ) -> PendingReturn:
        """Post the results of a turn's calls: from this rank to peers, and from peers to here.

        of_queries, of_keys: results [n, ...] of this rank's call, about its queries and its keys.
        like_queries, like_keys: tensors [t, ...] of this rank that are like such results but for
            the number of rows; results travel in their dtypes.
        Rows [n, ...] on the rank that computes -> [n, ...] on the rank that holds their tokens.
        """
        exchange = self._new_exchange(turn, like_queries, like_keys, returns=True)
        # The order of these four decides the tags: queries before keys.
        _send_results(exchange, turn.queries, of_queries, like_queries)
        coming_queries = _receive_results(exchange, turn.sent_queries, like_queries)
        _send_results(exchange, turn.keys, of_keys, like_keys)
        coming_keys = _receive_results(exchange, turn.sent_keys, like_keys)
        tag = self.channel.tag(ring_return(turn.number))
        exchange.post(self.channel.communicator, tag=tag)
        return PendingReturn(exchange, coming_queries, coming_keys)

    # -- exchanges

    def _new_exchange(
        self, turn: Turn, of_queries: Tensors, of_keys: Tensors, *, returns: bool
    ) -> Exchange:
        """Return an empty exchange for rows of tensors [any rows, ...] like these."""
        label = self.channel.label(partial(self._describe, turn, returns))
        routing = Routing()
        if self.routes is not None:
            routing = self.routes.find(turn.number, returns, of_queries, of_keys)
        if not routing.paths:
            return Exchange(label)
        device = (*of_queries, *of_keys)[0].device
        within = f", turn {turn.number}, of {self.channel.name}"
        return RoutedExchange(label, routing, self.channel.communicator, device, within=within)

    def _describe(self, turn: Turn, returns: bool, peer: int, sent: bool) -> str:
        """Return the name of a message of a turn, for errors."""
        # Inputs leave for the peers that read them; results leave the rank that has read.
        read_here = sent == returns
        sides: Sequence[Operand | Share]
        if read_here:
            sides = (turn.queries, turn.keys)
        else:
            sides = (*turn.sent_queries, *turn.sent_keys)
        chunks: list[ChunkKey] = []
        for side in sides:
            if side.peer == peer:
                chunks += side.chunks
        names = name_chunks(chunks, self.channel.group.sequences)
        what = "results for" if returns else "rows of"
        return f"{what} {names}, turn {turn.number}"


def _read(exchange: Exchange, operand: Operand, tensors: Tensors) -> Tensors:
    """Return the n rows of a call's operand: [t, ...] here or at a peer -> [n, ...] here.

    The rows of a peer have come when `exchange` has been waited for.
    """
    if operand.peer is None:
        return tuple(operand.rows.take(x) for x in tensors)
    return exchange.recv(tensors, operand.rows.tokens, operand.peer)


def _send_results(exchange: Exchange, operand: Operand, results: Tensors, likes: Tensors) -> None:
    """Add the results [n, ...] about an operand to what is sent to the rank that holds it.

    likes: tensors with the dtypes in which the results travel.
    """
    if operand.peer is None:
        return
    travelling = [x.to(like.dtype) for x, like in zip(results, likes, strict=True)]
    exchange.send(travelling, operand.peer)


def _receive_results(
    exchange: Exchange, shares: Sequence[Share], likes: Tensors
) -> tuple[tuple[Rows, Tensors], ...]:
    """Return (rows, results [n, ...]) of what peers compute about each of the shares.

    The results have come when `exchange` has been waited for.
    likes: tensors [t, ...] that are like the results but for the number of rows.
    """
    coming = []
    for share in shares:
        results = exchange.recv(likes, share.rows.tokens, share.peer)
        coming.append((share.rows, results))
    return tuple(coming)


# ---- merging and adding


def _merge_returned(
    out: torch.Tensor, lse: torch.Tensor, returned: deque[PendingReturn], *, leave: int = 0
) -> None:
    """Merge what was returned into out [t, H, D] and lse [t, H], in the order of the turns.

    leave: how many of the latest to leave under way.
    """
    for arrived in _arrived(returned, leave):
        for rows, result in arrived.of_queries:
            merge(out, lse, rows, result)


def _add_returned(
    dq: torch.Tensor, dkv: torch.Tensor, returned: deque[PendingReturn], *, leave: int = 0
) -> None:
    """Add what was returned to dq [t, H, D] and dkv [t, 2, Hkv, D], in the order of the turns.

    leave: how many of the latest to leave under way.
    """
    for arrived in _arrived(returned, leave):
        for rows, parts in arrived.of_queries:
            _add(dq, rows, parts)
        for rows, parts in arrived.of_keys:
            _add(dkv, rows, parts)


def _arrived(returned: deque[PendingReturn], leave: int) -> Iterator[PendingReturn]:
    """Wait for all but the latest `leave` returns; yield each and drop it from `returned`."""
    while len(returned) > leave:
        returned[0].exchange.wait()
        yield returned.popleft()


def _add(total: torch.Tensor, rows: Rows, parts: Tensors) -> None:
    """Add each part [n, ...] to these n rows of total [t, ...]."""
    for part in parts:
        rows.add_to(total, part)


def merge(out: torch.Tensor, lse: torch.Tensor, rows: Rows, result: Tensors) -> None:
    """Merge the result of a call into the running result of all calls so far, in place.

    out [t, H, D], lse [t, H]: the running result; lse is -inf where a query has read no key yet.
    result: (out [n, H, D], lse [n, H]) of the n rows, normalised over the keys of the call, each
        of which has read a key; or nothing, where there was no call.
    """
    if not result:
        return
    call_out, call_lse = result
    select = rows.selector
    row_out = out[select]  # [t, H, D] -> [n, H, D]: a view where the rows are a slice
    row_lse = lse[select]  # [t, H] -> [n, H]
    merge_into(row_out, row_lse, call_out, call_lse)
    if isinstance(select, torch.Tensor):
        out[select] = row_out
        lse[select] = row_lse
