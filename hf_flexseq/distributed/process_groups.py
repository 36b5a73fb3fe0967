"""What transports over torch.distributed have in common: groups, posts, and exchanges on the host.

Groups are made once per process and kept as long as the job's own group lives, so that any number
of trainers in one process share them (`connect.py`).
"""

import json
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hf_flexseq.distributed.roll_call import roll_call
from hf_flexseq.distributed.transport import (
    Label,
    LostRank,
    Message,
    Parts,
    as_tuples,
    failure,
    own_part,
    unnamed,
)
from hf_flexseq.program.tags import MEETING, TOKENS

SPARE_DESCRIPTORS = 512  # for everything else that a process opens


def reserve_descriptors(sockets: int) -> None:
    """Make sure that this process may open so many sockets more.

    Raises ValueError, naming `ulimit -n`, where the system does not allow that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sockets + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"a process needs {needed:,} descriptors, with a socket to every rank, and may open "
            f"{hard:,}: raise `ulimit -n`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def new_group(
    parts: Sequence[Sequence[int]], backend: str, timeout: timedelta, host: "GlooHost"
) -> dist.ProcessGroup | None:
    """Make a process group for each of some disjoint sets of ranks, and return this rank's, if it
    has one. Collective over the world.

    A rank makes one group, whatever the number of sets, so that its work does not grow with the
    world. A rank in none of the sets makes one of itself alone, for two reasons. torch names a
    group by the number of groups that a process is in, which all members must agree on. And where
    the job's group is bound to a device, a group is split off from it, which takes all ranks at
    once. Where others have put ranks into different numbers of groups, all ranks make all sets.
    Rejected: `split_group`, which gives every part all backends of the job, so that each lane
    would have sockets between all of its ranks, too.
    """
    rank = dist.get_rank()
    own = own_part(parts, rank)
    if own is not None and len(own) == dist.get_world_size():
        return dist.new_group(backend=backend, timeout=timeout)
    group: dist.ProcessGroup
    counts = host.gather_ints([len(dist.distributed_c10d._world.pg_names)])  # by rank
    if all(count == counts[0] for count in counts):
        group = dist.new_group(
            list(own or (rank,)), backend=backend, timeout=timeout, use_local_synchronization=True
        )
        return None if own is None else group
    for part in parts:
        made = dist.new_group(sorted(part), backend=backend, timeout=timeout)
        if rank in part:
            group = made
    return None if own is None else group


def post_batch(
    group: dist.ProcessGroup,
    sends: Sequence[Message],
    recvs: Sequence[Message],
    label: Label,
) -> "PendingTransfers":
    """Post all messages as one batch, also a single one.

    A single message is batched, too: unbatched ones make NCCL connect a communicator of their own.
    """
    ops = []
    for message in recvs:
        ops.append(dist.P2POp(dist.irecv, message.tensor, message.peer, group, message.tag))
    for message in sends:
        ops.append(dist.P2POp(dist.isend, message.tensor, message.peer, group, message.tag))
    try:
        works = dist.batch_isend_irecv(ops)
    except RuntimeError as error:  # a peer is known to be gone
        raise failure(dist.get_rank(), sends, recvs, label, error) from error
    return PendingTransfers(works, sends, recvs, label)


def post_one_by_one(
    group: dist.ProcessGroup,
    sends: Sequence[Message],
    recvs: Sequence[Message],
    label: Label,
) -> "PendingTransfers":
    """Post each message by itself, as gloo carries them out.

    Receives come first: on a slow link gloo otherwise serialises the two directions. Where a peer
    is known to be gone, the error names its message alone: a batch of all messages would also name
    the peers that are there, and none of them more than another.
    """
    rank = dist.get_rank()
    works = []
    for message in recvs:
        try:
            works.append(dist.irecv(message.tensor, message.peer, group, message.tag))
        except RuntimeError as error:
            raise failure(rank, (), (message,), label, error) from error
    for message in sends:
        try:
            works.append(dist.isend(message.tensor, message.peer, group, message.tag))
        except RuntimeError as error:
            raise failure(rank, (message,), (), label, error) from error
    return PendingTransfers(works, sends, recvs, label)


class PendingTransfers:
    """A batch of transfers that is under way. Keeps its tensors alive until it is over."""

    __slots__ = ("_label", "_recvs", "_sends", "_works")

    def __init__(
        self,
        works: list[dist.Work],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        label: Label,
    ) -> None:
        """works: one for each receive and then for each send, or one for all of them."""
        self._works: list[dist.Work] | None = works  # None once waited for
        self._sends = tuple(sends)
        self._recvs = tuple(recvs)
        self._label = label

    def wait(self) -> None:
        """See `Pending.wait`."""
        assert self._works is not None, "these transfers were already waited for"
        for index, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(index, error) from error
        self._works = None
        self._sends = ()
        self._recvs = ()

    def _failure(self, index: int, error: RuntimeError) -> RuntimeError:
        """Return the error of the work of this index."""
        assert self._works is not None, "these transfers were already waited for"
        sends = self._sends
        recvs = self._recvs
        if len(self._works) == len(sends) + len(recvs):
            is_send = index >= len(recvs)
            sends = sends[index - len(recvs) :][:1] if is_send else ()
            recvs = () if is_send else recvs[index : index + 1]
        return failure(dist.get_rank(), sends, recvs, self._label, error)


class OpenGroups:
    """The groups of one transport for collectives, each made once."""

    __slots__ = ("_groups", "_host", "_make")

    def __init__(
        self,
        make: Callable[[Sequence[Sequence[int]]], dist.ProcessGroup | None],
        host: "GlooHost",
    ) -> None:
        """make: makes this rank's process group of disjoint sets of ranks. Collective."""
        self._make = make
        self._host = host
        self._groups: dict[Parts, ProcessGroupRanks | None] = {}

    def open(self, parts: Sequence[Sequence[int]]) -> "ProcessGroupRanks | None":
        """See `Transport.open_group`."""
        key = as_tuples(parts)
        if key not in self._groups:
            group = self._make(parts)
            self._groups[key] = None if group is None else ProcessGroupRanks(group, self._host)
        return self._groups[key]


