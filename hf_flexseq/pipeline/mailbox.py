"""Tensors from and to a neighbouring rank, in one order that follows from the plan.

    Inbox            receives from one neighbour, in the order in which it sends
    post_receives    posts the receives of all inboxes that are due
    Outbox           sends to one neighbour; a few unconfirmed sends at a time are under way

Why nothing can hang
--------------------
The actions of all ranks are numbered by `planning/walk.py`: in this order all of them can happen.
A message has the number of the action that sends it.

1. Before a rank begins its action of number n, it posts all receives of messages below n, of both
   neighbours, in the order of their numbers.
2. The messages of an action are posted when it is over, so every rank posts all of its messages in
   the order of their numbers. Exchanges inside an action come between the two.
3. A rank waits only for messages that it has posted.

Take the unfinished message with the lowest number. Both of its ranks have posted it, or can
continue until they have: each waits at most for earlier messages, and those are over. So it
completes, also on a transport that carries out all posts of a rank one after the other
(`distributed/transport.py`), and every wait is safe.

A transport whose posts are independent takes receives earlier. There one more receive is posted
than an action needs, to overlap a transfer with the previous computation. Where posts are ordered
the host runs ahead of the device, which does the same.

Rejected: receives posted ahead on every transport. Where posts are ordered, such a receive would
delay a send that the neighbour waits for.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.distributed.links import LinkMessage, StageLink

AHEAD = 1  # receives posted beyond the one that is needed, where posts are independent
WINDOW = 2  # sends that may be under way when nothing else tells that they have arrived


class Item(NamedTuple):
    """A chunk as it enters or leaves one of this rank's stages."""

    stage: int
    chunk: int  # its index in the plan


class Inbox:
    """Receives from one neighbour."""

    def __init__(
        self,
        link: StageLink,
        order: Sequence[tuple[int, Item]],
        empty: Callable[[int], torch.Tensor],
    ) -> None:
        """Post nothing yet.

        order: (number of the action that sends it, item) of all that the neighbour sends, in its
            order; numbers ascend
        empty: makes a tensor [1, tokens, hidden_size] to receive the chunk of this index in
        """
        self._link = link
        self._ahead = 0 if link.is_ordered else AHEAD
        self._numbers = [number for number, _ in order]
        self._order = [item for _, item in order]
        self._empty = empty
        self._index = {item: index for index, item in enumerate(self._order)}
        self._posted: list[LinkMessage | None] = []  # None once it was taken

    @property
    def next_number(self) -> float:
        """Number of the next message without a receive; infinite without one."""
        if len(self._posted) == len(self._order):
            return math.inf
        return self._numbers[len(self._posted)]

    def post_next(self) -> None:
        """Post the next receive."""
        item = self._order[len(self._posted)]
        self._posted.append(self._link.receive(self._empty(item.chunk)))

    def take(self, item: Item) -> torch.Tensor:
        """Return the tensor [1, tokens, hidden_size] that was sent; waits for it."""
        index = self._index[item]
        assert index < len(self._posted), f"{item} is taken before its receive was posted"
        while len(self._posted) < min(index + 1 + self._ahead, len(self._order)):
            self.post_next()
        message = self._posted[index]
        assert message is not None, f"{item} was taken twice"
        self._posted[index] = None
        return message.wait()


def post_receives(inboxes: Sequence[Inbox], before: int) -> None:
    """Post the receives of all messages below a number, in the order of their numbers."""
    while True:
        due = [inbox for inbox in inboxes if inbox.next_number < before]
        if not due:
            return
        min(due, key=lambda inbox: inbox.next_number).post_next()


class Outbox:
    """Sends to one neighbour."""

    def __init__(self, link: StageLink, *, window: int | None) -> None:
        """window: how many sends may be under way; None leaves the waiting to `arrived`"""
        self._link = link
        self._window = window
        self._under_way: dict[Item, LinkMessage] = {}

    def put(self, item: Item, tensor: torch.Tensor) -> None:
        """Send a tensor [1, tokens, hidden_size]; wait for the oldest if the window is full."""
        self._under_way[item] = self._link.send(tensor.detach().contiguous())
        if self._window is not None and len(self._under_way) > self._window:
            self.arrived(next(iter(self._under_way)))

    def arrived(self, item: Item) -> None:
        """Drop a tensor that was sent; waits unless it has arrived."""
        self._under_way.pop(item).wait()

    def close(self) -> None:
        """Wait for all sends that are under way."""
        for item in list(self._under_way):
            self.arrived(item)
