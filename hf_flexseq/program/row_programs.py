"""The programs that exchange rows of recurrent layers: halos, their gradients, and summaries.

`segments.py` says which rows travel between which ranks.
"""

from collections.abc import Sequence

from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.exchange import Exchange, post
from hf_flexseq.program.instructions import INPUT, WIDE, Program, RowShape, RowsSpec, Value
from hf_flexseq.program.segments import RankSegments
from hf_flexseq.program.tags import RECURRENT_BACKWARD, RECURRENT_FORWARD
from hf_flexseq.program.zone_segments import RowMessages


def halo(b: Builder, shape: RowShape, segments: RankSegments) -> Program:
    """Compile: edge rows [E, columns] -> rows received from other ranks [R, columns]."""
    found = segments.halo(shape.width)
    edges = b.input((found.edge_rows, shape.columns))
    return b.program((_gather(b, found.messages, edges, RECURRENT_FORWARD),))


def halo_return(b: Builder, shape: RowShape, segments: RankSegments) -> Program:
    """Compile: gradients of received rows [R, columns] -> sums of edge rows [E, columns]."""
    found = segments.halo(shape.width)
    received = b.input((found.received_rows, shape.columns))
    sums = b.zeros((found.edge_rows, shape.columns), WIDE)
    _return(b, found.messages, received, sums)
    return b.program((b.cast(sums, INPUT),))


def summaries(b: Builder, shape: RowShape, segments: RankSegments, *, after: bool) -> Program:
    """Compile: rows of summaries [n, columns] -> those received [R, columns]."""
    found = segments.neighbours(after=after)
    own = b.input((found.rows.takers, shape.columns))
    tag = RECURRENT_BACKWARD if after else RECURRENT_FORWARD
    return b.program((_gather(b, found.messages, own, tag),))


def _gather(b: Builder, messages: Sequence[RowMessages], own: Value, tag: int) -> Value:
    """Send rows of own [n, columns]; return the received ones [R, columns] by group and peer."""
    exchanges = []
    parts: list[Value] = []
    for of_group in messages:
        exchange = Exchange(b, of_group.channel.tag(tag), of_group.label())
        for peer, rows in of_group.sent:
            exchange.send([b.take(own, rows)], peer)
        for peer, number in of_group.received:
            parts += exchange.recv([own], number, peer)
        exchanges.append(exchange)
    _run(b, exchanges)
    if not parts:
        return b.empty((0, own.shape[1]), own.dtype)
    return b.join(parts)


def _return(b: Builder, messages: Sequence[RowMessages], received: Value, sums: Value) -> None:
    """Return gradients of received rows to their owners, and add arriving ones to sums."""
    exchanges = []
    returned: list[tuple[RowsSpec, Value]] = []
    start = 0
    for of_group in messages:
        exchange = Exchange(b, of_group.channel.tag(RECURRENT_BACKWARD), of_group.label())
        for peer, number in of_group.received:
            exchange.send([b.part(received, start, start + number)], peer)
            start += number
        for peer, rows in of_group.sent:
            values: Values = exchange.recv([received], rows.tokens, peer)
            returned += [(rows, value) for value in values]
        exchanges.append(exchange)
    _run(b, exchanges)
    for rows, value in returned:
        b.add(sums, rows, value)


def _run(b: Builder, exchanges: Sequence[Exchange]) -> None:
    """Post all messages at once, and wait for them."""
    post(b, exchanges)
    for exchange in exchanges:
        exchange.wait()
