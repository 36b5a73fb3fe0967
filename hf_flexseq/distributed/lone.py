"""The transport of a job of one rank: there is nobody to exchange anything with."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hf_flexseq.distributed.transport import (
    DEFAULT_TIMEOUT,
    Capabilities,
    Label,
    Lane,
    Message,
    Pending,
    RankGroup,
    unnamed,
)


class LoneHost:
    """Exchanges of one rank with itself."""

    __slots__ = ("phase", "timeout")

    def __init__(self) -> None:
        self.phase = "the start"
        self.timeout = DEFAULT_TIMEOUT

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        """Return the list of the only rank."""
        return [list(values)]

    def gather_values(self, value: Any) -> list[Any]:
        """Return the value of the only rank."""
        return [json.loads(json.dumps(value))]

    def broadcast_value(self, value: Any) -> Any:
        """Return the value."""
        return json.loads(json.dumps(value))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return the bytes."""
        return data

    def gather_floats(self, values: Sequence[float]) -> torch.Tensor:
        """Return the values of the only rank: float64 [1, values]."""
        return torch.tensor([list(values)], dtype=torch.float64)

    def exchange_rows(
        self, rows: torch.Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]
    ) -> torch.Tensor:
        """Return the rows [sent, width], all of which are for this rank."""
        return rows

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave the sum of one tensor as it is."""

    def barrier(self) -> None:
        """Wait for nobody."""

    def naming_lost(self) -> AbstractContextManager[None]:
        """Surround exchanges without another rank, which do not fail."""
        return nullcontext()


class LoneTransport:
    """The way of a single rank to all others, of which there are none."""

    __slots__ = ("host",)

    rank = 0
    world_size = 1
    capabilities = Capabilities(ordered=False, waits_on_stream=False)

    def __init__(self) -> None:
        self.host = LoneHost()

    def open_lane(
        self, kind: str, parts: Sequence[Sequence[int]], *, peers: Sequence[int] = ()
    ) -> Lane | None:
        """Return a lane without peers."""
        return Lane(kind, (0,))

    def open_group(self, parts: Sequence[Sequence[int]]) -> RankGroup | None:
        """Return no group: one rank needs none."""
        return None

    def post(
        self,
        lane: Lane,
        *,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        label: Label = unnamed,
    ) -> Pending:
        """Refuse: there is no peer."""
        raise AssertionError("a job of one rank has nobody to exchange messages with")
