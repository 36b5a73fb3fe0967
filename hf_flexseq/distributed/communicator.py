"""The process groups of a job, and point-to-point transfers between its ranks.

All groups are made once, in one order, before the first step:

    parent     All ranks. Groups of any shape move their bytes by point-to-point transfers on it,
               so a plan never needs a new communicator: one NCCL communicator per group would cost
               gigabytes, and making one in the middle of a run can hang a job.
    blocks     A process group for each aligned block of the topology, where one collective is
               faster than many point-to-point transfers. Not on gloo, whose uneven all-to-all
               sends the two directions of a slow link one after the other: 3 MB each way at 133
               Mbit/s took 0.33 s, and 0.19 s by point-to-point transfers.
    control    All ranks, over gloo, for lengths, plans and token ids, which never touch an
               accelerator.

With one process there is no process group, and every exchange is with oneself.

Transfers are layered:

    Transfers    some sends and receives, posted at once and waited for once
    Exchange     collects the messages of one step of attention, then posts them as Transfers
    Channel      names and tags the exchanges of one group
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_flexseq.distributed.tags import UNTAGGED, zone_tag
from hf_flexseq.plan import Group
from hf_flexseq.topology import Topology

# ---- process groups


class Communicator:
    """This rank of the job and the process groups that it communicates in."""

    __slots__ = ("blocks", "control", "parent", "rank", "topology")

    def __init__(
        self, topology: Topology | None = None, *, use_blocks: bool | None = None
    ) -> None:
        """Make the process groups. Collective over the world.

        topology: nodes and ranks; None takes what the launcher says.
        use_blocks: False leaves all traffic to point-to-point transfers; None does so on gloo
        only. Raises ValueError when `topology` does not have as many ranks as the job.
        """
        world_size = 1
        self.rank = 0
        if dist.is_initialized():
            world_size = dist.get_world_size()
            self.rank = dist.get_rank()
        self.topology = topology or Topology.from_world(world_size, local_world_size(world_size))
        if self.topology.world_size != world_size:
            raise ValueError(
                f"the topology has {self.topology.world_size} ranks, the job {world_size}"
            )
        self.parent: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        self.blocks: dict[tuple[int, int], dist.ProcessGroup] = {}  # by [start, stop) of ranks
        if world_size > 1:
            self._make_groups(use_blocks)

    def _make_groups(self, use_blocks: bool | None) -> None:
        timeout = _default_timeout()
        self.parent = dist.new_group(timeout=timeout)
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        if use_blocks is None:
            use_blocks = dist.get_backend(self.parent) != "gloo"
        if use_blocks:
            for start, stop in self.topology.aligned_blocks():
                ranks = list(range(start, stop))
                self.blocks[start, stop] = dist.new_group(ranks=ranks, timeout=timeout)
        for group in (self.parent, *self.blocks.values()):
            connect(group)

    @property
    def world_size(self) -> int:
        return self.topology.world_size


def _default_timeout() -> timedelta:
    """Return the timeout of the job's own group, which new groups do not take over."""
    world = dist.distributed_c10d._get_default_group()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return world._get_backend(torch.device(device)).options._timeout


