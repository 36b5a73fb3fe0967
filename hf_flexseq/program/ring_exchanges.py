"""The exchanges of ring steps: inputs of their calls, and results for the rows' owners.

    RingExchanges   the fetch of a step's inputs, and the return of its results
    Fetches         the fetches of all steps, `AHEAD` of them on their way

Shapes: as in `ring.py`.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from hf_flexseq.plan.attention_schedule import ChunkKey
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Channel, Exchange, Label, post
from hf_flexseq.program.instructions import RowsSpec, Value
from hf_flexseq.program.ring_steps import (
    DIAGONAL_TIME,
    ChunkRows,
    RingStep,
    name_chunks,
)
from hf_flexseq.program.tags import ring_fetch, ring_return

AHEAD = 2  # steps whose inputs are on their way when a step begins


class PendingFetch(NamedTuple):
    """The rows that a call of this rank reads, while some of them are on their way."""

    exchange: Exchange

    of_queries: Values
    """n queries: (q [n, H, D],), or in the backward (q, dout, out, lse [n, H])."""
    of_keys: Values
    """Values of the m keys: (kv [m, 2, Hkv, D],)."""


class PendingReturn(NamedTuple):
    """Results of other ranks' calls about rows of this rank, while they are on their way."""

    exchange: Exchange

    of_queries: tuple[tuple[RowsSpec, Values], ...]
    """(the n rows, (out [n, H, D], lse [n, H])), in the backward (the n rows, (dq [n, H, D],))."""
    of_keys: tuple[tuple[RowsSpec, Values], ...]
    """Nothing in the forward; in the backward (the m rows, (dkv [m, 2, Hkv, D],))."""


class RingExchanges:
    """Collects the exchanges of the steps of one group."""

    def __init__(self, b: Builder, channel: Channel) -> None:
        self.builder = b
        self.channel = channel

    def fetch(self, step: RingStep, of_queries: Values, kv: Value) -> PendingFetch:
        """Collect the inputs of a step's calls: from peers to this rank, and from here to peers.

        Rows [t, ...] on the rank that holds them -> [n, ...] on the rank that reads them.
        """
        b = self.builder
        exchange = self._new_exchange(step, returns=False)
        for share in step.sent_queries:
            exchange.send(b.take_all(of_queries, share.rows), share.peer)
        for share in step.sent_keys:
            exchange.send([b.take(kv, share.rows)], share.peer)
        if step.read is None:
            return PendingFetch(exchange, (), ())
        # Queries before keys, as they are sent.
        call_queries = _read(b, exchange, step.read.queries, of_queries)
        call_keys = _read(b, exchange, step.read.keys, (kv,))
        return PendingFetch(exchange, call_queries, call_keys)

    def returned(
        self,
        step: RingStep,
        *,
        of_queries: Values,
        like_queries: Values,
        of_keys: Values,
        like_keys: Values,
    ) -> PendingReturn:
        """Collect the results of a step's calls: from this rank to peers, and from peers to here.

        of_queries, of_keys: results [n, ...] of this rank's call, about its queries and its keys.
        like_queries, like_keys: values [t, ...] of this rank that are like such results but for
            the number of rows; results travel in their dtypes.
        Rows [n, ...] on the rank that computes -> [n, ...] on the rank that holds their tokens.
        """
        b = self.builder
        exchange = self._new_exchange(step, returns=True)
        # The order of these four decides the tags: queries before keys.
        if step.read is not None:
            _send_results(b, exchange, step.read.queries, of_queries, like_queries)
        coming_queries = _receive_results(exchange, step.sent_queries, like_queries)
        if step.read is not None:
            _send_results(b, exchange, step.read.keys, of_keys, like_keys)
        coming_keys = _receive_results(exchange, step.sent_keys, like_keys)
        return PendingReturn(exchange, coming_queries, coming_keys)

    def _new_exchange(self, step: RingStep, *, returns: bool) -> Exchange:
        """Return the empty exchange of a step's inputs, or of its results."""
        message = ring_return(step.number) if returns else ring_fetch(step.number)
        label = Label(self.channel, partial(self._describe, step, returns))
        return Exchange(self.builder, self.channel.tag(message), label)

    def _describe(self, step: RingStep, returns: bool, peer: int, sent: bool) -> str:
        """Return the name of a message of a step, for errors."""
        # Inputs leave for the peers that read them; results leave the rank that has read.
        read_here = sent == returns
        sides: Sequence[ChunkRows]
        if read_here:
            sides = step.read or ()
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
        self, exchanges: RingExchanges, steps: Sequence[RingStep], of_queries: Values, kv: Value
    ) -> None:
        """of_queries: values [t, ...] of this rank's queries. kv: [t, 2, Hkv, D]."""
        self._exchanges = exchanges
        self._builder = exchanges.builder
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
        """Post the return of the step that has been taken last, together with the fetch of the
        step `AHEAD` + 1 later: `AHEAD` fetches are on their way when the next step begins."""
        post(self._builder, [back, *self._collect_until(self._taken + AHEAD + 1)])

    def next(self) -> tuple[Values, Values]:
        """Wait for the next call's inputs: its queries [n, ...] and keys [m, ...], or nothing."""
        fetch = self._pending.popleft()
        self._taken += 1
        fetch.exchange.wait()
        return fetch.of_queries, fetch.of_keys

    @property
    def _next(self) -> RingStep:
        return self._steps[self._posted]

    def _collected(self) -> PendingFetch:
        """Collect the fetch of the next step."""
        fetch = self._exchanges.fetch(self._next, self._of_queries, self._kv)
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


def _read(b: Builder, exchange: Exchange, operand: ChunkRows, values: Values) -> Values:
    """Return the n rows of a call's operand: [t, ...] here or at a peer -> [n, ...] here.

    The rows of a peer have come when `exchange` has been waited for.
    """
    if operand.peer == b.rank:
        return b.take_all(values, operand.rows)
    return exchange.recv(values, operand.rows.tokens, operand.peer)


def _send_results(
    b: Builder, exchange: Exchange, operand: ChunkRows, results: Values, likes: Values
) -> None:
    """Send results [n, ...] about an operand to its holder, in the dtypes of `likes`."""
    if operand.peer == b.rank or not results:
        return
    travelling = [b.cast(x, like.dtype) for x, like in zip(results, likes, strict=True)]
    exchange.send(travelling, operand.peer)


def _receive_results(
    exchange: Exchange, shares: Sequence[ChunkRows], likes: Values
) -> tuple[tuple[RowsSpec, Values], ...]:
    """Return (rows, results [n, ...]), computed by peers, for each of the shares.

    The results have come when `exchange` has been waited for.
    likes: values [t, ...] that are like the results but for the number of rows.
    """
    coming = []
    for share in shares:
        results = exchange.recv(likes, share.rows.tokens, share.peer)
        if results:
            coming.append((share.rows, results))
    return tuple(coming)


def arrived_returns(returned: deque[PendingReturn], leave: int = 0) -> Iterable[PendingReturn]:
    """Wait for all but the latest `leave` returns; yield each and drop it from `returned`."""
    while len(returned) > leave:
        returned[0].exchange.wait()
        yield returned.popleft()
