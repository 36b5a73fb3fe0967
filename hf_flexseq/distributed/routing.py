"""Exchanges whose transfers between nodes are split over several NICs.

`schedule/routing.py` decides which transfers take which paths; a `RoutedExchange` obeys. Every
transfer that is routed is one buffer of bytes, a *parcel*. Its paths are slices of the parcel, and
every path travels in the same number of packets, each over three legs:

    source --scatter--> exit rank --cross--> entry rank --gather--> target

    post    1. scatter all packets
            2. when a packet has come to its exit rank: send it across
    wait    3. when a packet has come to its entry rank: gather it
            4. wait for all packets at the target

What is slow, the way between nodes, is under way from `post` to `wait`, beside whatever is
computed meanwhile, and packets follow each other through the legs. Ranks that only pass packets on
take part at the same two points.

Nothing can hang: each leg of each packet is one batch of transfers, and all ranks post these
batches in one order, first the scatter of every packet, then cross, then gather. A rank waits only
for batches whose other ends are posted already, or will be without waiting for a later batch. The
argument for whole calls of attention is in `attention/weave.py`. Legs inside a node and legs
between nodes have different lanes, so packets overlap; in remapping they share one.

Rejected: a thread that passes packets on, which would post in an order of its own. Rejected:
receives of all legs posted at once; a backend that runs one batch after the other would wait on
them for ever.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.distributed.communicator import Communicator, Exchange, Transfers
from hf_flexseq.distributed.tags import packet_tag
from hf_flexseq.distributed.transport import Label, Lane
from hf_flexseq.plan.shard import contiguous_part
from hf_flexseq.schedule.routing import Path, Routing, Transfer
from hf_flexseq.schedule.transfers import aligned

SCATTER, CROSS, GATHER = range(3)  # the legs


class TransitBytes(NamedTuple):
    """A path that this rank is on, with the bytes that travel on it."""

    transfer: Transfer
    path: Path

    buffer: torch.Tensor
    """uint8 [path.nbytes]: a view of the parcel at its source and target, elsewhere on its own."""

    def ends(self, leg: int) -> tuple[int, int]:
        """Return the (source, target) ranks of a leg; one rank twice where the leg is empty."""
        stops = (
            self.transfer.source,
            self.path.exit_rank,
            self.path.entry_rank,
            self.transfer.target,
        )
        return stops[leg], stops[leg + 1]


class RoutedExchange(Exchange):
    """An `Exchange` that travels as a `Routing` says.

    All ranks of the nodes in question make it, post it and wait for it, also those that neither
    send nor receive anything.
    """

    __slots__ = (
        "_communicator",
        "_crossing",
        "_device",
        "_exchange_tag",
        "_lane",
        "_parcels",
        "_routing",
        "_transit",
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
        """label: names messages that go straight.
        within: names the exchange; errors name a packet by the ends of its transfer and by this.
        """
        super().__init__(label)
        self._within = within
        self._routing = routing
        self._communicator = communicator
        self._device = device
        # (source, target) -> uint8 [bytes of the transfer], where this rank is one of the two
        self._parcels: dict[tuple[int, int], torch.Tensor] = {}
        for transfer, _ in routing.paths:
            if communicator.rank in (transfer.source, transfer.target):
                parcel = torch.empty(transfer.nbytes, dtype=torch.uint8, device=device)
                self._parcels[transfer.source, transfer.target] = parcel
        self._transit: list[TransitBytes] = []
        self._crossing: list[Transfers] = []  # by packet

    def send(self, tensors: Iterable[torch.Tensor], peer: int) -> None:
        """Add tensors [rows, ...] of this rank that `peer` will receive."""
        parcel = self._parcels.get((self._communicator.rank, peer))
        if parcel is None:
            super().send(tensors, peer)
            return
        tensors = list(tensors)
        views = _unpacked(parcel, tensors, len(tensors[0]))
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)  # [rows, ...] -> its bytes of the parcel

    def recv(
        self, likes: Iterable[torch.Tensor], tokens: int, peer: int
    ) -> tuple[torch.Tensor, ...]:
        """Return tensors [tokens, ...] that will hold what `peer` sends; see `Exchange.recv`."""
        parcel = self._parcels.get((peer, self._communicator.rank))
        if parcel is None:
            return super().recv(likes, tokens, peer)
        return _unpacked(parcel, list(likes), tokens)

    def recv_into(self, tensors: Iterable[torch.Tensor], peer: int) -> None:
        """Add tensors [rows, ...] that will hold what `peer` sends straight."""
        assert (peer, self._communicator.rank) not in self._parcels, (
            f"what rank {peer} sends comes in a parcel: it is received by `recv`"
        )
        super().recv_into(tensors, peer)

    def post(self, communicator: Communicator, tag: int, *, lane: Lane | None = None) -> None:
        """Start all transfers and send the packets across; waits for their first leg.

        lane: see `Transfers`.
        """
        super().post(communicator, tag, lane=lane)  # what goes straight
        self._exchange_tag = tag
        self._lane = lane
        for transfer, paths in self._routing.paths:
            for path in paths:
                if self._is_on(transfer, path):
                    self._transit.append(self._transit_bytes(transfer, path))
        # 1. scatter all packets
        packets = range(self._routing.packets)
        scattered = [self._batch(SCATTER, packet) for packet in packets]
        # 2. send each one across as soon as it has come
        for packet in packets:
            scattered[packet].wait()
            self._crossing.append(self._batch(CROSS, packet))

    def wait(self) -> None:
        """Wait until all messages have been sent and received, and all packets passed on."""
        # 3. gather each packet as soon as it has come
        gathered = []
        for packet, crossing in enumerate(self._crossing):
            crossing.wait()
            gathered.append(self._batch(GATHER, packet))
        # 4. wait for all of them, and for what went straight
        for batch in gathered:
            batch.wait()
        super().wait()

    def _is_on(self, transfer: Transfer, path: Path) -> bool:
        ranks = (transfer.source, path.exit_rank, path.entry_rank, transfer.target)
        return self._communicator.rank in ranks

    def _transit_bytes(self, transfer: Transfer, path: Path) -> TransitBytes:
        """Return a path of this rank, with uint8 [path.nbytes] for what travels on it."""
        parcel = self._parcels.get((transfer.source, transfer.target))
        if parcel is None:  # this rank only passes it on
            buffer = torch.empty(path.nbytes, dtype=torch.uint8, device=self._device)
        else:
            buffer = parcel[path.start : path.stop]  # [transfer.nbytes] -> [path.nbytes]
        return TransitBytes(transfer, path, buffer)

    def _batch(self, leg: int, packet: int) -> Transfers:
        """Post one leg of one packet of every path, and return the transfers."""
        sends = []
        recvs = []
        for transit in self._transit:
            source, target = transit.ends(leg)
            if source == target:
                continue
            start, stop = contiguous_part(len(transit.buffer), packet, self._routing.packets)
            packet_bytes = transit.buffer[start:stop]  # [path.nbytes] -> [about 1 / packets of it]
            if source == self._communicator.rank:
                sends.append((packet_bytes, target))
            elif target == self._communicator.rank:
                recvs.append((packet_bytes, source))
        return Transfers(
            self._communicator,
            sends=sends,
            recvs=recvs,
            tag=packet_tag(self._exchange_tag, leg, packet),
            label=lambda peer, sent: self._name(leg, peer, sent),
            lane=self._lane,
        )

    def _name(self, leg: int, peer: int, sent: bool) -> str:
        """Return the name of the packets between this rank and `peer` on a leg."""
        own = self._communicator.rank
        ends = (own, peer) if sent else (peer, own)
        transfers = dict.fromkeys(
            f"rank {transit.transfer.source} sends to rank {transit.transfer.target}"
            for transit in self._transit
            if transit.ends(leg) == ends
        )
        return f"pieces of what {', '.join(transfers)}{self._within}"


def _unpacked(
    parcel: torch.Tensor, likes: Sequence[torch.Tensor], tokens: int
) -> tuple[torch.Tensor, ...]:
    """Return views [tokens, ...] of the tensors that lie one behind the other in a parcel.

    parcel: uint8 [bytes of the transfer].
    likes: tensors [any rows, ...] with the other dimensions and the dtype of each view.
    """
    views = []
    start = 0
    for like in likes:
        shape = torch.Size((tokens, *like.shape[1:]))
        nbytes = shape.numel() * like.element_size()
        # uint8 [nbytes] -> [elements] of the dtype -> [tokens, ...]
        view = parcel[start : start + nbytes].view(like.dtype).view(shape)
        views.append(view)
        start += aligned(nbytes)
    assert start == len(parcel), f"tensors of {start} bytes for a transfer of {len(parcel)}"
    return tuple(views)
