"""All-to-all with uneven parts, over a contiguous range of ranks: by one collective where the
communicator has a group for the ranks, by messages elsewhere."""

from collections.abc import Sequence

import torch

from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.distributed.tags import UNTAGGED
from hf_flexseq.distributed.transport import Label, Pending, unnamed


class AllToAll:
    """An all-to-all that is under way; `wait` ends it, exactly once."""

    __slots__ = ("_pending", "_received")

    def __init__(self, pending: Pending, received: list[torch.Tensor]) -> None:
        """received: flat [elements], by rank, filled during `wait`."""
        self._pending = pending
        self._received = received

    def wait(self) -> list[torch.Tensor]:
        """Return what each of the ranks has sent to this one, flat [elements], by rank."""
        self._pending.wait()
        return self._received


def all_to_all(
    communicator: Communicator,
    ranks: Sequence[int],
    parts: Sequence[torch.Tensor],
    numels: Sequence[int],
    *,
    tag: int = UNTAGGED,
    label: Label = unnamed,
) -> AllToAll:
    """Post the transfer of `parts[i]` to `ranks[i]` and of what that rank sends here.

    ranks: contiguous global ranks, this one among them.
    parts: one flat tensor [elements] per rank, all of one dtype.
    numels: elements to expect from each rank.
    On each rank: parts [elements to rank i], by i -> received [elements from rank i], by i.
    """
    outgoing = torch.cat(list(parts))  # [elements to rank i], by i -> [all elements]
    counts = [part.numel() for part in parts]
    received = parts[0].new_empty(sum(numels))
    results = list(received.split(list(numels)))  # views: [all elements] -> [from rank i], by i
    block = communicator.blocks.get((ranks[0], ranks[-1] + 1))
    if block is not None:
        pending = block.all_to_all(received, outgoing, numels, counts, label=label)
        return AllToAll(pending, results)

    outgoing_parts = outgoing.split(counts)
    own = communicator.rank - ranks[0]
    results[own].copy_(outgoing_parts[own])
    sends = []
    recvs = []
    for index, rank in enumerate(ranks):
        if index != own:
            sends.append((outgoing_parts[index], rank))
            recvs.append((results[index], rank))
    transfers = Transfers(
        communicator, sends=sends, recvs=recvs, tag=tag, label=label, scratch=True
    )
    return AllToAll(transfers, results)
