"""The posts of all ranks of one process, and which of them belong together.

    Matcher               all posts that are under way; says when one is over
    ThreadTransfers       some sends and receives of a rank
    ThreadCollective      a rank's share in a collective

A post waits in its queue until it is the first one there; then it is *active*, and its messages
look for their other ends among the active posts of other ranks. It is over when all of them are
found, and makes room for the next one. `Launches` says what a queue is.

Data moves at the last moment that the rules allow. A message is copied when it is posted, so that
`finish` can tell whether the sender has kept to the rules; the receiver gets it in `finish`, and
has NaN until then.
"""

import enum
from collections import defaultdict, deque

import torch

from hf_flexseq.distributed.transport import failure


class Launches(enum.Enum):
    """How the posts of a rank are carried out."""

    BY_TAG = enum.auto()
    """All at once. Messages match by tag, as on gloo."""
    BY_LANE = enum.auto()
    """One after the other in each lane. Messages match by their order, as on NCCL."""
    ONE_QUEUE = enum.auto()
    """One after the other over all lanes and collectives, as on a device that happens to run one
    transfer at a time. Every plan must end here, too."""


# ---- tensors


class Snapshot:
    """A copy of a tensor of any shape, as it was when it was posted."""

    __slots__ = ("_copy", "_event", "_tensor")

    def __init__(self, tensor):
        self._tensor = tensor
        self._copy = tensor.detach().clone()
        self._event = None  # on CUDA: when the copy is there
        if tensor.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def is_unchanged(self):
        """Return whether the tensor still has the bits that it had."""
        if self._tensor.is_meta or self._tensor.numel() == 0:
            return True
        return torch.equal(_bytes(self._tensor), _bytes(self._copy))

    def read(self):
        """Return the copy; on CUDA the current stream waits for it."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._copy.device)
            stream.wait_event(self._event)
            self._copy.record_stream(stream)
        return self._copy


def poison(tensor):
    """Fill a tensor of any shape with what shows wherever it is read.

    That is NaN, for a signed integer its least number, and for a byte 255: four of them, read as a
    float, are NaN.
    """
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.detach().fill_(torch.nan)
    elif tensor.dtype == torch.uint8:
        tensor.fill_(255)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _bytes(tensor):
    """Return uint8 [bytes] of a tensor of any shape."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# ---- posts


class ThreadPost:
    """Something that a rank has posted.

    activate(matcher)  looks for the other ends among the posts that are active
    waits_for()        says which other ends are missing
    describe()         says what was posted
    ended()            is told that the post is over
    finish()           gives the rank what it has waited for, once the post is over
    """

    def __init__(self, rank, queue):
        """queue: what the post would wait in on a transport with a queue for each lane."""
        self.rank = rank
        self.queue = queue
        self.is_over = False

    def ended(self):
        """Do nothing."""


class MessageEnd:
    """One of the two ends of a message."""

    __slots__ = ("message", "post", "snapshot")

    def __init__(self, message, post, *, sent):
        self.message = message
        self.post = post
        self.snapshot = None  # of the sender; a receiver gets it with the match
        if sent:
            self.snapshot = Snapshot(message.tensor)
        else:
            poison(message.tensor)

    @property
    def kind(self):
        """What must be equal at both ends: tag, elements and dtype."""
        return self.message.tag, self.message.tensor.numel(), self.message.tensor.dtype


class ThreadTransfers(ThreadPost):
    """Some sends and receives of a rank on a lane."""

    def __init__(self, rank, lane, *, sends, recvs, label):
        super().__init__(rank, lane)
        self.lane = lane
        self.label = label
        self.sends = [MessageEnd(message, self, sent=True) for message in sends]
        self.recvs = [MessageEnd(message, self, sent=False) for message in recvs]
        self.unmatched = [*self.recvs, *self.sends]

    def activate(self, matcher):
        for send in self.sends:
            matcher.offer(send, (self.lane, self.rank, send.message.peer), sent=True)
        for recv in self.recvs:
            matcher.offer(recv, (self.lane, recv.message.peer, self.rank), sent=False)

    def waits_for(self):
        sends = [end.message for end in self.unmatched if end in self.sends]
        recvs = [end.message for end in self.unmatched if end in self.recvs]
        reason = f"the other side has not come ({self.lane.kind})"
        return str(failure(self.rank, sends, recvs, self.label, reason))

    def describe(self):
        names = []
        for ends, way, sent in ((self.recvs, "from", False), (self.sends, "to", True)):
            for end in ends:
                peer = end.message.peer
                names.append(f"{self.label(peer, sent)} {way} rank {peer}")
        return f"rank {self.rank}, {', '.join(names)}"

    def finish(self):
        """Fill what was received, and check that what was sent has stayed as it was."""
        for send in self.sends:
            if not send.snapshot.is_unchanged():
                peer = send.message.peer
                raise RuntimeError(
                    f"rank {self.rank} has changed {self.label(peer, True)} while it was being "
                    f"sent to rank {peer}"
                )
        for recv in self.recvs:
            target = recv.message.tensor.detach()
            target.copy_(recv.snapshot.read().view(target.shape))


