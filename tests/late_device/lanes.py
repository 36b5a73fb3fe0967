"""Ranks that are threads, with transfers on streams of their own, as NCCL has them.

Every lane of a rank, and every group of ranks, has a stream of this rank. A post takes its place
there behind what its rank's current stream has so far. Data moves when both sides have posted, on
the receiver's stream, and a wait makes the current stream wait for the post's stream. The host
never waits. What is read, changed or freed without that wait is found by the device.
"""

import torch

from tests.matching import ThreadCollective, ThreadTransfers, poison
from tests.threads import ThreadHub


class _Streams:
    """A stream for every rank and queue."""

    def __init__(self):
        self._made = {}

    def of(self, post):
        key = (post.rank, post.queue)
        if key not in self._made:
            self._made[key] = torch.cuda.Stream()
        return self._made[key]


class Late:
    """What both kinds of posts have: a stream, whose work comes behind what its rank had when it
    posted."""

    def begin(self, streams):
        self.stream = streams.of(self)
        self.posted = torch.cuda.current_stream().record_event()
        self.done = None  # an event, once the post is over

    def ended(self):
        self.done = self.stream.record_event()

    def make_current_wait(self):
        torch.cuda.current_stream().wait_event(self.done)


class _End:
    """One of the two ends of a message. The matcher gives a receiver's end what it takes for the
    sender's snapshot; that is the sender's end, and then data moves."""

    def __init__(self, message, post, *, sent):
        self.message = message
        self.post = post
        self._sender = self if sent else None
        if not sent:
            poison(message.tensor)

    @property
    def kind(self):
        return self.message.tag, self.message.tensor.numel(), self.message.tensor.dtype

    @property
    def snapshot(self):
        return self._sender

    @snapshot.setter
    def snapshot(self, sender):
        self._sender = sender
        here, there = self.post.stream, sender.post.stream
        here.wait_event(self.post.posted)
        here.wait_event(sender.post.posted)
        here.wait_stream(there)  # with the sender's earlier posts of its lane
        target = self.message.tensor.detach()
        with torch.cuda.stream(here):
            target.copy_(sender.message.tensor.detach().view(target.shape))
        there.wait_stream(here)

    def forget(self):
        """Forget the sender, whose tensor is not needed any more."""
        self._sender = None


class LateTransfers(Late, ThreadTransfers):
    """Some sends and receives of a rank on a lane."""

    streams = None

    def __init__(self, rank, lane, *, sends, recvs, label):
        super().__init__(rank, lane, sends=(), recvs=(), label=label)
        self.sends = [_End(message, self, sent=True) for message in sends]
        self.recvs = [_End(message, self, sent=False) for message in recvs]
        self.unmatched = [*self.recvs, *self.sends]
        self.begin(self.streams)

    def finish(self):
        """Make the current stream wait."""
        self.make_current_wait()


class LateCollective(Late, ThreadCollective):
    """A rank's share in a collective."""

    streams = None

    def __init__(self, rank, ranks, what, *, inputs, outputs, combine):
        super().__init__(rank, ranks, what, inputs=(), outputs=(), combine=combine)
        self.given = [x.detach() for x in inputs]
        self.outputs = [x.detach() for x in outputs]
        in_place = {x.data_ptr() for x in self.given}
        for output in self.outputs:
            if output.data_ptr() not in in_place:
                poison(output)
        self.begin(self.streams)

    def ended(self):
        """Carry out the collective, at its first rank's end, for all of them."""
        if self.by_rank[0] is self:
            _run_collective(self.by_rank)
        super().ended()

    def finish(self):
        """Make the current stream wait."""
        self.make_current_wait()


def _run_collective(posts):
    """Carry out a collective to which all of its ranks have come: on each rank's stream, behind
    the posts of all; results are written when all inputs have been read."""
    results = []
    for post in posts:
        for other in posts:
            post.stream.wait_event(other.posted)
        with torch.cuda.stream(post.stream):
            made = post._combine([other.given for other in posts])
            results.append([result.clone() for result in made])
    read = [post.stream.record_event() for post in posts]
    for post, made in zip(posts, results, strict=True):
        for event in read:
            post.stream.wait_event(event)
        with torch.cuda.stream(post.stream):
            for output, result in zip(post.outputs, made, strict=True):
                output.copy_(result.view(output.shape))


class LateHub(ThreadHub):
    """Ranks of one process with such transfers."""

    def __init__(self, world_size, **options):
        """Options are those of `ThreadHub`; the device is cuda."""
        super().__init__(world_size, **options | {"device": torch.device("cuda")})
        streams = {"streams": _Streams()}
        self.transfers = type("Transfers", (LateTransfers,), streams)
        self.collective = type("Collective", (LateCollective,), streams)
