"""All-to-all with uneven parts, over a contiguous range of ranks.

`all_to_all` moves tensors of attention: by one collective where the topology has a process group
for the ranks, by point-to-point transfers elsewhere. `exchange_rows` moves token ids on the CPU,
over the whole world.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist

from hf_flexseq.distributed.communicator import Communicator, Label, Transfers, unnamed
from hf_flexseq.distributed.tags import ROLL_CALL, UNTAGGED

ROLL_CALL_S = 2  # seconds that a rank has to answer a roll call
LEAST_WAIT_S = 0.1  # seconds to wait for an answer when the time of the roll call is over


class AllToAll:
    """An all-to-all that is under way; `wait` ends it, exactly once."""

    __slots__ = ("_moving", "_outgoing", "_received")

    def __init__(
        self,
        moving: "Transfers | Collective",
        outgoing: torch.Tensor,
        received: list[torch.Tensor],
    ) -> None:
        """outgoing: flat [elements]. received: flat [elements], by rank, filled during `wait`."""
        self._moving = moving
        self._outgoing: torch.Tensor | None = outgoing  # alive until it has been sent
        self._received = received

    def wait(self) -> list[torch.Tensor]:
        """Return what each of the ranks has sent to this one, flat [elements], by rank."""
        self._moving.wait()
        self._outgoing = None
        return self._received


class Collective:
    """A collective that is under way on a process group.

    All ranks of the group see it fail, whoever caused it. Then a roll call finds who is missing.
    """

    __slots__ = ("_communicator", "_label", "_others", "_work")

    def __init__(
        self, work: dist.Work, communicator: Communicator, others: Sequence[int], label: Label
    ) -> None:
        """others: global ranks of the group without this one."""
        self._work = work
        self._communicator = communicator
        self._others = others
        self._label = label

    def wait(self) -> None:
        """Wait until the collective is over.

        Raises RuntimeError naming the peers and the message when it fails or takes too long.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            rank = self._communicator.rank
            message = self._label(self._others[0], False)
            missing = roll_call(self._communicator, self._others) or self._others
            raise RuntimeError(
                f"rank {rank} could not exchange with ranks {missing} {message}: {error}"
            ) from error


def roll_call(communicator: Communicator, ranks: Sequence[int]) -> list[int]:
    """Return the ranks of `ranks` that do not answer a call within `ROLL_CALL_S`.

    For use after a collective has failed: all ranks that are left call each other then.
    """
    deadline = time.monotonic() + ROLL_CALL_S
    calls = {rank: _call(communicator, rank) for rank in ranks}
    return [rank for rank, works in calls.items() if not _answered(works, deadline)]


def _call(communicator: Communicator, rank: int) -> list[dist.Work]:
    """Post a message [1] to a rank and one from it; none when the rank is known to be gone."""
    group = communicator.parent
    try:
        return [
            dist.irecv(torch.zeros(1), rank, group=group, tag=ROLL_CALL),
            dist.isend(torch.zeros(1), rank, group=group, tag=ROLL_CALL),
        ]
    except RuntimeError:
        return []


def _answered(works: Sequence[dist.Work], deadline: float) -> bool:
    """Return whether a call has come through by `deadline`, a time of `time.monotonic`."""
    if not works:
        return False
    try:
        for work in works:
            left_s = max(deadline - time.monotonic(), LEAST_WAIT_S)
            if not work.wait(timedelta(seconds=left_s)):
                return False
    except RuntimeError:
        return False
    return True


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
    sizes = [part.numel() for part in parts]
    received = parts[0].new_empty(sum(numels))
    results = list(received.split(list(numels)))  # views: [all elements] -> [from rank i], by i
    block = communicator.blocks.get((ranks[0], ranks[-1] + 1))
    moving: Transfers | Collective
    if block is None:
        outgoing_parts = outgoing.split(sizes)
        own = communicator.rank - ranks[0]
        results[own].copy_(outgoing_parts[own])
        sends = []
        recvs = []
        for index, rank in enumerate(ranks):
            if index != own:
                sends.append((outgoing_parts[index], rank))
                recvs.append((results[index], rank))
        moving = Transfers(communicator, sends=sends, recvs=recvs, tag=tag, label=label)
    else:
        work = dist.all_to_all_single(
            received, outgoing, list(numels), sizes, group=block, async_op=True
        )
        others = [rank for rank in ranks if rank != communicator.rank]
        moving = Collective(work, communicator, others, label)
    return AllToAll(moving, outgoing, results)


def exchange_rows(
    communicator: Communicator, rows: torch.Tensor, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Exchange columns of a CPU tensor over the control group. Collective over the world.

    rows: [fields, columns]; the first sizes[0] columns go to rank 0, the next sizes[1] to rank 1,
        and so on.
    Returns one [fields, columns from that rank] per rank.
    """
    if communicator.control is None:
        return [rows]
    fields = rows.shape[0]

    # 1. how many columns come from each rank
    sizes_out = torch.tensor(sizes, dtype=torch.int64)  # [world]: columns to rank i
    sizes_in = torch.empty(communicator.world_size, dtype=torch.int64)
    dist.all_to_all_single(sizes_in, sizes_out, group=communicator.control)

    # 2. the columns, flat: [fields * columns to rank i], by i -> [fields * columns from it], by i
    parts = [part.reshape(-1) for part in rows.split(list(sizes), dim=1)]
    outgoing = torch.cat(parts)
    received = rows.new_empty(int(sizes_in.sum()) * fields)
    counts_in = [fields * n for n in sizes_in.tolist()]
    counts_out = [fields * n for n in sizes]
    dist.all_to_all_single(received, outgoing, counts_in, counts_out, group=communicator.control)

    # 3. flat -> [fields, columns] per rank
    results = []
    for stop, count in zip(accumulate(counts_in), counts_in, strict=True):
        results.append(received[stop - count : stop].view(fields, -1))
    return results
