"""Rows on their way between this rank and others, and their gradients on the way back: of halos,
and of summaries."""

from collections.abc import Sequence

from hf_flexseq.program.builder import Builder
from hf_flexseq.program.exchange import Exchange, post
from hf_flexseq.program.instructions import RowsSpec, Value
from hf_flexseq.program.zone_segments import RowMessages


class Exchanges(list[Exchange]):
    """The exchanges of all groups, in one post."""

    def wait(self) -> None:
        """Wait until all messages have been sent and received."""
        for one in self:
            one.wait()


def gather(
    b: Builder, messages: Sequence[RowMessages], own: Value, tag: int
) -> tuple[Exchanges, list[Value]]:
    """Post rows of own [n, ...] to others, and return the received ones, by group and peer.

    messages: by group.
    """
    exchanges = Exchanges()
    parts: list[Value] = []
    for of_group in messages:
        exchange = Exchange(b, of_group.channel.tag(tag), of_group.label())
        for peer, rows in of_group.sent:
            exchange.send([b.take(own, rows)], peer)
        for peer, number in of_group.received:
            parts += exchange.recv([own], number, peer)
        exchanges.append(exchange)
    post(b, exchanges)
    return exchanges, parts


def give_back(
    b: Builder, messages: Sequence[RowMessages], received: Value, tag: int
) -> tuple[Exchanges, list[tuple[RowsSpec, Value]]]:
    """Post gradients of received rows [n, ...] to their owners, and return this rank's rows'
    gradients, from each reader. The transpose of `gather`.

    received: in the order in which `gather` returns the rows. messages: by group.
    """
    exchanges = Exchanges()
    returned = []
    start = 0
    for of_group in messages:
        exchange = Exchange(b, of_group.channel.tag(tag), of_group.label())
        for peer, number in of_group.received:
            exchange.send([b.part(received, start, start + number)], peer)
            start += number
        for peer, rows in of_group.sent:
            (value,) = exchange.recv([received], rows.tokens, peer)
            returned.append((rows, value))
        exchanges.append(exchange)
    post(b, exchanges)
    return exchanges, returned
