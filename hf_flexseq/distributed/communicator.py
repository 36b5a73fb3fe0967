"""The process groups of a job, all made once, in one order, before the first step.

* `parent`: every rank; groups of any shape move their bytes by point-to-point transfers on it, so
  a plan never needs a new communicator (one NCCL communicator per group costs gigabytes, and
  creating one lazily can hang a job);
* `blocks`: a process group for each aligned block of the topology, where one collective is faster
  than many point-to-point transfers. Not on gloo: its uneven all-to-all sends the two directions
  of a slow link one after the other (3 MB each way at 133 Mbit/s: 0.33 s, and 0.19 s by
  point-to-point transfers);
* `control`: every rank, gloo, for lengths, plans and token ids, which never touch an accelerator.

With one process there is no process group, and every exchange below is with oneself.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_flexseq.plan import Group
from hf_flexseq.topology import Topology


class Communicator:
    """This rank's place in the job and the groups it communicates in."""

    __slots__ = ("blocks", "control", "parent", "rank", "topology")

    def __init__(
        self, topology: Topology | None = None, *, use_blocks: bool | None = None
    ) -> None:
        """Create the groups; collective over the world. `topology` defaults to what the launcher
        says.

        use_blocks=False leaves all traffic to point-to-point transfers; None does so on gloo
        alone. Raises ValueError when `topology` does not have as many ranks as the job.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.topology = topology or Topology.from_world(world_size, local_world_size(world_size))
        if self.topology.world_size != world_size:
            raise ValueError(
                f"the topology has {self.topology.world_size} ranks, the job {world_size}"
            )
        self.parent = self.control = None
        self.blocks: dict[tuple[int, int], dist.ProcessGroup] = {}
        if world_size > 1:
            timeout = _timeout()
            self.parent = dist.new_group(timeout=timeout)
            use_blocks = (
                dist.get_backend(self.parent) != "gloo" if use_blocks is None else use_blocks
            )
            self.control = dist.new_group(backend="gloo", timeout=timeout)
            for start, stop in self.topology.aligned_blocks() if use_blocks else ():
                self.blocks[start, stop] = dist.new_group(
                    ranks=list(range(start, stop)), timeout=timeout
                )
            for group in (self.parent, *self.blocks.values()):
                _connect(group)

    @property
    def world_size(self) -> int:
        return self.topology.world_size


def _timeout() -> timedelta:
    """That of the job's own group, which new groups do not take over."""
    world = dist.distributed_c10d._get_default_group()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return world._get_backend(torch.device(device)).options._timeout


def _connect(group: "dist.ProcessGroup | int") -> None:
    """Use `group` once, with all its ranks. NCCL connects a group at its first use, and hangs if
    that is a transfer between two ranks of it alone."""
    if isinstance(group, dist.ProcessGroup):  # an int where this rank is no member
        device = (
            torch.device("cuda", torch.cuda.current_device())
            if dist.get_backend(group) == "nccl"
            else "cpu"
        )
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def local_world_size(world_size: int) -> int:
    """Ranks on this node, from the launcher; all of them when it does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


# (peer, whether it was to be sent there) -> what a message is; asked for in errors
Label = Callable[[int, bool], str]
TAGS_OF_ZONE = 1 << 17
TAGS = 8  # numbers kept free for the messages of one exchange between two ranks


def unnamed(peer: int, sent: bool) -> str:
    return "a message"


class Channel:
    """The transfers of one group on this rank: which tags they have, and what errors call them.

    Tags of different zones differ. number: place of the zone among those of this rank; since
    groups are nested and stand widest first, any two ranks of the group agree on it.
    """

    __slots__ = ("communicator", "group", "number")

    def __init__(self, communicator: Communicator, group: Group, number: int) -> None:
        self.communicator, self.group, self.number = communicator, group, number

    def tag(self, message: int) -> int:
        assert 0 <= message < TAGS_OF_ZONE, f"a zone has no message {message}"
        return self.number * TAGS_OF_ZONE + message

    @property
    def name(self) -> str:
        return f"the {self.group.strategy} group of ranks {self.group.start}-{self.group.stop - 1}"

    def label(self, describe: Label) -> Label:
        """That label with the group's name."""
        return lambda peer, sent: f"{describe(peer, sent)}, of {self.name}"


