"""All-to-all with uneven parts, over a contiguous range of ranks."""

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist

from hf_flexseq.distributed.communicator import Communicator, Label, Transfers, unnamed

# the tag, far from all others, and how long a rank may take to answer
ROLL_CALL, ROLL_CALL_S = (1 << 31) - 1, 2


class AllToAll:
    """An exchange that is under way; `wait` ends it, exactly once."""

    __slots__ = ("_moving", "_outgoing", "_received")

    def __init__(
        self,
        moving: "Transfers | Collective",
        outgoing: torch.Tensor,
        received: list[torch.Tensor],
    ) -> None:
        self._moving, self._received = moving, received
        self._outgoing = outgoing  # alive until it has been sent

    def wait(self) -> list[torch.Tensor]:
        """What each of the ranks sent to this one."""
        self._moving.wait()
        self._outgoing = None
        return self._received


class Collective:
    """A collective that is under way on a process group. When it fails a roll call says who is
    missing."""

    __slots__ = ("_communicator", "_label", "_others", "_work")

    def __init__(
        self, work: dist.Work, communicator: Communicator, others: Sequence[int], label: Label
    ) -> None:
        self._work, self._communicator, self._others, self._label = (
            work,
            communicator,
            others,
            label,
        )

    def wait(self) -> None:
        """Raises RuntimeError naming the peers and the message when it fails or takes too long."""
        try:
            self._work.wait()
        except RuntimeError as error:
            rank, message = self._communicator.rank, self._label(self._others[0], False)
            missing = roll_call(self._communicator, self._others) or self._others
            raise RuntimeError(
                f"rank {rank} could not exchange with ranks {missing} {message}: {error}"
            ) from error


def roll_call(communicator: Communicator, ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that do not call each other in `ROLL_CALL_S`, after a collective has failed
    for all of them."""
    deadline = time.monotonic() + ROLL_CALL_S
    calls = {rank: _call(communicator, rank) for rank in ranks}
    return [rank for rank, works in calls.items() if not _answered(works, deadline)]


def _call(communicator: Communicator, rank: int) -> list[dist.Work]:
    """Messages to and from a rank; none when it is known to be gone."""
    group = communicator.parent
    try:
        return [
            post(torch.zeros(1), rank, group=group, tag=ROLL_CALL)
            for post in (dist.irecv, dist.isend)
        ]
    except RuntimeError:
        return []


def _answered(works: Sequence[dist.Work], deadline: float) -> bool:
    try:
        return bool(works) and all(
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.1))) for work in works
        )
    except RuntimeError:
        return False


def all_to_all(
    communicator: Communicator,
    ranks: Sequence[int],
    parts: Sequence[torch.Tensor],
    numels: Sequence[int],
    *,
    tag: int = 0,
    label: Label = unnamed,
) -> AllToAll:
    """Post the transfer of `parts[i]` to `ranks[i]`, and of what each of them sends to this rank.

    parts: one flat tensor per rank, all of one dtype. numels: how many elements to expect from
    each rank. One collective where the topology has a process group for these ranks,
    point-to-point transfers elsewhere.
    """
    received = parts[0].new_empty(sum(numels))
    outgoing, sizes = torch.cat(list(parts)), [p.numel() for p in parts]
    results = list(received.split(list(numels)))
    block = communicator.blocks.get((ranks[0], ranks[-1] + 1))
    if block is None:
        own = communicator.rank - ranks[0]
        sent = outgoing.split(sizes)
        results[own].copy_(sent[own])
        others = [i for i in range(len(ranks)) if i != own]
        sends, recvs = ([(parts[i], ranks[i]) for i in others] for parts in (sent, results))
        moving = Transfers(communicator, sends=sends, recvs=recvs, tag=tag, label=label)
    else:
        work = dist.all_to_all_single(
            received, outgoing, list(numels), sizes, group=block, async_op=True
        )
        moving = Collective(
            work, communicator, [r for r in ranks if r != communicator.rank], label
        )
    return AllToAll(moving, outgoing, results)


def exchange_rows(
    communicator: Communicator, rows: torch.Tensor, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Exchange columns of a CPU tensor over the whole world, by the control group.

    rows: [fields, columns]; the first sizes[0] columns go to rank 0, the next sizes[1] to rank 1,
    and so on. Returns one [fields, columns_from_that_rank] tensor per rank.
    """
    if communicator.control is None:
        return [rows]
    fields = rows.shape[0]
    incoming = torch.empty(communicator.world_size, dtype=torch.int64)
    dist.all_to_all_single(
        incoming, torch.tensor(sizes, dtype=torch.int64), group=communicator.control
    )
    received = rows.new_empty(int(incoming.sum()) * fields)
    outgoing = torch.cat([part.reshape(-1) for part in rows.split(list(sizes), dim=1)])
    counts = [fields * n for n in incoming.tolist()]
    dist.all_to_all_single(
        received, outgoing, counts, [fields * n for n in sizes], group=communicator.control
    )
    stops = list(accumulate(counts))
    return [
        received[stop - n : stop].view(fields, -1) for stop, n in zip(stops, counts, strict=True)
    ]
