"""The promises of a transport, on which other modules rely; one module per backend keeps them.

    gloo.py       CPU: messages carry tags, and `wait` blocks the host
    nccl.py       CUDA: a lane carries out one post after the other, and `wait` blocks the stream
    lone_rank.py  one rank, which has no peers

`tests/threads.py` keeps any of these promises to the letter, for ranks that are threads.

A transport moves tensors in two ways:

    post     some sends and receives on a *lane*, at once; `wait` ends them
    group    collectives over fixed ranks

and Python values between CPUs, by its `cpu_group`.

A lane is a separate queue. On a transport that is *ordered* a lane carries out its posts in the
order in which they were posted, and a post is over when all of its messages are: a post that waits
for a slow link delays all later ones of the lane. So links of different speed have
different lanes. There messages between two ranks match in the order of the posts, whatever their
tags are. On a transport that is not ordered posts are independent, and messages match by tag.

Three rules hold for posts on every transport:

* Received tensors must not be read, and sent tensors must not be changed, before `wait`.
* Every post is waited for exactly once.
* All ranks post their messages in one order that they all take from the plan. Every plan then
  completes even if a rank executes its posts strictly in sequence across all lanes
  (docs/architecture.md has the proof).

NCCL hangs, or moves wrong bytes, if ranks break its rules. `tests/threads.py` raises an error
where NCCL would hang. Tests without a folder are in tests/distributed.

    rule                               how the code keeps it         tests
    ---------------------------------  ----------------------------  ---------------------------
    all ranks of a communicator call   the plan is the order; a      test_threads,
    its collectives in one order       block has one communicator    attention/test_never_hangs
    messages of a pair match by the    a zone's messages are posted  test_threads,
    order of their posts; tags do not  in its program's order        attention/test_never_hangs
    exist
    a communicator runs one operation  one lane inside nodes and     attention/test_never_hangs
    after the other                    one between nodes, in one
                                       order
    all ranks of the parent make a     all groups are made before    test_transports,
    communicator, in one order         the first step, none by a     test_connect
                                       plan
    all ranks use a new communicator   each runs an all-reduce or    test_transports
    before some do; a pair's first     all-to-all at once; lanes
    message connects it and blocks     send one message per pair
    both hosts
    a send without a batch opens       every post is a batch         test_transports
    another communicator
    a kernel that fills the GPU        streams of high priority,     test_transports,
    delays an earlier transfer         clusters of one thread block  kernels/test_cuda_kernels
    sizes, dtypes and shapes agree     both sides read the plan;     test_threads
                                       empty messages are not
                                       posted
    `wait` blocks the stream, not the  attention never reads the     tests/test_no_host_sync
    host                               device
    exchanges of DDP, experts and      the one order; all ranks      hf/test_one_order,
    images have a place among          take part, also without       steps/test_image_order
    attention's                        images or tokens
    sizes that depend on data agree    experts exchange counts       test_threads
                                       first
    other streams wait for the stream  one stream copies to the      late_device/on_device
    that has waited                    host, and posts nothing
    vLLM's server has a communicator   TRL opens and uses it         hf/test_vllm
    with rank 0                        between steps
    a lost rank shows as a timeout     a gloo group names the rank   hf/test_lost_ranks

A rank has eight NCCL communicators on 64 and on 1,024 ranks: two lanes, five groups of 2 to 32
ranks for all-to-alls, and all ranks. A pipeline of 8 stages adds at most six, FSDP2 with experts
three.
"""

import abc
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

# (peer, whether this rank sends to it) -> what the message is; asked for when a transfer fails
Label = Callable[[int, bool], str]

Parts = tuple[tuple[int, ...], ...]  # disjoint sets of global ranks

# of exchanges between CPUs where no process group says otherwise; that of torch's own groups
DEFAULT_TIMEOUT = timedelta(minutes=30)


def unnamed(peer: int, sent: bool) -> str:
    """Return the label of an unnamed message."""
    return "a message"


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Promises of a transport about posts."""

    ordered: bool
    """True if a lane carries out its posts in order, and messages match by order, not by tag."""
    fast_collectives: bool = False
    """True if an all-to-all over a group is faster than messages between its ranks."""


class Lane(NamedTuple):
    """A queue of posts between some ranks."""

    kind: str
    """Purpose of the lane, for errors, e.g. "inside nodes"."""
    ranks: tuple[int, ...]
    """Global ranks, any two of which may exchange messages on it."""
    number: int = 0
    """Tells lanes of one kind and the same ranks apart, where a transport has several of them."""


class Message(NamedTuple):
    """A tensor that this rank sends or receives."""

    tensor: torch.Tensor
    """Contiguous, of any shape, with at least one element."""
    peer: int
    """Global rank on the other side."""
    tag: int


Messages = Sequence[Message]


class LostRank(RuntimeError):
    """Says that an exchange has failed, and which rank is gone or does not answer."""


class Pending(Protocol):
    """Something that was posted."""

    def wait(self) -> None:
        """Wait until it is over, exactly once. Received tensors may be read from then on.

        Raises LostRank, naming this rank, the peers and the messages, when it fails or takes
        longer than the transport's timeout; a transport that waits on a stream cannot tell then.
        """


class RankGroup(Protocol):
    """Collectives over fixed ranks. Each is called by all of them, in one order."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group, ascending."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group as torch.distributed knows it, for libraries that ask for one."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor of any shape by its sum over the ranks."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace a tensor of any shape by the first rank's."""

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
        *,
        label: Label = unnamed,
    ) -> Pending:
        """Post the transfer of sent_counts[i] elements to the i-th rank of the group, and of
        received_counts[i] elements from it.

        received, sent: flat [elements of all ranks], by rank.
        """


