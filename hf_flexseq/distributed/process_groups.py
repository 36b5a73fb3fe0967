"""What transports over torch.distributed have in common: their groups, and posts under way.

Groups are made once per process and kept as long as the job's own group lives: any number of
trainers in one process share them (`connect.py`).
"""

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist

from hf_flexseq.distributed.gloo_cpu_group import GlooCpuGroup
from hf_flexseq.distributed.transport import (
    Label,
    LostRank,
    Message,
    Parts,
    Transport,
    as_tuples,
    failure,
    own_part,
    unnamed,
)

SPARE_DESCRIPTORS = 512  # for everything else that a process opens


def reserve_descriptors(sockets: int) -> None:
    """Allow so many more sockets. Raises ValueError, naming `ulimit -n`, if the system refuses."""
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


class ProcessGroupTransport(Transport):
    """A transport over process groups of torch.distributed, each of which is made once."""

    backend: ClassVar[str]
    """Name that torch.distributed has for the backend of groups."""
    cpu_group: GlooCpuGroup

    def __init__(self, timeout: timedelta) -> None:
        """Make the CPU group. Collective over the world."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.cpu_group = GlooCpuGroup(timeout)
        self._timeout = timeout
        self._groups: dict[Parts, ProcessGroupRanks | None] = {}

    def open_group(
        self, parts: Sequence[Sequence[int]], *, exchanges: bool = False
    ) -> "ProcessGroupRanks | None":
        """See `Transport.open_group`."""
        key = as_tuples(parts)
        if key not in self._groups:
            group = self._new_group(parts)
            made = None if group is None else ProcessGroupRanks(group, self.cpu_group)
            self._groups[key] = made
        return self._groups[key]

    def _new_group(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Make a process group for each of some disjoint sets of ranks, and return this rank's, if
        it has one. Collective over the world.

        A rank makes one group, whatever the number of sets, so that its work does not grow with
        the world. A rank in none of the sets makes one of itself alone, for two reasons. torch
        names a group by the number of groups that a process is in, which all members must agree
        on. And where the job's group is bound to a device, a group is split off from it, which
        takes all ranks at once. Where others have put ranks into different numbers of groups, all
        ranks make all sets. Rejected: `split_group`, which gives every part all backends of the
        job, so that each lane would have sockets between all of its ranks, too.
        """
        make = partial(dist.new_group, backend=self.backend, timeout=self._timeout)
        own = own_part(parts, self.rank)
        if own is not None and len(own) == self.world_size:
            return make(pg_options=self._options())
        group: dist.ProcessGroup
        names = dist.distributed_c10d._world.pg_names
        counts = self.cpu_group.gather_values(len(names))  # by rank
        if all(count == counts[0] for count in counts):
            alone = (self.rank,)
            group = make(
                list(own or alone), pg_options=self._options(), use_local_synchronization=True
            )
            return None if own is None else group
        for part in parts:
            made = make(sorted(part), pg_options=self._options())
            if self.rank in part:
                group = made
        return None if own is None else group

    def _options(self) -> object:
        """Return the backend's options of one group."""
        return None


class ProcessGroupRanks:
    """Collectives over a process group of torch.distributed."""

    def __init__(self, process_group: dist.ProcessGroup, cpu_group: GlooCpuGroup) -> None:
        """cpu_group: finds who is missing when a collective fails."""
        self.process_group = process_group
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self._cpu_group = cpu_group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """See `RankGroup.all_reduce`."""
        with self.naming_missing(lambda peer: "a sum"):
            dist.all_reduce(tensor, group=self.process_group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `RankGroup.broadcast`."""
        with self.naming_missing(lambda peer: "a broadcast"):
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
    def naming_missing(self, what: Callable[[int], str]) -> Iterator[None]:
        """Name in the error of a collective the other ranks of the group that do not answer, all
        where every one does. what: returns a text of what moves, for one of them."""
        try:
            yield
        except RuntimeError as error:
            own = dist.get_rank()
            others = [rank for rank in self.ranks if rank != own]
            missing = self._cpu_group.roll_call(others) or others
            raise LostRank(
                f"rank {own} could not exchange with ranks {missing} {what(missing[0])}: {error}"
            ) from error


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
        with self._group.naming_missing(lambda peer: self._label(peer, False)):
            self._work.wait()
        self._sent = None
