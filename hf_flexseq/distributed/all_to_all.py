"""All-to-all with uneven parts, over a contiguous range of ranks."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from hf_flexseq.distributed.communicator import Communicator, Transfers


class AllToAll:
    """An exchange that is under way; `wait` ends it, exactly once."""

    __slots__ = ("_moving", "_outgoing", "_received")

    def __init__(self, moving: "Transfers | dist.Work", outgoing: torch.Tensor, received: list[torch.Tensor]) -> None:
        self._moving, self._received = moving, received
        self._outgoing = outgoing  # alive until it has been sent

    def wait(self) -> list[torch.Tensor]:
        """What each of the ranks sent to this one."""
        self._moving.wait()
        self._outgoing = None
        return self._received


def all_to_all(
    communicator: Communicator, ranks: Sequence[int], parts: Sequence[torch.Tensor], numels: Sequence[int]
) -> AllToAll:
    """Post the transfer of `parts[i]` to `ranks[i]`, and of what each of them sends to this rank.

    parts: one flat tensor per rank, all of one dtype. numels: how many elements to expect from each rank.
    One collective where the topology has a process group for these ranks, point-to-point transfers elsewhere.
    """
    received = parts[0].new_empty(sum(numels))
    outgoing, sizes = torch.cat(list(parts)), [p.numel() for p in parts]
    results = list(received.split(list(numels)))
    block = communicator.blocks.get((ranks[0], ranks[-1] + 1))
    if block is None:
        moving = _point_to_point(communicator, ranks, outgoing.split(sizes), results)
    else:
        moving = dist.all_to_all_single(received, outgoing, list(numels), sizes, group=block, async_op=True)
    return AllToAll(moving, outgoing, results)


def _point_to_point(
    communicator: Communicator, ranks: Sequence[int], parts: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> Transfers:
    own = communicator.rank - ranks[0]
    results[own].copy_(parts[own])
    others = [i for i in range(len(ranks)) if i != own]
    return Transfers(
        communicator,
        sends=[(parts[i], ranks[i]) for i in others],
        recvs=[(results[i], ranks[i]) for i in others],
    )


def exchange_rows(communicator: Communicator, rows: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Exchange columns of a CPU tensor over the whole world, by the control group.

    rows: [fields, columns]; the first sizes[0] columns go to rank 0, the next sizes[1] to rank 1, and so on.
    Returns one [fields, columns_from_that_rank] tensor per rank.
    """
    if communicator.control is None:
        return [rows]
    fields = rows.shape[0]
    incoming = torch.empty(communicator.world_size, dtype=torch.int64)
    dist.all_to_all_single(incoming, torch.tensor(sizes, dtype=torch.int64), group=communicator.control)
    received = rows.new_empty(int(incoming.sum()) * fields)
    outgoing = torch.cat([part.reshape(-1) for part in rows.split(list(sizes), dim=1)])
    counts = [fields * n for n in incoming.tolist()]
    dist.all_to_all_single(received, outgoing, counts, [fields * n for n in sizes], group=communicator.control)
    stops = list(accumulate(counts))
    return [received[stop - n : stop].view(fields, -1) for stop, n in zip(stops, counts, strict=True)]
