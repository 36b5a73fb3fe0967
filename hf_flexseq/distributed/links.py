"""Links between neighbouring stages of a pipeline: one process group per pair and direction.

On one communicator transfers with different peers queue up behind each other where they are
ordered by a stream (NCCL). A receive that was posted early, for what a neighbour sends much later,
would then hold back a send that this neighbour waits for. So each link is a communicator of its
own, on which one side only sends and the other side only receives, in one order that both take
from the plan.

    rank of stage s   -- to_after:  hidden states -->   rank of stage s + 1
                      <-- from_after: gradients ------
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from hf_flexseq.distributed.communicator import Communicator, connect
from hf_flexseq.distributed.tags import link_tag


class StageLink:
    """A link between this rank and a neighbour in the pipeline, in one direction.

    Messages arrive in the order in which they are sent.
    """

    __slots__ = ("_group", "_messages", "_peer")

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        """group: process group of the two ranks. peer: global rank of the neighbour."""
        self._group = group
        self._peer = peer
        self._messages = 0  # messages so far; both sides count the same ones

    def send(self, tensor: torch.Tensor) -> "Message":
        """Send a contiguous tensor of any shape, e.g. hidden states [1, tokens, hidden].

        The tensor must stay as it is until the message has been waited for. Nothing is posted for
        a tensor without elements, which both sides know.
        """
        tag = self._next_tag()
        work = None
        if tensor.numel():
            work = dist.isend(tensor, self._peer, self._group, tag)
        return Message(work, tensor)

    def receive(self, tensor: torch.Tensor) -> "Message":
        """Receive into a contiguous tensor, e.g. [1, tokens, hidden]; it is ready after `wait`."""
        tag = self._next_tag()
        work = None
        if tensor.numel():
            work = dist.irecv(tensor, self._peer, self._group, tag)
        return Message(work, tensor)

    def _next_tag(self) -> int:
        tag = link_tag(self._messages)
        self._messages += 1
        return tag


class Message:
    """A transfer that has been posted; `wait` ends it, exactly once, and returns the tensor."""

    __slots__ = ("_tensor", "_work")

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        """work: None when there is nothing to move. tensor: sent or received, of any shape, e.g.
        [1, tokens, hidden]; kept alive until `wait`."""
        self._work = work
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> torch.Tensor:
        """Return the tensor, e.g. [1, tokens, hidden], once it has been sent or received."""
        assert self._tensor is not None, "this message was already waited for"
        if self._work is not None:
            self._work.wait()
        tensor = self._tensor
        self._work = None
        self._tensor = None
        return tensor


class Neighbours:
    """This rank's links in its pipeline, and the groups over which gradients are summed.

    from_before, to_after: hidden states from the stage before and to the stage after.
    from_after, to_before: gradients from the stage after and to the stage before.
        The first rank has none before it and the last none after it (None), unless the pipeline is
        a ring, in which the last rank comes before the first one.
    ends: group of the first and the last rank of the pipeline, for a tensor that both hold; None
        on the ranks in between.
    replicas: group of the ranks with the same stage; None when there is only one pipeline.
    """

    __slots__ = ("ends", "from_after", "from_before", "replicas", "to_after", "to_before")

    def __init__(
        self, communicator: Communicator, pipelines: Sequence[Sequence[int]], *, ring: bool = False
    ) -> None:
        """Make the groups. Collective over the world.

        pipelines: global ranks of each pipeline, by stage.
        ring: whether the last rank hands on to the first one, which has more stages than one.
        """
        self.from_before: StageLink | None = None
        self.to_before: StageLink | None = None
        self.from_after: StageLink | None = None
        self.to_after: StageLink | None = None
        self.ends: dist.ProcessGroup | None = None
        self.replicas: dist.ProcessGroup | None = None
        rank = communicator.rank

        # Every rank makes every group, in this order, also those it is no member of.
        for ranks in pipelines:
            # 1. links between neighbours
            chain = (*ranks, ranks[0]) if ring else ranks
            for before, after in pairwise(chain):
                forward = _new_group((before, after))
                backward = _new_group((before, after))
                if rank == before:
                    self.to_after = StageLink(forward, after)
                    self.from_after = StageLink(backward, after)
                if rank == after:
                    self.from_before = StageLink(forward, before)
                    self.to_before = StageLink(backward, before)
            # 2. the ends
            ends = _new_group((ranks[0], ranks[-1]))
            if rank in (ranks[0], ranks[-1]):
                self.ends = ends

        # 3. replicas of each stage
        if len(pipelines) > 1:
            for same_stage in zip(*pipelines, strict=True):
                replicas = _new_group(same_stage)
                if rank in same_stage:
                    self.replicas = replicas


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks))
    connect(group)
    return group
