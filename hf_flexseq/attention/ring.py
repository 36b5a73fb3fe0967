"""The one executor of the ring family: obeys a list of turns (`turns.py`, from
`schedule/attention.py`).

Forward, at every turn of this rank: fetch the keys and values, or as a helper the queries, that
its call reads from where they are, while the call before computes; attend; merge the partial
result into the running one by its log-sum-exp, or send it to the rank that holds the queries,
which merges it some calls later.

Backward, with the *merged* out and lse every call's gradient is independent of the others and is
only summed: fetch again, compute, send dK and dV straight back to the owner of the keys, and dQ to
the owner of the queries. They add them up in the order of the turns, so that sums do not depend on
what arrives first. A part of the work that reads nothing from others comes last, for the last
gradients to travel under.

Ring Attention (arXiv 2310.01889) for the blockwise merge, DistFlashAttn (arXiv 2310.03294, section
3) for helpers and for fetching ahead. Everything travels in the inputs' dtype (a log-sum-exp in
its own), and is merged and summed in float32 (float64 for float64) by one owner: passing sums on
from rank to rank would need float32 on the wire, and a 16-bit accumulator costs several times the
error of a single kernel. Between nodes the same bytes may travel over other ranks' NICs, too
(`schedule/routing.py`). Rejected: keeping the fetched keys and values for the backward, which
would hold whole sequences on every rank.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import torch

from hf_flexseq.attention.turns import OWN, Rows, Share, Turn, backward_order, name_pieces
from hf_flexseq.attention.types import Saved, Tensors
from hf_flexseq.attention.weave import END, ZoneSteps
from hf_flexseq.distributed.communicator import TAGS, Channel, Exchange
from hf_flexseq.distributed.routing import RoutedExchange
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.merge import merge_partials
from hf_flexseq.schedule.loans import Loan
from hf_flexseq.schedule.routing import NicFigures, Routing, make_routing
from hf_flexseq.schedule.transfers import RowBytes, loan_transfers

AHEAD = 2  # turns for which keys and values, and from which results, are on their way at once


class Arriving(NamedTuple):
    """What a call of ours reads, once others have sent their part of it."""

    exchange: Exchange
    of_queries: Tensors
    of_keys: Tensors

    def result(self) -> tuple[Tensors, Tensors]:
        self.exchange.wait()
        return self.of_queries, self.of_keys


class Returning(NamedTuple):
    """What others' calls made of our queries and keys, with the rows that it is about."""

    exchange: Exchange
    of_queries: tuple[tuple[Rows, Tensors], ...]
    of_keys: tuple[tuple[Rows, Tensors], ...]