class ThreadCollective(ThreadPost):
    """A rank's share in a collective, which is over when all ranks of the group have come."""

    def __init__(self, rank, ranks, what, *, inputs, outputs, combine):
        """ranks: of the group. what: names the collective; must be equal on all ranks.

        combine: makes from the inputs of all ranks, by index in the group, what this rank's
            `outputs` are filled with. A tensor may be both an input and an output.
        """
        super().__init__(rank, ranks)
        self.ranks = ranks
        self.what = what
        self.inputs = [Snapshot(x) for x in inputs]
        self.outputs = tuple(outputs)
        self.by_rank = []
        self._combine = combine
        for output in outputs:
            poison(output)

    def activate(self, matcher):
        matcher.meet(self)

    def waits_for(self):
        return f"rank {self.rank} is in {self.what} of ranks {list(self.ranks)}"

    def describe(self):
        return f"rank {self.rank}, {self.what} of ranks {list(self.ranks)}"

    def finish(self):
        """Fill the outputs. Raises RuntimeError where a rank sends another number of elements."""
        inputs = [[snapshot.read() for snapshot in post.inputs] for post in self.by_rank]
        for output, result in zip(self.outputs, self._combine(inputs), strict=True):
            if output.numel() != result.numel():
                raise RuntimeError(
                    f"rank {self.rank} gets {result.numel()} elements in {self.what} of ranks "
                    f"{list(self.ranks)} where it expects {output.numel()}"
                )
            output.detach().copy_(result.view(output.shape))


# ---- who belongs to whom


class Matcher:
    """All posts that are under way."""

    def __init__(self, launches):
        self._launches = launches
        # by (rank, queue): the posts in their order, the first one active
        self._queues = defaultdict(deque)
        # ends of active posts that have not found their other end
        self._sends = defaultdict(deque)
        self._recvs = defaultdict(deque)
        self._meetings = {}

    def add(self, post):
        """Take a post. Raises RuntimeError, naming both sides, for one that can never match."""
        if self._launches is Launches.BY_TAG:
            post.activate(self)
            return
        queue = self._queue(post)
        queue.append(post)
        if queue[0] is post:
            post.activate(self)

    def waits_for(self, post):
        """Say which other ends keep a post from being over: its own, or those of the post that is
        carried out before it."""
        queue = self._queue(post)
        if not queue or queue[0] is post:
            return post.waits_for()
        return f"{queue[0].waits_for()}, and behind it stands {post.describe()}"

    def _queue(self, post):
        """Return the queue of a post."""
        name = None if self._launches is Launches.ONE_QUEUE else post.queue
        return self._queues[post.rank, name]

    def _is_over(self, post):
        """Let the next post of the queue begin."""
        post.is_over = True
        post.ended()
        if self._launches is Launches.BY_TAG:
            return
        queue = self._queue(post)
        first = queue.popleft()
        assert first is post, "a post was over before its turn"
        if queue:
            queue[0].activate(self)

    # ---- messages

    def offer(self, end, pair, *, sent):
        """Match an end of a message, or keep it until its other end is there."""
        own = self._sends[pair] if sent else self._recvs[pair]
        others = self._recvs[pair] if sent else self._sends[pair]
        by_order = self._launches is not Launches.BY_TAG
        tag = end.message.tag
        other = next((one for one in others if by_order or one.message.tag == tag), None)
        if other is None:
            own.append(end)
            return
        others.remove(other)
        send, recv = (end, other) if sent else (other, end)
        _check_equal(send, recv)
        recv.snapshot = send.snapshot
        for matched in (send, recv):
            matched.post.unmatched.remove(matched)
            if not matched.post.unmatched:
                self._is_over(matched.post)

    # ---- collectives

    def meet(self, post):
        """Keep a collective until all ranks of its group have come to it."""
        by_rank = self._meetings.setdefault(post.ranks, {})
        by_rank.setdefault(post.rank, deque()).append(post)
        waiting = [by_rank[rank] for rank in post.ranks if by_rank.get(rank)]
        if len(waiting) < len(post.ranks):
            return
        posts = [of_rank.popleft() for of_rank in waiting]
        for other in posts:
            if other.what != post.what:
                raise RuntimeError(
                    f"rank {other.rank} comes to {other.what} where rank {post.rank} comes to "
                    f"{post.what}, in the group of ranks {list(post.ranks)}"
                )
        for other in posts:
            other.by_rank = posts
        for other in posts:
            self._is_over(other)


def _check_equal(send, recv):
    """Raise RuntimeError where a message is not the one that its receiver expects."""
    if send.kind == recv.kind:
        return
    sender = send.post.rank
    receiver = recv.post.rank
    raise RuntimeError(
        f"rank {sender} sends {send.post.label(receiver, True)} {send.kind}, but rank {receiver} "
        f"expects {recv.post.label(sender, False)} {recv.kind} {send.post.lane.kind}: the order "
        "of messages differs, or their (tag, elements, dtype)"
    )
