"""What arrives from and leaves for a neighbouring stage, in an order that both sides take from the plan.

Receives are posted in the order in which the neighbour sends, one ahead of the one that is needed, so that a transfer
runs beside the computation before it. Sends never wait for the forward direction to be received: a stage would wait
for one that waits for its gradient. Gradients do wait, a few at a time: they flow towards the first stage, which waits
for gradients alone, so there is no circle.
"""

from collections.abc import Callable, Iterable

import torch

from hf_flexseq.distributed.neighbours import Link, Message

Place = int
AHEAD = 1  # receives posted beyond the one that is needed
WINDOW = 2  # sends that may be under way when nothing else tells that they have arrived


class Inbox:
    """Receives from one neighbour. order: the chunks, by their place in the plan, as the neighbour sends them."""

    __slots__ = ("_empty", "_index", "_link", "_order", "_posted")

    def __init__(self, link: Link, order: Iterable[Place], empty: Callable[[Place], torch.Tensor]) -> None:
        """empty: a tensor to receive a chunk in."""
        self._link, self._order, self._empty = link, tuple(order), empty
        self._index = {place: i for i, place in enumerate(self._order)}
        self._posted: list[Message | None] = []

    def take(self, place: Place) -> torch.Tensor:
        """What was sent for the chunk at `place`; waits for it."""
        index = self._index[place]
        for coming in self._order[len(self._posted) : index + 1 + AHEAD]:
            self._posted.append(self._link.receive(self._empty(coming)))
        message, self._posted[index] = self._posted[index], None
        assert message is not None, f"chunk {place} was taken twice"
        return message.wait()


class Outbox:
    """Sends to one neighbour."""

    __slots__ = ("_link", "_under_way", "_window")

    def __init__(self, link: Link, *, window: int | None) -> None:
        """window: how many sends may be under way; None leaves the waiting to `arrived`."""
        self._link, self._window = link, window
        self._under_way: dict[Place, Message] = {}

    def put(self, place: Place, tensor: torch.Tensor) -> None:
        self._under_way[place] = self._link.send(tensor.detach().contiguous())
        if self._window is not None and len(self._under_way) > self._window:
            self.arrived(next(iter(self._under_way)))

    def arrived(self, place: Place) -> None:
        """Let go of what was sent for `place`; waits unless it has arrived."""
        self._under_way.pop(place).wait()

    def close(self) -> None:
        for place in list(self._under_way):
            self.arrived(place)