class Routes:
    """How the exchanges of a group across nodes travel, for the tensors they turn out to have."""

    __slots__ = ("_first_rank", "_found", "_links", "_loans")

    def __init__(
        self, loans: Sequence[Sequence[Loan]], first_rank: int, links: NicFigures
    ) -> None:
        """loans: of all ranks of the group, by turn. first_rank: of the group."""
        self._loans, self._first_rank, self._links = loans, first_rank, links
        self._found: dict[tuple[int, bool, RowBytes, RowBytes], Routing] = {}

    def find(self, turn: int, returns: bool, of_queries: Tensors, of_keys: Tensors) -> Routing:
        """The same on every rank. of_queries, of_keys: tensors like those that travel, but for the
        number of rows."""
        sizes = _row_bytes(of_queries), _row_bytes(of_keys)
        if (turn, returns, *sizes) not in self._found:
            transfers = loan_transfers(
                self._loans[turn], self._first_rank, *sizes, returns=returns
            )
            self._found[turn, returns, *sizes] = make_routing(transfers, self._links)
        return self._found[turn, returns, *sizes]


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
        """routes: None where everything goes straight."""
        self.rows, self.turns, self.backward_turns, self.routes = (
            rows,
            turns,
            backward_order(turns),
            routes,
        )
        self.channel, self.kernel = channel, kernel

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """q [t, H, D], k, v [t, Hkv, D] of this rank's chunks -> out [t, H, D], and what
        `backward` needs."""
        kv = torch.stack((k, v), dim=1)  # [t, 2, Hkv, D]
        out = torch.zeros(q.shape, dtype=lse_dtype(q.dtype), device=q.device)
        lse = out.new_full(q.shape[:2], -torch.inf)  # [t, H]
        turns, returned = self.turns, deque[Returning]()
        fetched = self._first_fetches(turns, (q,), kv)
        for t, turn in enumerate(turns):
            yield (t + 1) / len(turns)
            (block_q,), (block_kv,) = self._next_fetched(fetched, turns, t, (q,), kv)
            made = self._attend(turn, block_q, block_kv, scale)
            if turn.queries.peer is None:
                merge(out, lse, turn.queries.rows, made)
            _merge_returned(out, lse, returned, AHEAD - 1)
            returned.append(self._return(turn, (made, (q, lse)), ((), ())))
        yield END
        _merge_returned(out, lse, returned)
        out = out.to(q.dtype)
        return out, Saved((q, kv, out, lse))

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        q, kv, out, lse = saved.tensors
        of_queries = (q, dout, out, lse)
        dq = torch.zeros(q.shape, dtype=lse_dtype(q.dtype), device=q.device)
        dkv = torch.zeros(kv.shape, dtype=dq.dtype, device=q.device)
        turns, returned = self.backward_turns, deque[Returning]()
        fetched = self._first_fetches(turns, of_queries, kv)
        for t, turn in enumerate(turns):
            yield (t + 1) / (len(turns) + 1)  # the last gradients have the rest to travel
            block_of_queries, (block_kv,) = self._next_fetched(fetched, turns, t, of_queries, kv)
            dq_made, dkv_made = self._block_backward(turn, block_of_queries, block_kv, scale)
            if turn.queries.peer is None:
                _add(dq, turn.queries.rows, dq_made)
            if turn.keys.peer is None:
                _add(dkv, turn.keys.rows, dkv_made)
            _add_returned(dq, dkv, returned, AHEAD - 1)
            returned.append(self._return(turn, (dq_made, (q,)), (dkv_made, (kv,))))
        yield END
        _add_returned(dq, dkv, returned)
        return dq, *dkv.unbind(1)

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> ZoneSteps[Tensors]:  # type: ignore[no-untyped-def]
        """`backward` from this rank's rows and the last of what `forward` left."""
        return self.backward(dout, Saved((q, torch.stack((k, v), dim=1), out, lse)), scale)

    def _attend(self, turn: Turn, q: torch.Tensor, kv: torch.Tensor, scale: float) -> Tensors:
        """out [n, H, D] and lse [n, H] of the turn's call; nothing without one."""
        if turn.segments is None:
            return ()
        out, lse = self.kernel.forward(q, *kv.unbind(1), turn.segments, scale=scale)
        return out, lse.t().contiguous()

    def _block_backward(
        self, turn: Turn, of_queries: Tensors, kv: torch.Tensor, scale: float
    ) -> tuple[Tensors, Tensors]:
        """(dq,) and (dkv,) of the turn's call; nothing without one."""
        if turn.segments is None:
            return (), ()
        q, dout, out, lse = of_queries
        k, v = kv.unbind(1)
        dq, dk, dv = self.kernel.backward(
            dout, q, k, v, out, lse.t().contiguous(), turn.segments, scale=scale
        )
        return (dq,), (torch.stack((dk, dv), dim=1),)

    def _first_fetches(
        self, turns: Sequence[Turn], of_queries: Tensors, kv: torch.Tensor
    ) -> deque[Arriving]:
        """Of the turns in which every rank attends to what it holds, which read nothing, and of
        those after them."""
        own = sum(1 for _ in takewhile(lambda turn: turn.time == OWN, turns))
        return deque(self._fetch(turn, of_queries, kv) for turn in turns[: own + AHEAD])

    def _next_fetched(
        self,
        fetched: deque[Arriving],
        turns: Sequence[Turn],
        t: int,
        of_queries: Tensors,
        kv: torch.Tensor,
    ) -> tuple[Tensors, Tensors]:
        """What the call of turn t reads; what the next ones read travels while it computes."""
        result, following = fetched.popleft().result(), t + 1 + len(fetched)
        if len(fetched) < AHEAD and following < len(turns):
            fetched.append(self._fetch(turns[following], of_queries, kv))
        return result

    def _fetch(self, turn: Turn, of_queries: Tensors, kv: torch.Tensor) -> Arriving:
        """What a turn's call reads on its way here, and what others' calls read of ours in that
        turn to them."""
        exchange = self._exchange(turn, of_queries, (kv,), returns=False)
        for lent, tensors in ((turn.lent_queries, of_queries), (turn.lent_keys, (kv,))):
            for share in lent:
                exchange.send([share.rows.take(x) for x in tensors], share.peer)
        read = [_read(exchange, turn.queries, of_queries), _read(exchange, turn.keys, (kv,))]
        exchange.post(self.channel.communicator, tag=self.channel.tag(2 * turn.number * TAGS))
        return Arriving(exchange, *read)

    def _return(
        self, turn: Turn, of_queries: tuple[Tensors, Tensors], of_keys: tuple[Tensors, Tensors]
    ) -> Returning:
        """What a turn's call made of others' queries and keys on its way to them, and of ours from
        others' calls.

        of_queries, of_keys: what was made, and tensors of this rank that are like it but for the
        number of rows.
        """
        exchange = self._exchange(turn, of_queries[1], of_keys[1], returns=True)
        coming = []
        for read, lent, (made, likes) in (
            (turn.queries, turn.lent_queries, of_queries),
            (turn.keys, turn.lent_keys, of_keys),
        ):
            if read.peer is not None:
                exchange.send(
                    [x.to(like.dtype) for x, like in zip(made, likes, strict=True)], read.peer
                )
            coming.append(
                tuple((x.rows, exchange.recv(likes, x.rows.tokens, x.peer)) for x in lent)
            )
        exchange.post(
            self.channel.communicator, tag=self.channel.tag((2 * turn.number + 1) * TAGS)
        )
        return Returning(exchange, *coming)

    def _exchange(
        self, turn: Turn, of_queries: Tensors, of_keys: Tensors, *, returns: bool
    ) -> Exchange:
        """For rows of tensors like these."""
        label, routing = self.channel.label(partial(self._describe, turn, returns)), Routing()
        if self.routes is not None:
            routing = self.routes.find(turn.number, returns, of_queries, of_keys)
        if not routing.paths:
            return Exchange(label)
        device, within = (
            (*of_queries, *of_keys)[0].device,
            f", turn {turn.number}, of {self.channel.name}",
        )
        return RoutedExchange(label, routing, self.channel.communicator, device, within=within)

    def _describe(self, turn: Turn, returns: bool, peer: int, sent: bool) -> str:
        read, lent = (turn.queries, turn.keys), (*turn.lent_queries, *turn.lent_keys)
        shares = lent if sent != returns else read
        pieces = (piece for share in shares if share.peer == peer for piece in share.pieces)
        what = "results for" if returns else "rows of"
        return f"{what} {name_pieces(pieces, self.channel.group.sequences)}, turn {turn.number}"


