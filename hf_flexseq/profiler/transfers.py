"""The transfers of one layer without the layer, each made once and then called again and again.

    AllToAllRun   the exchanges of one layer in Ulysses groups
    ExchangeRun   the exchanges of one layer with experts on several ranks
    RingRun       the transfers of one layer in rings
    HopRun        one transfer between two nodes, by all their ranks or by one pair
    HostCopyRun   one copy between a rank's device and the memory of its host

What tensors contain does not matter to the seconds, so transfers move zeros. A rank without a part
in a run calls it, too, and does nothing.
"""

from collections.abc import Sequence

import torch

from hf_flexseq.cost.launches import EXCHANGES
from hf_flexseq.cost.rings import RING_PASSES
from hf_flexseq.distributed.all_to_all import all_to_all
from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.distributed.transport import RankGroup


def own_group(communicator: Communicator, groups: Sequence[range]) -> range:
    """Return the ranks of the group that this rank is in; none if it is in none of them."""
    for ranks in groups:
        if communicator.rank in ranks:
            return ranks
    return range(0)


class AllToAllRun:
    """Exchanges of one layer in Ulysses groups: to heads and back, forward and backward."""

    def __init__(
        self, communicator: Communicator, ranks: range, bytes_moved: int, device: torch.device
    ) -> None:
        """ranks: of this rank's group. bytes_moved: by a rank in all its exchanges."""
        self.communicator = communicator
        self.ranks = ranks
        part_bytes = max(1, bytes_moved // EXCHANGES // max(1, len(ranks)))
        self.sizes = [part_bytes] * len(ranks)  # by rank of the group
        self.sent = torch.zeros(sum(self.sizes), dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        if not self.ranks:
            return
        received = torch.empty_like(self.sent)
        for _ in range(EXCHANGES):
            all_to_all(
                self.communicator, self.ranks, self.sent, received, self.sizes, self.sizes
            ).wait()


class ExchangeRun:
    """Exchanges of one layer with its experts on the ranks of an expert group: rows to them and
    back, forward and backward."""

    def __init__(self, group: RankGroup, bytes_moved: int, device: torch.device) -> None:
        """group: of this rank. bytes_moved: by a rank in all its exchanges, to itself, too."""
        self.group = group
        part_bytes = max(1, bytes_moved // EXCHANGES // len(group.ranks))
        self.sizes = [part_bytes] * len(group.ranks)  # by rank of the group
        self.sent = torch.zeros(sum(self.sizes), dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        received = torch.empty_like(self.sent)
        for _ in range(EXCHANGES):
            self.group.all_to_all(received, self.sent, self.sizes, self.sizes).wait()


class RingRun:
    """Transfers of one layer in rings, each to the next rank of the group.

    Keys and values go around in the forward and again in the backward, and so do their gradients.
    Each of these passes takes as many transfers as there are other ranks.
    """

    def __init__(
        self, communicator: Communicator, ranks: range, bytes_moved: int, device: torch.device
    ) -> None:
        """ranks: of this rank's group. bytes_moved: by a rank in all its transfers."""
        self.communicator = communicator
        self.ranks = ranks
        self.transfers = RING_PASSES * (len(ranks) - 1)
        nbytes = max(1, bytes_moved // max(1, self.transfers))
        self.outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.incoming = torch.empty_like(self.outgoing)

    def __call__(self) -> None:
        for _ in range(self.transfers):
            self.post().wait()

    def post(self) -> Transfers:
        """Begin one transfer of `outgoing` to the next rank and return it."""
        degree = len(self.ranks)
        index = self.communicator.rank - self.ranks[0]
        next_rank = self.ranks[(index + 1) % degree]
        previous_rank = self.ranks[(index - 1) % degree]
        return Transfers(
            self.communicator,
            sends=[(self.outgoing, next_rank)],
            recvs=[(self.incoming, previous_rank)],
        )


class HopRun:
    """A transfer from each rank of node 0, or its first alone, to its counterpart on node 1."""

    def __init__(
        self, communicator: Communicator, *, lone: bool, bytes_moved: int, device: torch.device
    ) -> None:
        """lone: True if only the first rank sends. bytes_moved: by each transfer."""
        self.communicator = communicator
        buffer = torch.zeros(bytes_moved, dtype=torch.uint8, device=device)
        per_node = communicator.topology.ranks_per_node
        node, index = divmod(communicator.rank, per_node)
        has_part = index == 0 or not lone
        self.sends: list[tuple[torch.Tensor, int]] = []  # (buffer, peer)
        self.recvs: list[tuple[torch.Tensor, int]] = []
        if has_part and node == 0:
            self.sends.append((buffer, communicator.rank + per_node))
        if has_part and node == 1:
            self.recvs.append((buffer, communicator.rank - per_node))

    def __call__(self) -> None:
        Transfers(self.communicator, sends=self.sends, recvs=self.recvs).wait()


class HostCopyRun:
    """One copy between this rank's device and the memory of its host, which is pinned where the
    device is a GPU."""

    def __init__(self, bytes_moved: int, device: torch.device, *, out: bool) -> None:
        """out: True from the device to the host."""
        is_pinned = device.type == "cuda"
        host = torch.zeros(bytes_moved, dtype=torch.uint8, pin_memory=is_pinned)
        own = torch.zeros(bytes_moved, dtype=torch.uint8, device=device)
        self.source, self.target = (own, host) if out else (host, own)

    def __call__(self) -> None:
        self.target.copy_(self.source, non_blocking=True)
