"""Counts the exchanges of programs that are routed over several NICs."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hf_flexseq.program.exchange import Exchange


@contextmanager
def routed_exchanges() -> Iterator[list[int]]:
    """Yield a list that gets the rank of each routed exchange of a program that is compiled."""
    ranks: list[int] = []
    post_routed = Exchange.post_routed

    def counted(exchange: Exchange) -> None:
        ranks.append(exchange.rank)
        post_routed(exchange)

    with mock.patch.object(Exchange, "post_routed", counted):
        yield ranks