class CpuGroup(abc.ABC):
    """Exchanges of values on the CPU between all ranks. Each is collective over the world.

    One that a rank does not come to raises LostRank on the others, which names the rank and
    `phase`. Values travel as JSON and as tensors, never as pickles: nothing that arrives is run.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self.timeout = timeout
        """Maximum time that a rank waits for the others in an exchange."""
        self.phase = "the start"
        """Name of the next exchanges, e.g. "step 12, gathering figures"."""

    @abc.abstractmethod
    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank; they may differ in length."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return the bytes of rank 0 on every rank; other ranks' bytes do not count."""
        return self.gather_bytes(data)[0]

    def gather_values(self, value: Any) -> list[Any]:
        """Return all JSON values, by rank; tuples become lists. Raises TypeError for others."""
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]

    def broadcast_value(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank, as `gather_values` does."""
        return json.loads(self.broadcast_bytes(json.dumps(value).encode()))

    @abc.abstractmethod
    def exchange_rows(
        self, rows: torch.Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]
    ) -> torch.Tensor:
        """Exchange rows of a CPU tensor; all ranks know beforehand who sends how many to whom.

        rows: [sent, width]; the first sent_counts[0] of them go to rank 0, the next ones to
            rank 1, and so on.
        Returns [received, width]: received_counts[0] rows from rank 0, then those from rank 1,
        and so on. Ranks that have no rows for each other do not meet here.
        """

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a CPU tensor of any shape by its sum over the ranks."""

    def own_work(self, what: str) -> AbstractContextManager[None]:
        """Surround this rank's own work before an exchange, such as reading its data. Ranks that
        are ready wait at its end for the others, however long these take, without being in an
        exchange (`own_work.py`). Does nothing where no exchange has a timeout."""
        return nullcontext()

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self.gather_bytes(b"")

    def naming_lost(self) -> AbstractContextManager[None]:
        """Surround exchanges of others: when one of DDP's or the Trainer's own fails, the error is
        a LostRank, which names the ranks that do not answer and `phase`. Does nothing where ranks
        cannot be lost."""
        return nullcontext()


class Transport(abc.ABC):
    """One rank's way to all others."""

    rank: int
    """This rank."""
    world_size: int
    """The number of ranks."""
    capabilities: Capabilities
    """Promises of this transport."""
    cpu_group: CpuGroup
    """Exchanges of values on the CPU."""

    def open_lane(
        self, kind: str, parts: Sequence[Sequence[int]], *, peers: Sequence[int] = ()
    ) -> Lane | None:
        """Make a lane for each of some disjoint sets of ranks, and return this rank's, if it has
        one. Collective over the world; a lane that is open already is returned as it is. Here a
        lane is nothing but a name, and nothing is made.

        kind: the purpose of the lanes.
        parts: global ranks, the same list on all ranks.
        peers: ranks of this rank's lane that it will exchange messages with again and again; it is
            one of theirs, too. Where a first message is slow they are connected at once.
        """
        own = own_part(parts, self.rank)
        return None if own is None else Lane(kind, own)

    @abc.abstractmethod
    def open_group(
        self, parts: Sequence[Sequence[int]], *, exchanges: bool = False
    ) -> RankGroup | None:
        """Make a group for each of some disjoint sets of ranks, and return this rank's, if it has
        one. Collective over the world; an open group is returned as it is.

        parts: global ranks, the same list on all ranks. exchanges: whether for all-to-alls again
        and again. Where a first one is slow its ranks are connected at once.
        """

    @abc.abstractmethod
    def post(
        self, lane: Lane, *, sends: Messages, recvs: Messages, label: Label = unnamed
    ) -> Pending:
        """Start some transfers between this rank and others of the lane.

        Both sides must list several messages for one peer in the same order. Raises LostRank, as
        `Pending.wait` does, if a peer is known to be gone.
        """


def failure(
    rank: int,
    sends: Sequence[Message],
    recvs: Sequence[Message],
    label: Label,
    error: RuntimeError | str,
) -> LostRank:
    """Return an error that names this rank and each of the failed messages once."""
    names = []
    for message in recvs:
        names.append(f"receive from rank {message.peer} {label(message.peer, False)}")
    for message in sends:
        names.append(f"send to rank {message.peer} {label(message.peer, True)}")
    failed = ", or ".join(dict.fromkeys(names))
    return LostRank(f"rank {rank} could not {failed}: {error}")


def as_tuples(parts: Sequence[Sequence[int]]) -> Parts:
    """Return disjoint sets of ranks as a value that a dictionary takes for a key."""
    return tuple(tuple(sorted(part)) for part in parts)


def own_part(parts: Sequence[Sequence[int]], rank: int) -> tuple[int, ...] | None:
    """Return the part that `rank` is in, ascending; None where it is in none."""
    for part in parts:
        if rank in part:
            return tuple(sorted(part))
    return None
