"""Exchanges of values between CPUs, over a gloo group of all ranks.

When a collective fails all of its ranks see that, and none is told which rank caused it. Then
`GlooCpuGroup.roll_call` finds out: all ranks that are left send each other a message, and those
that do not answer are missing.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hf_flexseq.distributed.own_work import OwnWork
from hf_flexseq.distributed.transport import CpuGroup, LostRank
from hf_flexseq.program.tags import MEETING, ROLL_CALL, TOKENS

# What gloo's errors have in them: the path of its sources, or this.
_SIGNS_OF_GLOO = ("/gloo/", "pair closure")


def _is_of_transfer(error: RuntimeError) -> bool:
    """Return True if an error is one of a transfer."""
    if isinstance(error, dist.DistError):
        return True
    return any(sign in str(error) for sign in _SIGNS_OF_GLOO)


# Among so few ranks a value of so many bytes travels in the meeting's own messages.
INLINE_RANKS = 16
INLINE_BYTES = 1024
ROLL_CALL_S = 2  # seconds that a rank has to answer
LEAST_WAIT_S = 0.1  # seconds to wait for an answer when the time of the roll call is over

COUNT = np.dtype("<i8")  # in front of a message: bytes of the value


class GlooCpuGroup(CpuGroup):
    """Exchanges on the CPU over a gloo group of all ranks.

    Every exchange, except of rows, begins with a meeting: each rank sends every other one a
    separate message, with the size of its value and, among few ranks, a short value itself. So
    all others know the number of a rank that does not come. Values too long for a message travel
    in a collective, where ranks wait for each other in a chain and cannot tell which one broke
    it.
    """

    def __init__(self, timeout: timedelta) -> None:
        """Make the group. Collective over the world."""
        super().__init__(timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._own_work: OwnWork | None = None  # from the first on
        # bytes of a value that a meeting's message has room for
        self._room = INLINE_BYTES if self._world_size <= INLINE_RANKS else 0

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """See `CpuGroup.gather_bytes`."""
        met = self._meet(data)
        longest = max(met.counts)
        if longest <= self._room:
            return [met.value(rank) for rank in range(self._world_size)]
        # padded to the longest: [longest] -> one [longest] per rank
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        rows = [torch.empty_like(padded) for _ in met.counts]
        with self._naming_phase():
            dist.all_gather(rows, padded, group=self._group)
        return [row.numpy()[:n].tobytes() for row, n in zip(rows, met.counts, strict=True)]

    def broadcast_bytes(self, data: bytes) -> bytes:
        """See `CpuGroup.broadcast_bytes`."""
        if self._rank != 0:
            data = b""  # what other ranks have does not travel
        met = self._meet(data)
        if met.counts[0] <= self._room:
            return met.value(0)
        sent = torch.empty(met.counts[0], dtype=torch.uint8)
        if self._rank == 0:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self._naming_phase():
            dist.broadcast(sent, src=0, group=self._group)
        return sent.numpy().tobytes()

    def exchange_rows(
        self, rows: torch.Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]
    ) -> torch.Tensor:
        """See `CpuGroup.exchange_rows`.

        By messages, between those ranks alone that have rows for each other: whoever waits for a
        rank that is lost can name it, which is not so in an all-to-all.
        """
        parts = rows.split(list(sent_counts))  # to each rank [its rows, width]
        received = rows.new_empty(sum(received_counts), rows.shape[1])
        places = received.split(list(received_counts))  # from each rank [its rows, width]
        assert places[self._rank].shape == parts[self._rank].shape, "this rank's own rows differ"
        places[self._rank].copy_(parts[self._rank])
        self._swap(TOKENS, sent=parts, received=places)
        return received

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `CpuGroup.all_reduce`."""
        self.barrier()
        with self._naming_phase():
            dist.all_reduce(tensor, group=self._group)

    def own_work(self, what: str) -> AbstractContextManager[None]:
        """See `CpuGroup.own_work`."""
        if self._own_work is None:
            # Every group counts its works for itself.
            store = dist.PrefixStore(
                self._group.group_name, dist.distributed_c10d._get_default_store()
            )
            self._own_work = OwnWork(store, self._rank, self._world_size)
        return self._own_work.of_rank(what)

    @contextmanager
    def naming_lost(self) -> Iterator[None]:
        """See `CpuGroup.naming_lost`."""
        try:
            yield
        except LostRank:
            raise
        except RuntimeError as error:
            if not _is_of_transfer(error):
                raise
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            missing = self.roll_call(others)
            if not missing:
                raise
            raise self._lost(missing, error) from error

    def roll_call(self, ranks: Sequence[int]) -> list[int]:
        """Return the members of `ranks` that do not answer within `ROLL_CALL_S`."""
        deadline = time.monotonic() + ROLL_CALL_S
        calls = {rank: self._call(rank) for rank in ranks}
        return [rank for rank, works in calls.items() if not _answered(works, deadline)]

    def _call(self, rank: int) -> list[dist.Work]:
        """Post a message [1] to a rank and one from it; none when the rank is known to be gone."""
        try:
            return [
                dist.irecv(torch.zeros(1), rank, group=self._group, tag=ROLL_CALL),
                dist.isend(torch.zeros(1), rank, group=self._group, tag=ROLL_CALL),
            ]
        except RuntimeError:
            return []

    # ---- how

    def _meet(self, data: bytes) -> "_Meeting":
        """Send every rank the size of `data`, and `data` itself if it fits into the message.
        Returns the messages of all ranks.

        Raises LostRank that names the ranks which are gone, or the first one that is silent.
        """
        messages = np.zeros((self._world_size, COUNT.itemsize + self._room), dtype=np.uint8)
        own = messages[self._rank]
        own[: COUNT.itemsize].view(COUNT)[0] = len(data)
        if len(data) <= self._room:
            own[COUNT.itemsize :][: len(data)] = np.frombuffer(data, np.uint8)
        by_rank = torch.from_numpy(messages).unbind()  # world x [bytes of a message]
        self._swap(MEETING, sent=[by_rank[self._rank]] * self._world_size, received=by_rank)
        return _Meeting(messages)

    def _swap(
        self, tag: int, *, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> None:
        """Send a tensor to every other rank and receive one from it; empty ones do not travel.

        sent, received: by rank, contiguous. Raises LostRank as `_meet` does.
        """
        messages = []  # (peer, its message)
        missing: list[int] = []
        why: RuntimeError | None = None
        for peer in range(self._world_size):
            if peer == self._rank:
                continue
            try:
                if received[peer].numel():
                    messages.append((peer, dist.irecv(received[peer], peer, self._group, tag)))
                if sent[peer].numel():
                    messages.append((peer, dist.isend(sent[peer], peer, self._group, tag)))
            except RuntimeError as error:  # it is known to be gone
                missing.append(peer)
                why = error
        # Wait for all others, who want what this rank sends before it ends with an error.
        for peer, message in messages:
            try:
                message.wait()
            except RuntimeError as error:
                # One that is too late makes gloo fail all later ones, whose ranks may be there.
                if why is None:
                    missing.append(peer)
                    why = error
        if why is not None:
            raise self._lost(missing, why) from why

    def _lost(self, missing: Sequence[int], why: RuntimeError) -> LostRank:
        """Return the error that names ranks which did not answer."""
        ranks = ", ".join(f"rank {rank}" for rank in missing)
        return LostRank(f"rank {self._rank}: {ranks} did not answer in {self.phase}: {why}")

    @contextmanager
    def _naming_phase(self) -> Iterator[None]:
        """Name the phase in the error of a rank that is lost after all have met."""
        try:
            yield
        except RuntimeError as error:
            raise LostRank(
                f"rank {self._rank}: a rank was lost in {self.phase}: {error}"
            ) from error


class _Meeting:
    """Messages of all ranks in a meeting."""

    __slots__ = ("_messages", "counts")

    def __init__(self, messages: NDArray[np.uint8]) -> None:
        """messages: [world, bytes of a message]."""
        self._messages = messages
        self.counts: list[int] = messages[:, : COUNT.itemsize].copy().view(COUNT)[:, 0].tolist()
        """Bytes of each rank's value."""

    def value(self, rank: int) -> bytes:
        """Return the value of a rank, for which there was room."""
        return self._messages[rank, COUNT.itemsize :][: self.counts[rank]].tobytes()


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
