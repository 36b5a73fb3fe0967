"""The transport of a job of one rank, which has no peers."""

from collections.abc import Sequence

import torch

from hf_flexseq.distributed.transport import (
    Capabilities,
    CpuGroup,
    Label,
    Lane,
    Messages,
    Pending,
    RankGroup,
    Transport,
    unnamed,
)


class LoneCpuGroup(CpuGroup):
    """Exchanges of one rank with itself."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of the only rank."""
        return [data]

    def exchange_rows(
        self, rows: torch.Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]
    ) -> torch.Tensor:
        """Return the rows [sent, width], all of which are for this rank."""
        return rows

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave the sum of one tensor as it is."""


class LoneTransport(Transport):
    """The transport of a single rank."""

    rank = 0
    world_size = 1
    capabilities = Capabilities(ordered=False)

    def __init__(self) -> None:
        self.cpu_group = LoneCpuGroup()

    def open_group(
        self, parts: Sequence[Sequence[int]], *, exchanges: bool = False
    ) -> RankGroup | None:
        """Return no group: one rank needs none."""
        return None

    def post(
        self, lane: Lane, *, sends: Messages, recvs: Messages, label: Label = unnamed
    ) -> Pending:
        """Refuse: there is no peer."""
        raise AssertionError("a job of one rank has no peers for messages")
