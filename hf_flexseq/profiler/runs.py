"""Provide the runs that a calibration times, apart from whole micro-batches of a model.

    KernelRun     attention of one layer over one sequence, on every rank
    AllToAllRun   the exchanges of one layer in Ulysses groups
    RingRun       the transfers of one layer in rings
    HopRun        one transfer between two nodes, by all their ranks or by one pair

A run is made once, with all its tensors, and then called again and again. What tensors contain
does not matter to the seconds, so attention reads ones and transfers move zeros. A rank that has
no part in a run calls it, too, and does nothing.
"""

from collections.abc import Callable, Sequence

import torch

from hf_flexseq.distributed.all_to_all import all_to_all
from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.segments import Segments

Run = Callable[[], object]

ALL_TO_ALLS = 4  # of a layer: to heads and back, in the forward and in the backward
RING_PASSES = 3  # of a layer: keys and values twice (forward, backward), their gradients once


class KernelRun:
    """Attention of one layer over one sequence, forward and backward."""

    def __init__(
        self,
        kernel: Kernel,
        tokens: int,
        *,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        forwards: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """tokens: length of the sequence. forwards: how often the forward runs for one
        backward."""
        self.kernel = kernel
        self.forwards = forwards
        self.scale = head_dim**-0.5
        self.segments = Segments((tokens,), (tokens,), causal=True, device=device)
        self.q = torch.ones(tokens, query_heads, head_dim, dtype=dtype, device=device)
        # The values are the keys, and the gradient of the output is the queries.
        self.k = torch.ones(tokens, kv_heads, head_dim, dtype=dtype, device=device)

    def __call__(self) -> None:
        for _ in range(self.forwards):
            # [tokens, query_heads, head_dim] -> the same and lse [query_heads, tokens]
            out, lse = self.kernel.forward(self.q, self.k, self.k, self.segments, scale=self.scale)
        self.kernel.backward(
            self.q, self.q, self.k, self.k, out, lse, self.segments, scale=self.scale
        )


class AllToAllRun:
    """Exchanges of one layer in Ulysses groups: to heads and back, forward and backward."""

    def __init__(
        self,
        communicator: Communicator,
        starts: Sequence[int],
        degree: int,
        *,
        bytes_moved: int,
        device: torch.device,
    ) -> None:
        """starts: first ranks of the groups. bytes_moved: by a rank in all its exchanges."""
        self.communicator = communicator
        self.ranks = own_group(communicator, starts, degree)
        part_bytes = bytes_moved // ALL_TO_ALLS // degree
        self.sizes = [part_bytes] * len(self.ranks)  # by rank of the group
        self.sent = torch.zeros(sum(self.sizes), dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        if not self.ranks:
            return
        received = torch.empty_like(self.sent)
        for _ in range(ALL_TO_ALLS):
            all_to_all(
                self.communicator, self.ranks, self.sent, received, self.sizes, self.sizes
            ).wait()


class RingRun:
    """Transfers of one layer in rings, each to the next rank of the group.

    Keys and values go around in the forward and again in the backward, and so do their gradients.
    Each of these passes takes `degree` - 1 transfers.
    """

    def __init__(
        self,
        communicator: Communicator,
        starts: Sequence[int],
        degree: int,
        *,
        bytes_moved: int,
        device: torch.device,
    ) -> None:
        """starts: first ranks of the groups. bytes_moved: by a rank in all its transfers."""
        self.communicator = communicator
        self.transfers = RING_PASSES * (degree - 1)
        self.ranks = own_group(communicator, starts, degree)
        nbytes = bytes_moved // self.transfers
        self.outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.incoming = torch.empty_like(self.outgoing)

    def __call__(self) -> None:
        if not self.ranks:
            return
        for _ in range(self.transfers):
            self.post().wait()

    def post(self) -> Transfers:
        """Begin one transfer of `outgoing` to the next rank and return it."""
        degree = len(self.ranks)
        index = self.communicator.rank - self.ranks[0]
        next_rank = self.ranks[(index + 1) % degree]
        previous_rank = self.ranks[(index - 1) % degree]
        return Transfers(
            self.communicator,
            sends=[(self.outgoing, next_rank)],
            recvs=[(self.incoming, previous_rank)],
        )


class HopRun:
    """A transfer from each rank of node 0 to the rank with the same index in node 1.

    Ranks of other nodes do nothing.
    """

    def __init__(
        self, communicator: Communicator, *, lone: bool, bytes_moved: int, device: torch.device
    ) -> None:
        """lone: whether only the first rank of node 0 sends. bytes_moved: by each transfer."""
        self.communicator = communicator
        buffer = torch.zeros(bytes_moved, dtype=torch.uint8, device=device)
        per_node = communicator.topology.ranks_per_node
        node, index = divmod(communicator.rank, per_node)
        takes_part = index == 0 or not lone
        self.sends: list[tuple[torch.Tensor, int]] = []  # (buffer, peer)
        self.recvs: list[tuple[torch.Tensor, int]] = []
        if takes_part and node == 0:
            self.sends.append((buffer, communicator.rank + per_node))
        if takes_part and node == 1:
            self.recvs.append((buffer, communicator.rank - per_node))

    def __call__(self) -> None:
        Transfers(self.communicator, sends=self.sends, recvs=self.recvs).wait()


def own_group(communicator: Communicator, starts: Sequence[int], degree: int) -> list[int]:
    """List the ranks of the group that this rank is in, or none when it is in no group.

    starts: first ranks of the groups, which have `degree` ranks each.
    """
    for start in starts:
        if start <= communicator.rank < start + degree:
            return list(range(start, start + degree))
    return []


class CountingKernel:
    """A kernel that counts its calls, to see how often a checkpointed layer repeats attention."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = kernel.name
        self.wide_gradients = kernel.wide_gradients
        self.forwards = 0
        self.backwards = 0
        self._kernel = kernel

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the call and pass it on: q [Tq, H, D], k and v [Tk, Hkv, D] -> out [Tq, H, D],
        lse [H, Tq]."""
        self.forwards += 1
        return self._kernel.forward(q, k, v, segments, scale=scale)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count the call and pass it on: dout and out [Tq, H, D], lse [H, Tq] -> dq [Tq, H, D],
        dk and dv [Tk, Hkv, D]."""
        self.backwards += 1
        return self._kernel.backward(dout, q, k, v, out, lse, segments, scale=scale)
