"""The transport of a rank of many that is all alone: whatever it waits for is there at once.

What it receives is whatever stood in the memory. So results mean nothing, and times are those of
the rank's own work: its kernels, and its host.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_flexseq.distributed.transport import (
    Capabilities,
    CpuGroup,
    Label,
    Lane,
    Messages,
    NamedLanes,
    own_part,
    unnamed,
)


class Over:
    """Something that was over when it was posted."""

    __slots__ = ()

    def wait(self) -> None:
        """Wait for nothing."""


class StubGroup:
    """Collectives in which nobody else takes part."""

    __slots__ = ("ranks",)

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Refuse: there are no other processes."""
        raise NotImplementedError("a rank that is all alone has no process group")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is."""

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_counts: Sequence[int],
        sent_counts: Sequence[int],
        *,
        label: Label = unnamed,
    ) -> Over:
        """Leave `received` as it is."""
        return Over()


class StubCpuGroup(CpuGroup):
    """Exchanges in which all other ranks have the values of this one."""

    __slots__ = ("_world_size",)

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes once for every rank."""
        return [data] * self._world_size

    def exchange_rows(
        self, rows: torch.Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]
    ) -> torch.Tensor:
        """Return zeros, as many rows as are received."""
        return rows.new_zeros(sum(received_counts), rows.shape[1])

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave the tensor as it is."""


class StubTransport(NamedLanes):
    """One rank's way to others that are not there."""

    __slots__ = ("cpu_group", "rank", "world_size")

    capabilities = Capabilities(ordered=True, waits_on_stream=True)

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.cpu_group = StubCpuGroup(world_size)

    def open_group(
        self, parts: Sequence[Sequence[int]], *, exchanges: bool = False
    ) -> StubGroup | None:
        """See `Transport.open_group`; nothing is made."""
        own = own_part(parts, self.rank)
        return None if own is None else StubGroup(own)

    def post(
        self, lane: Lane, *, sends: Messages, recvs: Messages, label: Label = unnamed
    ) -> Over:
        """See `Transport.post`; nothing moves."""
        return Over()
