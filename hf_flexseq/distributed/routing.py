"""Exchanges whose transfers between nodes are split over several NICs; see `schedule/routing.py`
for which, and how.

    post    source --scatter--> mates; every piece goes on as soon as it has come:    mates
            --cross--> mates
    wait    every piece goes on as soon as it has come:    mates --gather--> target

What is slow, the way between nodes, is under way from `post` to `wait`, beside whatever is
computed meanwhile, and pieces follow each other through the legs. Ranks that only pass something
on take part at the same two points.

Each leg of each piece is a batch of transfers, and all ranks post these batches in one order:
scatter of every piece, then cross, then gather. A rank waits for batches only whose other ends
were posted, or will be without waiting for a later one, so nothing can hang, whatever a backend
does about tags. Pieces overlap on gloo; NCCL, on which it has not run, would take one batch after
the other. Rejected: a thread that passes pieces on, which posts in an order of its own; and
receives of all legs posted at once, on which a backend that runs one batch after the other would
wait for ever.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.distributed.communicator import (
    TAGS,
    TAGS_OF_ZONE,
    Communicator,
    Exchange,
    Label,
    Transfers,
)
from hf_flexseq.plan.shard import contiguous_part
from hf_flexseq.schedule.routing import MOST_PIECES, Path, Routing, Transfer
from hf_flexseq.schedule.transfers import aligned

SCATTER, CROSS, GATHER = range(3)
TAGS_OF_BATCH = 64


class TransitRows(NamedTuple):
    """A path that this rank is on, and what travels on it, [bytes]."""

    transfer: Transfer
    path: Path
    parcel: torch.Tensor

    def ends(self, leg: int) -> tuple[int, int]:
        """Between which ranks the leg is; the same one twice where there is none."""
        stops = self.transfer.source, self.path.leaves, self.path.enters, self.transfer.target
        return stops[leg], stops[leg + 1]


class RoutedExchange(Exchange):
    """An `Exchange` of which `routing` says how it travels. All ranks of the nodes in question
    make, post and wait for it, also those that neither send nor receive anything."""

    __slots__ = (
        "_communicator",
        "_crossing",
        "_device",
        "_held",
        "_parcels",
        "_routing",
        "_tag",
        "_within",
    )

    def __init__(
        self,
        label: Label,
        routing: Routing,
        communicator: Communicator,
        device: torch.device,
        *,
        within: str = "",
    ) -> None:
        """label: of what goes straight. within: in which exchange pieces are, that errors name by
        their ends."""
        super().__init__(label)
        self._within = within
        self._routing, self._communicator, self._device = routing, communicator, device
        self._parcels = {
            (t.source, t.target): torch.empty(t.nbytes, dtype=torch.uint8, device=device)
            for t, _ in routing.paths
            if communicator.rank in (t.source, t.target)
        }
        self._held: list[TransitRows] = []
        self._crossing: list[Transfers] = []

    def send(self, tensors: Iterable[torch.Tensor], peer: int) -> None:
        parcel = self._parcels.get((self._communicator.rank, peer))
        if parcel is None:
            super().send(tensors, peer)
            return
        tensors = list(tensors)
        for room, x in zip(_unpacked(parcel, tensors, len(tensors[0])), tensors, strict=True):
            room.copy_(x)

    def recv(
        self, likes: Iterable[torch.Tensor], tokens: int, peer: int
    ) -> tuple[torch.Tensor, ...]:
        parcel = self._parcels.get((peer, self._communicator.rank))
        return (
            super().recv(likes, tokens, peer)
            if parcel is None
            else _unpacked(parcel, list(likes), tokens)
        )

    def post(self, communicator: Communicator, tag: int) -> None:
        super().post(communicator, tag)
        self._tag = tag_of_legs(tag)
        self._held = [
            self._hold(t, path)
            for t, paths in self._routing.paths
            for path in paths
            if self._is_on(t, path)
        ]
        pieces = range(self._routing.pieces)
        scattered = [self._batch(SCATTER, piece) for piece in pieces]
        for piece in pieces:
            scattered[piece].wait()
            self._crossing.append(self._batch(CROSS, piece))

    def wait(self) -> None:
        gathered = []
        for piece, crossing in enumerate(self._crossing):
            crossing.wait()
            gathered.append(self._batch(GATHER, piece))
        for batch in gathered:
            batch.wait()
        super().wait()

    def _is_on(self, t: Transfer, path: Path) -> bool:
        return self._communicator.rank in (t.source, path.leaves, path.enters, t.target)

    def _hold(self, t: Transfer, path: Path) -> TransitRows:
        whole = self._parcels.get((t.source, t.target))
        if whole is None:
            return TransitRows(
                t,
                path,
                torch.empty(path.stop - path.start, dtype=torch.uint8, device=self._device),
            )
        return TransitRows(t, path, whole[path.start : path.stop])

    def _batch(self, leg: int, piece: int) -> Transfers:
        """One leg of one piece of every path, posted."""
        ends: dict[str, list[tuple[torch.Tensor, int]]] = {"sends": [], "recvs": []}
        for held in self._held:
            source, target = held.ends(leg)
            start, stop = contiguous_part(len(held.parcel), piece, self._routing.pieces)
            if source == target:
                continue
            if source == self._communicator.rank:
                ends["sends"].append((held.parcel[start:stop], target))
            elif target == self._communicator.rank:
                ends["recvs"].append((held.parcel[start:stop], source))
        tag = self._tag + (leg * MOST_PIECES + piece) * TAGS_OF_BATCH
        return Transfers(
            self._communicator,
            **ends,
            tag=tag,
            label=lambda peer, sent: self._name(leg, peer, sent),
        )

    def _name(self, leg: int, peer: int, sent: bool) -> str:
        ends = (self._communicator.rank, peer) if sent else (peer, self._communicator.rank)
        of = dict.fromkeys(held.transfer[:2] for held in self._held if held.ends(leg) == ends)
        transfers = ", ".join(f"rank {source} sends to rank {target}" for source, target in of)
        return f"pieces of what {transfers}{self._within}"


def tag_of_legs(tag: int) -> int:
    """The first of those that the legs of the exchange of `tag` have; they lie in the upper half
    of its zone's."""
    zone, message = divmod(tag, TAGS_OF_ZONE)
    assert message < TAGS_OF_ZONE // 2, f"message {message} lies where those of legs do"
    return (
        zone * TAGS_OF_ZONE
        + TAGS_OF_ZONE // 2
        + message // TAGS % 16 * (3 * MOST_PIECES * TAGS_OF_BATCH)
    )


def _unpacked(
    parcel: torch.Tensor, likes: Sequence[torch.Tensor], tokens: int
) -> tuple[torch.Tensor, ...]:
    """The tensors in a parcel, one behind the other: `tokens` rows each, otherwise like
    `likes`."""
    found, start = [], 0
    for like in likes:
        shape = torch.Size((tokens, *like.shape[1:]))
        nbytes = shape.numel() * like.element_size()
        found.append(parcel[start : start + nbytes].view(like.dtype).view(shape))
        start += aligned(nbytes)
    assert start == len(parcel), f"tensors of {start} bytes for a transfer of {len(parcel)}"
    return tuple(found)
