"""Links between neighbouring stages of a pipeline: one lane per pair and direction.

On a transport that carries out the posts of a lane one after the other, a receive that was posted
long before the neighbour's send would hold back a send that this neighbour waits for. So each link
is a separate lane, on which one side only sends and the other side only receives, in one order
that both take from the plan.

    rank of stage s   -- to_after:  hidden states -->   rank of stage s + 1
                      <-- from_after: gradients ------
"""

from collections.abc import Sequence

import torch

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import (
    Lane,
    Message,
    Pending,
    RankGroup,
    Transport,
    own_part,
)
from hf_flexseq.program.tags import link_tag

HIDDEN_STATES, GRADIENTS = range(2)  # the kinds of links


class StageLink:
    """A link between this rank and a neighbour in the pipeline, in one direction.

    Messages arrive in the order in which they are sent.
    """

    def __init__(self, transport: Transport, lane: Lane, peer: int, kind: int) -> None:
        """lane: of the two ranks. peer: global rank. kind: HIDDEN_STATES or GRADIENTS."""
        self._transport = transport
        self._lane = lane
        self._peer = peer
        self._kind = kind
        self._messages = 0  # messages so far; both sides count the same ones

    @property
    def is_ordered(self) -> bool:
        """True if the transport carries out posts one after the other."""
        return self._transport.capabilities.ordered

    def send(self, tensor: torch.Tensor) -> "LinkMessage":
        """Send a contiguous tensor of any shape, e.g. hidden states [1, tokens, hidden].

        The tensor must stay as it is until the message has been waited for. Nothing is posted for
        a tensor without elements, as both sides expect.
        """
        return self._post(tensor, sends=True)

    def receive(self, tensor: torch.Tensor) -> "LinkMessage":
        """Receive into a contiguous tensor, e.g. [1, tokens, hidden]; it is ready after `wait`."""
        return self._post(tensor, sends=False)

    def _post(self, tensor: torch.Tensor, *, sends: bool) -> "LinkMessage":
        """Post the next message of the link."""
        message = Message(tensor, self._peer, link_tag(self._kind, self._messages))
        self._messages += 1
        name = f"message {self._messages} of {self._lane.kind}"
        pending = None
        if tensor.numel():
            pending = self._transport.post(
                self._lane,
                sends=[message] if sends else [],
                recvs=[] if sends else [message],
                label=lambda peer, sent: name,
            )
        return LinkMessage(pending, tensor)


class LinkMessage:
    """A transfer that has been posted; `wait` ends it, exactly once, and returns the tensor."""

    __slots__ = ("_pending", "_tensor")

    def __init__(self, pending: Pending | None, tensor: torch.Tensor) -> None:
        """pending: None if nothing moves. tensor: of any shape, kept alive until `wait`."""
        self._pending = pending
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> torch.Tensor:
        """Return the tensor, e.g. [1, tokens, hidden], once it has been sent or received."""
        assert self._tensor is not None, "this message was already waited for"
        if self._pending is not None:
            self._pending.wait()
        tensor = self._tensor
        self._pending = None
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
        transport = communicator.transport

        # 1. links between neighbours: all pipelines make that of one pair of stages together
        stages = len(pipelines[0]) if pipelines else 0
        for before in range(stages if ring else stages - 1):
            after = (before + 1) % stages
            pairs = [(ranks[before], ranks[after]) for ranks in pipelines]
            self._open_links(transport, pairs, stage=before)

        # 2. the ends
        self.ends: RankGroup | None = None
        if stages > 1:
            self.ends = transport.open_group([(ranks[0], ranks[-1]) for ranks in pipelines])

        # 3. replicas of each stage
        self.replicas: RankGroup | None = None
        if len(pipelines) > 1:
            self.replicas = transport.open_group(list(zip(*pipelines, strict=True)))

    def _open_links(
        self, transport: Transport, pairs: Sequence[tuple[int, int]], *, stage: int
    ) -> None:
        """Link a stage to the next one. pairs: ranks of both, by pipeline."""
        own = own_part(pairs, transport.rank) or ()
        peers = [rank for rank in own if rank != transport.rank]
        states = f"hidden states of rank {stage} of a pipeline"
        gradients = f"gradients for rank {stage} of a pipeline"
        forward = transport.open_lane(states, pairs, peers=peers)
        backward = transport.open_lane(gradients, pairs, peers=peers)
        if forward is None or backward is None:
            return
        for before, after in pairs:
            if transport.rank == before:
                self.to_after = StageLink(transport, forward, after, HIDDEN_STATES)
                self.from_after = StageLink(transport, backward, after, GRADIENTS)
            if transport.rank == after:
                self.from_before = StageLink(transport, forward, before, HIDDEN_STATES)
                self.to_before = StageLink(transport, backward, before, GRADIENTS)
