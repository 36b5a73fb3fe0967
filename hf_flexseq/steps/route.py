"""The way of rows between ranks: `bring` takes rows from the ranks that have them to the ranks
that want them, and `give_back` brings each row's result to the rank that had it.

Tokens with their columns, weights and figures travel so on the CPU, features of images and their
gradients on the device. A row is a row of any tensor, [n, ...]; the caller gives the collective
that carries it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# Exchanges rows [sent, ...] by target for rows [received, ...] by source; counts by rank.
Carry = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]


class Route(NamedTuple):
    """The rows that one rank sends to each rank, and the rows that it receives."""

    sent: torch.Tensor
    """[sent] Indices of this rank's rows: first the rows for rank 0, then the rows for rank 1, and
    so on. A row may be sent to several ranks."""
    sent_counts: list[int]
    """[world]"""
    received_counts: list[int]
    """[world]"""
    order: torch.Tensor
    """[received] Where each row that this rank wants is among the arriving rows, which come by
    rank."""

    def bring(self, rows: torch.Tensor, carry: Carry) -> torch.Tensor:
        """Return the rows that this rank wants, [received, ...], of all ranks' rows [n, ...].
        Collective over the world."""
        arrived = carry(rows.index_select(0, self.sent), self.sent_counts, self.received_counts)
        return arrived.index_select(0, self.order)

    def give_back(self, rows: torch.Tensor, carry: Carry) -> torch.Tensor:
        """Return all ranks' results for the rows that this rank has sent, [sent, ...]. Collective
        over the world. rows: the rows that were brought, [received, ...], or values of each."""
        by_rank = torch.empty_like(rows)
        by_rank[self.order] = rows
        return carry(by_rank, self.received_counts, self.sent_counts)