def connect(group: "dist.ProcessGroup | int") -> None:
    """Use a new process group once. Collective over its ranks; others return at once.

    NCCL connects a group at its first use, and hangs if that is a transfer between two of several
    ranks. Where this rank is no member, torch gives an int instead of a group.
    """
    if not isinstance(group, dist.ProcessGroup):
        return
    device = torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def local_world_size(world_size: int) -> int:
    """Return the number of ranks on this node, from the launcher; all when it does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


# ---- the transfers of one group

# (peer, whether this rank sends to it) -> what the message is; asked for when a transfer fails
Label = Callable[[int, bool], str]


def unnamed(peer: int, sent: bool) -> str:
    return "a message"


class Channel:
    """The transfers of one group on this rank: their tags, and their names in errors."""

    __slots__ = ("communicator", "group", "number")

    def __init__(self, communicator: Communicator, group: Group, number: int) -> None:
        """number: index of the group's zone among the zones of this rank.

        Groups are nested and zones stand widest first, so all ranks of a group have the same wider
        zones before it and agree on its number. Tags of different zones differ.
        """
        self.communicator = communicator
        self.group = group
        self.number = number

    def tag(self, message: int) -> int:
        """Return the tag of a message of this group; see `tags.py` for the messages."""
        return zone_tag(self.number, message)

    @property
    def name(self) -> str:
        return f"the {self.group.strategy} group of ranks {self.group.start}-{self.group.stop - 1}"

    def label(self, describe: Label) -> Label:
        """Return the label `describe` followed by the name of the group."""
        return lambda peer, sent: f"{describe(peer, sent)}, of {self.name}"


# ---- transfers


class Transfers:
    """Point-to-point transfers that are posted together; `wait` ends them, exactly once."""

    __slots__ = ("_label", "_ops", "_works")

    def __init__(
        self,
        communicator: Communicator,
        *,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
        tag: int = UNTAGGED,
        label: Label = unnamed,
    ) -> None:
        """Post contiguous tensors to and from global ranks, each a (tensor, peer).

        Receives are posted first: on a slow link gloo otherwise serialises the two directions.
        Nothing is posted for a tensor without elements, which both sides know. Several tensors for
        one peer must stand in the same order on both sides; they take the tags from `tag` on.
        """
        group = communicator.parent
        ops = []
        for tensor, peer, own_tag in _tagged(recvs, tag):
            ops.append(dist.P2POp(dist.irecv, tensor, peer, group, own_tag))
        for tensor, peer, own_tag in _tagged(sends, tag):
            ops.append(dist.P2POp(dist.isend, tensor, peer, group, own_tag))
        self._label = label
        self._ops: list[dist.P2POp] = ops  # keeps the tensors alive until the transfers are over
        self._works: list[dist.Work] | None = []  # None once waited for
        try:
            if ops:
                self._works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:  # a peer is known to be gone
            raise self._failure(ops, error) from error

    def wait(self) -> None:
        """Wait until every tensor has been sent or received.

        Raises RuntimeError naming peer and message when a transfer fails or takes too long.
        """
        assert self._works is not None, "these transfers were already waited for"
        for index, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                failed = self._ops
                if len(self._works) == len(self._ops):  # else one work stands for all transfers
                    failed = [self._ops[index]]
                raise self._failure(failed, error) from error
        self._works = None
        self._ops = []

    def _failure(self, ops: Sequence[dist.P2POp], error: RuntimeError) -> RuntimeError:
        """Return an error that names this rank and each of the failed transfers once."""
        names = []
        for op in ops:
            name = self._name(op.peer, sent=op.op is dist.isend)
            if name not in names:
                names.append(name)
        failed = ", or ".join(names)
        return RuntimeError(f"rank {dist.get_rank()} could not {failed}: {error}")

    def _name(self, peer: int, *, sent: bool) -> str:
        direction = "send to" if sent else "receive from"
        return f"{direction} rank {peer} {self._label(peer, sent)}"


def _tagged(
    transfers: Sequence[tuple[torch.Tensor, int]], tag: int
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield (tensor, peer, tag) for each tensor that has elements.

    The first tensor for a peer has `tag`, the next one for the same peer `tag` + 1, and so on.
    """
    before: Counter[int] = Counter()  # tensors so far, by peer
    for tensor, peer in transfers:
        if tensor.numel():
            yield tensor, peer, tag + before[peer]
            before[peer] += 1


class Exchange:
    """Messages between this rank and others, collected first, then posted and waited for once."""

    __slots__ = ("_label", "_recvs", "_sends", "_transfers")

    def __init__(self, label: Label = unnamed) -> None:
        self._label = label
        self._sends: list[tuple[torch.Tensor, int]] = []  # (tensor, peer)
        self._recvs: list[tuple[torch.Tensor, int]] = []
        self._transfers: Transfers | None = None

    def send(self, tensors: Iterable[torch.Tensor], peer: int) -> None:
        """Add tensors [rows, ...] of this rank that `peer` will receive."""
        for tensor in tensors:
            self._sends.append((tensor.contiguous(), peer))

    def recv(
        self, likes: Iterable[torch.Tensor], tokens: int, peer: int
    ) -> tuple[torch.Tensor, ...]:
        """Return new tensors [tokens, ...] that will hold what `peer` sends.

        likes: tensors [any rows, ...] with the other dimensions, the dtype and the device.
        """
        tensors = tuple(like.new_empty(tokens, *like.shape[1:]) for like in likes)
        self.recv_into(tensors, peer)
        return tensors

    def recv_into(self, tensors: Iterable[torch.Tensor], peer: int) -> None:
        """Add contiguous tensors [rows, ...] that will hold what `peer` sends."""
        for tensor in tensors:
            self._recvs.append((tensor, peer))

    def post(self, communicator: Communicator, tag: int) -> None:
        """Start all transfers; messages to one peer take the tags from `tag` on."""
        self._transfers = Transfers(
            communicator, sends=self._sends, recvs=self._recvs, tag=tag, label=self._label
        )

    def wait(self) -> None:
        """Wait until all messages have been sent and received."""
        assert self._transfers is not None, "this exchange was not posted"
        self._transfers.wait()