def _row_bytes(tensors: Tensors) -> RowBytes:
    return tuple(x.shape[1:].numel() * x.element_size() for x in tensors)


def _read(exchange: Exchange, share: Share, tensors: Tensors) -> Tensors:
    """What a call reads of these tensors: rows of our own, or as many from a peer."""
    if share.peer is None:
        return tuple(share.rows.take(x) for x in tensors)
    return exchange.recv(tensors, share.rows.tokens, share.peer)


def _merge_returned(
    out: torch.Tensor, lse: torch.Tensor, returned: deque[Returning], left: int = 0
) -> None:
    """Merge what has been returned, in the order of the turns, but for the last `left` of it."""
    for arrived in _arrived(returned, left):
        for rows, made in arrived.of_queries:
            merge(out, lse, rows, made)


def _add_returned(
    dq: torch.Tensor, dkv: torch.Tensor, returned: deque[Returning], left: int = 0
) -> None:
    for arrived in _arrived(returned, left):
        for total, parts in ((dq, arrived.of_queries), (dkv, arrived.of_keys)):
            for rows, made in parts:
                _add(total, rows, made)


def _arrived(returned: deque[Returning], left: int) -> Iterator[Returning]:
    while len(returned) > left:
        returned[0].exchange.wait()
        yield returned.popleft()


def _add(total: torch.Tensor, rows: Rows, made: Tensors) -> None:
    for part in made:
        rows.add_to(total, part)


def merge(out: torch.Tensor, lse: torch.Tensor, rows: Rows, made: Tensors) -> None:
    """Merge a partial result, normalised over its own keys, into the running one, in place.

    out [t, H, D] and lse [t, H] accumulate; made: out [n, H, D] and lse [n, H] of `rows`, each of
    which has read a key, or nothing at all. A query that has read nothing before has a running lse
    of -inf.
    """
    if not made:
        return
    block_out, block_lse = made
    index = slice(None) if rows.index is None else rows.index
    # [n, H, D], [n, H]
    out[index], lse[index] = merge_partials(out[index], lse[index], block_out, block_lse)