class ProcessGroupRanks:
    """Collectives over a process group of torch.distributed."""

    __slots__ = ("_host", "process_group", "ranks")

    def __init__(self, process_group: dist.ProcessGroup, host: "GlooHost") -> None:
        """host: finds who is missing when a collective fails."""
        self.process_group = process_group
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self._host = host

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `RankGroup.all_reduce`."""
        with self._naming_missing("a sum"):
            dist.all_reduce(tensor, group=self.process_group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `RankGroup.broadcast`."""
        with self._naming_missing("a broadcast"):
            dist.broadcast(tensor, group_src=0, group=self.process_group)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
        *,
        label: Label = unnamed,
    ) -> "PendingCollective":
        """See `RankGroup.all_to_all`."""
        work = dist.all_to_all_single(
            received,
            sent,
            list(received_counts),
            list(sent_counts),
            group=self.process_group,
            async_op=True,
        )
        return PendingCollective(work, self, sent, label)

    @contextmanager
    def _naming_missing(self, what: str) -> Iterator[None]:
        """Name who does not answer in the error of a collective."""
        try:
            yield
        except RuntimeError as error:
            raise LostRank(
                f"rank {dist.get_rank()} could not exchange with ranks {self.missing()} {what}: "
                f"{error}"
            ) from error

    def missing(self) -> list[int]:
        """Return the other ranks of the group that do not answer; all where every one does."""
        others = [rank for rank in self.ranks if rank != dist.get_rank()]
        return self._host.roll_call(others) or others


class PendingCollective:
    """A collective that is under way.

    All ranks of the group see it fail, whoever caused it. Then a roll call finds who is missing.
    """

    __slots__ = ("_group", "_label", "_sent", "_work")

    def __init__(
        self, work: dist.Work, group: ProcessGroupRanks, sent: torch.Tensor, label: Label
    ) -> None:
        """sent: kept alive until the collective is over."""
        self._work = work
        self._group = group
        self._sent: torch.Tensor | None = sent
        self._label = label

    def wait(self) -> None:
        """See `Pending.wait`."""
        assert self._sent is not None, "this collective was already waited for"
        try:
            self._work.wait()
        except RuntimeError as error:
            missing = self._group.missing()
            raise LostRank(
                f"rank {dist.get_rank()} could not exchange with ranks {missing} "
                f"{self._label(missing[0], False)}: {error}"
            ) from error
        self._sent = None