class Transfers:
    """Point-to-point transfers that have been posted together; `wait` ends them, exactly once."""

    __slots__ = ("_label", "_ops", "_works")

    def __init__(
        self,
        communicator: Communicator,
        *,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
        tag: int = 0,
        label: Label = unnamed,
    ) -> None:
        """Post contiguous tensors to and from global ranks. Receives are posted first: on a slow
        link gloo otherwise serialises the two directions. Nothing is posted for tensors without
        elements, which both sides know. Several for one rank must stand in the same order on both
        sides; they take the tags from `tag` on."""
        group = communicator.parent
        ops = [dist.P2POp(dist.irecv, t, peer, group, n) for t, peer, n in _tagged(recvs, tag)]
        ops += [dist.P2POp(dist.isend, t, peer, group, n) for t, peer, n in _tagged(sends, tag)]
        self._label = label
        self._ops = ops  # their tensors are alive until the transfers are over
        try:
            self._works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:  # a peer is known to be gone
            raise self._failure(ops, error) from error

    def wait(self) -> None:
        """Raises RuntimeError naming the peer and the message when a transfer fails or takes too
        long."""
        assert self._works is not None, "these transfers were already waited for"
        for place, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                # Some backends make one work of all transfers.
                each = len(self._works) == len(self._ops)
                raise self._failure(
                    self._ops[place : place + 1] if each else self._ops, error
                ) from error
        self._works = None
        self._ops = None

    def _failure(self, ops: Sequence[dist.P2POp], error: RuntimeError) -> RuntimeError:
        names = dict.fromkeys(self._name(op.peer, sent=op.op is dist.isend) for op in ops)
        return RuntimeError(f"rank {dist.get_rank()} could not {', or '.join(names)}: {error}")

    def _name(self, peer: int, *, sent: bool) -> str:
        return f"{'send to' if sent else 'receive from'} rank {peer} {self._label(peer, sent)}"


def _tagged(
    transfers: Sequence[tuple[torch.Tensor, int]], tag: int
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Each tensor that has elements, with its peer and its tag: `tag` and how many went before it
    to that peer."""
    before: Counter[int] = Counter()
    for tensor, peer in transfers:
        if tensor.numel():
            yield tensor, peer, tag + before[peer]
            before[peer] += 1


class Exchange:
    """Messages between this rank and others that are collected one by one, posted together and
    waited for once."""

    __slots__ = ("_label", "_recvs", "_sends", "_transfers")

    def __init__(self, label: Label = unnamed) -> None:
        self._label = label
        self._sends: list[tuple[torch.Tensor, int]] = []
        self._recvs: list[tuple[torch.Tensor, int]] = []
        self._transfers: Transfers | None = None

    def send(self, tensors: Iterable[torch.Tensor], peer: int) -> None:
        self._sends += [(x.contiguous(), peer) for x in tensors]

    def recv(
        self, likes: Iterable[torch.Tensor], tokens: int, peer: int
    ) -> tuple[torch.Tensor, ...]:
        """Tensors of `tokens` rows, otherwise like `likes`, that will hold what `peer` sends."""
        tensors = tuple(x.new_empty(tokens, *x.shape[1:]) for x in likes)
        self.recv_into(tensors, peer)
        return tensors

    def recv_into(self, tensors: Iterable[torch.Tensor], peer: int) -> None:
        """Contiguous tensors that will hold what `peer` sends."""
        self._recvs += [(x, peer) for x in tensors]

    def post(self, communicator: Communicator, tag: int) -> None:
        self._transfers = Transfers(
            communicator, sends=self._sends, recvs=self._recvs, tag=tag, label=self._label
        )

    def wait(self) -> None:
        assert self._transfers is not None, "this exchange was not posted"
        self._transfers.wait()
