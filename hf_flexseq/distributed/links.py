"""Links between neighbouring stages of a pipeline, one process group for each pair of ranks and
direction.

On one communicator transfers with different peers queue up behind each other where they are
ordered by a stream (NCCL): a receive that was posted early, for what a neighbour sends much later,
would then hold back a send that this neighbour waits for. Each link is therefore a communicator of
its own, on which one side only sends and the other one only receives, in one order that both take
from the plan.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from hf_flexseq.distributed.communicator import Communicator, _connect


class Channel:
    """One direction between this rank and a neighbour. Messages arrive in the order in which they
    are sent."""

    __slots__ = ("_group", "_number", "_peer")

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer, self._number = group, peer, 0

    def send(self, tensor: torch.Tensor) -> "Message":
        """`tensor`, which must be contiguous and stay as it is until the message has been waited
        for. Nothing is posted for a tensor without elements, which both sides know."""
        tag = self._next_tag()
        return Message(
            dist.isend(tensor, self._peer, self._group, tag) if tensor.numel() else None, tensor
        )

    def receive(self, tensor: torch.Tensor) -> "Message":
        """Into `tensor`, which is ready after `wait`."""
        tag = self._next_tag()
        return Message(
            dist.irecv(tensor, self._peer, self._group, tag) if tensor.numel() else None, tensor
        )

    def _next_tag(self) -> int:
        """The same number on both sides, because both count the messages of this link."""
        self._number = (self._number + 1) % 2**31
        return self._number


class Message:
    """A transfer that has been posted; `wait` ends it, exactly once, and returns the tensor."""

    __slots__ = ("_tensor", "_work")

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> torch.Tensor:
        assert self._tensor is not None, "this message was already waited for"
        if self._work is not None:
            self._work.wait()
        self._work, tensor, self._tensor = None, self._tensor, None
        return tensor


class Neighbours:
    """This rank's links in its pipeline, and the groups over which gradients are summed.

    from_before, to_after: hidden states. from_after, to_before: gradients. None at the ends of the
    pipeline, unless it is a ring, whose last rank is before its first one. ends: the first and the
    last rank of the pipeline, for a tensor that both hold; None in between. replicas: the ranks
    with the same stage; None when there is but one pipeline.
    """

    __slots__ = ("ends", "from_after", "from_before", "replicas", "to_after", "to_before")

    def __init__(
        self, communicator: Communicator, pipelines: Sequence[Sequence[int]], *, ring: bool = False
    ) -> None:
        """Create the groups; collective over the world. pipelines: the ranks of each, by stage.
        ring: whether the last rank hands on to the first one, which has more stages than one."""
        self.from_before = self.to_before = self.from_after = self.to_after = self.ends = (
            self.replicas
        ) = None
        rank = communicator.rank
        for ranks in pipelines:
            for before, after in pairwise((*ranks, ranks[0]) if ring else ranks):
                forward, backward = _new_group((before, after)), _new_group((before, after))
                if rank == before:
                    self.to_after, self.from_after = (
                        Channel(forward, after),
                        Channel(backward, after),
                    )
                if rank == after:
                    self.from_before, self.to_before = (
                        Channel(forward, before),
                        Channel(backward, before),
                    )
            ends = _new_group((ranks[0], ranks[-1]))
            self.ends = ends if rank in (ranks[0], ranks[-1]) else self.ends
        for same_stage in zip(*pipelines, strict=True) if len(pipelines) > 1 else ():
            replicas = _new_group(same_stage)
            self.replicas = replicas if rank in same_stage else self.replicas


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks))
    _connect(group)
    return group