# ---- the host

# What gloo's errors have in them: the path of its sources, or this.
_SIGNS_OF_GLOO = ("/gloo/", "pair closure")


def _is_of_transfer(error: RuntimeError) -> bool:
    """Tell if an error is one of a transfer, whoever has called it."""
    if isinstance(error, dist.DistError):
        return True
    return any(sign in str(error) for sign in _SIGNS_OF_GLOO)


def _named(ranks: Sequence[int]) -> str:
    """Return some ranks as an error names them."""
    return ", ".join(f"rank {rank}" for rank in ranks)


# Among so few ranks a value of so many bytes travels in the meeting's own messages.
INLINE_RANKS = 16
INLINE_BYTES = 1024
COUNT = np.dtype("<i8")  # in front of a message: bytes of the value


class GlooHost:
    """Exchanges on the CPU over a gloo group of all ranks.

    Every exchange but that of rows begins with a meeting: each rank sends every other one a
    message of its own, with the size of its value and, among few ranks, a short value itself. So a
    rank that does not come is known to all others, by its number. In a collective ranks wait for
    each other in a chain, and none is told who broke it: it carries what is too long for a
    message.
    """

    __slots__ = ("_group", "_rank", "_room", "_world_size", "phase", "timeout")

    def __init__(self, timeout: timedelta) -> None:
        """Make the group. Collective over the world."""
        self.timeout = timeout
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        # bytes of a value that a meeting's message has room for
        self._room = INLINE_BYTES if self._world_size <= INLINE_RANKS else 0
        self.phase = "the start"

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        """See `HostGroup.gather_ints`."""
        own = np.array(values, dtype=np.int64).tobytes()
        return [np.frombuffer(data, np.int64).tolist() for data in self._gather(own)]

    def gather_values(self, value: Any) -> list[Any]:
        """See `HostGroup.gather_values`."""
        return [json.loads(data) for data in self._gather(json.dumps(value).encode())]

    def broadcast_value(self, value: Any) -> Any:
        """See `HostGroup.broadcast_value`."""
        return json.loads(self.broadcast_bytes(json.dumps(value).encode()))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """See `HostGroup.broadcast_bytes`."""
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

    def gather_floats(self, values: Sequence[float]) -> torch.Tensor:
        """See `HostGroup.gather_floats`."""
        own = np.array(values, dtype=np.float64).tobytes()
        rows = [np.frombuffer(data, np.float64) for data in self._gather(own)]
        return torch.from_numpy(np.stack(rows))  # [values] of each -> [world, values]

    def exchange_rows(
        self, rows: torch.Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]
    ) -> torch.Tensor:
        """See `HostGroup.exchange_rows`.

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
        """See `HostGroup.all_reduce`."""
        self.barrier()
        with self._naming_phase():
            dist.all_reduce(tensor, group=self._group)

    def barrier(self) -> None:
        """See `HostGroup.barrier`."""
        self._meet(b"")

    @contextmanager
    def naming_lost(self) -> Iterator[None]:
        """See `HostGroup.naming_lost`."""
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
            raise LostRank(
                f"rank {self._rank}: {_named(missing)} did not answer in {self.phase}: {error}"
            ) from error

    def roll_call(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` that do not answer."""
        return roll_call(self._group, ranks)

    # ---- how

    def _gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank."""
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

    def _meet(self, data: bytes) -> "_Meeting":
        """Send every rank the size of `data`, and `data` itself if there is room for it. Returns
        what all ranks have sent.

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
            raise LostRank(
                f"rank {self._rank}: {_named(missing)} did not answer in {self.phase}: {why}"
            ) from why

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
    """What all ranks have sent in a meeting."""

    __slots__ = ("_messages", "counts")

    def __init__(self, messages: NDArray[np.uint8]) -> None:
        """messages: [world, bytes of a message]."""
        self._messages = messages
        self.counts: list[int] = messages[:, : COUNT.itemsize].copy().view(COUNT)[:, 0].tolist()
        """Bytes of each rank's value."""

    def value(self, rank: int) -> bytes:
        """Return the value of a rank, for which there was room."""
        return self._messages[rank, COUNT.itemsize :][: self.counts[rank]].tobytes()
