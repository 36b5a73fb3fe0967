"""What arrives from and leaves for a neighbouring rank, in an order that both sides take from the
plan.

Receives are posted in the order in which the neighbour sends, one ahead of the one that is needed,
so that a transfer runs beside the computation before it. Sends of hidden states never wait until
they are received: a stage would wait for one that waits for its gradient. Gradients do wait, a few
at a time: they flow towards the first stage, which waits for gradients alone, so there is no
circle.

With several stages per rank there is one: gradients flow from the first rank to the last one, too.
There a send only waits for what has been taken before it in one order in which all actions can
happen, the same on every rank. In that order nobody waits for what comes later, so somebody can
always go on.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from hf_flexseq.distributed.links import Message, StageLink


class Item(NamedTuple):
    """A chunk, by its place in the plan, as it enters or leaves one of this rank's stages."""

    stage: int
    place: int


AHEAD = 1  # receives posted beyond the one that is needed
WINDOW = 2  # sends that may be under way when nothing else tells that they have arrived


class Inbox:
    """Receives from one neighbour. order: what the neighbour sends."""

    __slots__ = ("_empty", "_index", "_link", "_order", "_posted")

    def __init__(
        self, link: StageLink, order: Iterable[Item], empty: Callable[[int], torch.Tensor]
    ) -> None:
        """empty: a tensor to receive the chunk at a place in."""
        self._link, self._order, self._empty = link, tuple(order), empty
        self._index = {item: i for i, item in enumerate(self._order)}
        self._posted: list[Message | None] = []

    def take(self, item: Item) -> torch.Tensor:
        """What was sent; waits for it."""
        index = self._index[item]
        for coming in self._order[len(self._posted) : index + 1 + AHEAD]:
            self._posted.append(self._link.receive(self._empty(coming.place)))
        message, self._posted[index] = self._posted[index], None
        assert message is not None, f"{item} was taken twice"
        return message.wait()


class Outbox:
    """Sends to one neighbour."""

    __slots__ = ("_link", "_taken_before", "_under_way", "_window")

    def __init__(
        self, link: StageLink, *, window: int | None, taken_before: Callable[[Item, Item], bool]
    ) -> None:
        """window: how many sends may be under way; None leaves the waiting to `arrived`.
        taken_before: whether one is certain to be received although this rank waits before it
        sends the other one."""
        self._link, self._window, self._taken_before = link, window, taken_before
        self._under_way: dict[Item, Message] = {}

    def put(self, item: Item, tensor: torch.Tensor) -> None:
        self._under_way[item] = self._link.send(tensor.detach().contiguous())
        if self._window is not None and len(self._under_way) > self._window:
            oldest = next(iter(self._under_way))
            if self._taken_before(oldest, item):
                self.arrived(oldest)

    def arrived(self, item: Item) -> None:
        """Let go of what was sent; waits unless it has arrived."""
        self._under_way.pop(item).wait()

    def close(self) -> None:
        for item in list(self._under_way):
            self.arrived(item)
