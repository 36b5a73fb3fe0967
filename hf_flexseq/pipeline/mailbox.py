"""Tensors that arrive from and leave for a neighbouring rank, in an order that both sides take
from the plan.

    Inbox     receives are posted in the order in which the neighbour sends, one ahead of the one
              that is needed, so that a transfer runs beside the computation before it
    Outbox    hidden states: a send never waits until it is received, since a stage would wait for
              one that waits for its gradient
              gradients: sends do wait, a few at a time. They flow towards the first stage, which
              waits for gradients alone, so there is no circle.

With several stages per rank there is a circle: gradients flow from the first rank to the last one,
too. There a send only waits for what has been taken before it in one order in which all actions
can happen, the same on every rank. In that order nobody waits for what comes later, so somebody
can always go on.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from hf_flexseq.distributed.links import Message, StageLink

AHEAD = 1  # receives posted beyond the one that is needed
WINDOW = 2  # sends that may be under way when nothing else tells that they have arrived


class Item(NamedTuple):
    """A chunk as it enters or leaves one of this rank's stages."""

    stage: int
    chunk: int  # its index in the plan


class Inbox:
    """Receives from one neighbour."""

    __slots__ = ("_channel", "_empty", "_index", "_order", "_posted")

    def __init__(
        self, channel: StageLink, order: Iterable[Item], empty: Callable[[int], torch.Tensor]
    ) -> None:
        """Post nothing yet.

        order: everything that the neighbour sends, in its order
        empty: makes a tensor [1, tokens, hidden_size] to receive the chunk of this index in
        """
        self._channel = channel
        self._order = tuple(order)
        self._empty = empty
        self._index = {item: index for index, item in enumerate(self._order)}
        self._posted: list[Message | None] = []  # None once it was taken

    def take(self, item: Item) -> torch.Tensor:
        """Return the tensor [1, tokens, hidden_size] that was sent; waits for it."""
        index = self._index[item]
        for coming in self._order[len(self._posted) : index + 1 + AHEAD]:
            self._posted.append(self._channel.receive(self._empty(coming.chunk)))
        message = self._posted[index]
        assert message is not None, f"{item} was taken twice"
        self._posted[index] = None
        return message.wait()


class Outbox:
    """Sends to one neighbour."""

    __slots__ = ("_channel", "_taken_before", "_under_way", "_window")

    def __init__(
        self,
        channel: StageLink,
        *,
        window: int | None,
        taken_before: Callable[[Item, Item], bool],
    ) -> None:
        """Send nothing yet.

        window: how many sends may be under way; None leaves the waiting to `arrived`
        taken_before: tells whether its first item is certain to be received although this rank
            waits for that before it sends the second one
        """
        self._channel = channel
        self._window = window
        self._taken_before = taken_before
        self._under_way: dict[Item, Message] = {}

    def put(self, item: Item, tensor: torch.Tensor) -> None:
        """Send a tensor [1, tokens, hidden_size]; wait for the oldest send where the window is
        full and waiting is safe."""
        self._under_way[item] = self._channel.send(tensor.detach().contiguous())
        if self._window is not None and len(self._under_way) > self._window:
            oldest = next(iter(self._under_way))
            if self._taken_before(oldest, item):
                self.arrived(oldest)

    def arrived(self, item: Item) -> None:
        """Let go of a tensor that was sent; waits unless it has arrived."""
        self._under_way.pop(item).wait()

    def close(self) -> None:
        """Wait for all sends that are under way."""
        for item in list(self._under_way):
            self.arrived(item)
