"""Ranks that are threads, for `hf/model/probe.py`: messages by tag, no groups or values."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from hf_flexseq.distributed.lone_rank import LoneTransport
from hf_flexseq.distributed.transport import Label, Lane, Message, Messages, unnamed

STUCK_S = 300.0  # seconds that a rank waits for a message


class Mail:
    """Messages between ranks that are threads. One rank runs at a time."""

    def __init__(self) -> None:
        self.turn = threading.Condition()  # the rank that runs holds it
        # by (sender, receiver, tag)
        self.messages: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.failed = False

    def take(self, key: tuple[int, int, int]) -> torch.Tensor:
        """Return the next message of a key. Other ranks run until it is sent."""
        messages = self.messages[key]
        sent = self.turn.wait_for(lambda: messages or self.failed, STUCK_S)
        if not sent or self.failed:
            raise RuntimeError(f"rank {key[1]} waits for a message from rank {key[0]}")
        return messages.popleft()


class ThreadTransport(LoneTransport):
    """The transport of a rank that is a thread: messages by tag, no groups, no values."""

    def __init__(self, rank: int, world_size: int, mail: Mail) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self.mail = mail

    def post(
        self, lane: Lane, *, sends: Messages, recvs: Messages, label: Label = unnamed
    ) -> "_Receives":
        """Send copies, see `Transport.post`."""
        for message in sends:
            key = (self.rank, message.peer, message.tag)
            self.mail.messages[key].append(message.tensor.detach().clone())
        self.mail.turn.notify_all()
        return _Receives(self, recvs)


class _Receives(NamedTuple):
    """Messages that a rank expects; see `Pending`."""

    transport: ThreadTransport
    messages: Sequence[Message]

    def wait(self) -> None:
        """Fill the tensors of the messages."""
        rank = self.transport.rank
        for message in self.messages:
            sent = self.transport.mail.take((message.peer, rank, message.tag))
            message.tensor.detach().copy_(sent.view_as(message.tensor))


def run_threads(function: Callable[[ThreadTransport], None], world_size: int) -> None:
    """Run a function as every rank. Raises the error of the first rank that fails."""
    mail = Mail()
    errors: list[BaseException] = []
    torch_threads = torch.get_num_threads()

    def run_rank(rank: int) -> None:
        with mail.turn:
            # Threads of torch's own would outlive this one, and hang processes forked later.
            torch.set_num_threads(1)
            try:
                function(ThreadTransport(rank, world_size, mail))
            except BaseException as error:  # raised again by the caller's thread
                errors.append(error)
                mail.failed = True
                mail.turn.notify_all()

    with ThreadPoolExecutor(world_size) as threads:
        list(threads.map(run_rank, range(world_size)))
    torch.set_num_threads(torch_threads)
    if errors:
        raise errors[0]
