"""The transport over gloo, for CPUs: tagged messages on one group of all ranks.

Posts are independent of each other, and `wait` blocks the host. So all lanes are one process
group, which spares sockets, and messages are told apart by their tags (`tags.py`). The CPU
group is another one: a message that comes too late breaks all later ones of its group, and the CPU
group must still be there to find who is lost.

Facts about gloo that others rely on: a transfer is over only when it has been waited for, and a
second wait for it would block until the timeout. Its uneven all-to-all sends the two directions of
a slow link one after the other: 3 MB each way at 133 Mbit/s took 0.33 s, and 0.19 s by messages.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from hf_flexseq.distributed.process_groups import PendingTransfers, ProcessGroupTransport
from hf_flexseq.distributed.transport import (
    Capabilities,
    Label,
    Lane,
    Messages,
    failure,
    unnamed,
)


class GlooTransport(ProcessGroupTransport):
    """One rank's way to all others over gloo."""

    backend = "gloo"
    capabilities = Capabilities(ordered=False)
    meshes = 2  # groups in which each rank is connected to every other one

    def __init__(self, timeout: timedelta, device: torch.device) -> None:
        """Make the groups of all ranks on the CPU. Collective over the world."""
        assert device.type == "cpu", f"gloo carries no messages on {device.type}"
        super().__init__(timeout)
        self._messages = dist.new_group(backend="gloo", timeout=timeout)

    def post(
        self, lane: Lane, *, sends: Messages, recvs: Messages, label: Label = unnamed
    ) -> PendingTransfers:
        """See `Transport.post`. Each message is posted by itself, as gloo carries them out.

        Receives come first: on a slow link gloo otherwise serialises the two directions. Where a
        peer is known to be gone, the error names its message alone: a batch of all messages would
        also name the peers that are there, and none of them more than another.
        """
        works = []
        for message in recvs:
            try:
                works.append(dist.irecv(message.tensor, message.peer, self._messages, message.tag))
            except RuntimeError as error:
                raise failure(self.rank, (), (message,), label, error) from error
        for message in sends:
            try:
                works.append(dist.isend(message.tensor, message.peer, self._messages, message.tag))
            except RuntimeError as error:
                raise failure(self.rank, (message,), (), label, error) from error
        return PendingTransfers(works, sends, recvs, label)
