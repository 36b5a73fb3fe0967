"""Time runs on all ranks in turns: one after the other, round by round, so that a busy moment
spoils none of them.

Ranks start each run together. A rank's figure is the median over the rounds, the first of which,
where memory is allocated and kernels are chosen, does not count.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from hf_flexseq.distributed.all_to_all import all_to_all
from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.distributed.control import gather_ints, gather_objects
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.segments import Segments

Run = Callable[[], object]


def median_seconds(
    runs: Sequence[Run], communicator: Communicator, device: torch.device, rounds: int
) -> list[list[float]]:
    """[run][rank]: seconds of each of `runs`, the same list on every rank. Collective."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, seconds in zip(runs, found, strict=True):
            gather_ints(communicator, [0])  # all start together
            seconds.append(_seconds(run, device))
    by_rank = gather_objects(communicator, [statistics.median(seconds[1:]) for seconds in found])
    return [list(of_run) for of_run in zip(*by_rank, strict=True)]


def _seconds(run: Run, device: torch.device) -> float:
    _finish(device)
    began = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class KernelRun:
    """Attention of one layer over one sequence, forward and backward."""

    def __init__(
        self,
        kernel: Kernel,
        tokens: int,
        *,
        heads: tuple[int, int, int],
        forwards: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """heads: (query heads, key heads, head size). forwards: how often the forward runs for one
        backward."""
        query_heads, key_heads, head_dim = heads
        self.kernel, self.forwards, self.scale = kernel, forwards, head_dim**-0.5
        self.segments = Segments((tokens,), (tokens,), causal=True, device=device)
        self.q = torch.ones(tokens, query_heads, head_dim, dtype=dtype, device=device)
        self.k = torch.ones(tokens, key_heads, head_dim, dtype=dtype, device=device)

    def __call__(self) -> None:
        for _ in range(self.forwards):
            out, lse = self.kernel.forward(self.q, self.k, self.k, self.segments, scale=self.scale)
        self.kernel.backward(
            self.q, self.q, self.k, self.k, out, lse, self.segments, scale=self.scale
        )


class AllToAllRun:
    """One layer's exchanges of a Ulysses group: to heads and back, forward and backward. Other
    ranks look on."""

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
        self.parts = [
            torch.zeros(bytes_moved // 4 // degree, dtype=torch.uint8, device=device)
            for _ in self.ranks
        ]

    def __call__(self) -> None:
        for _ in range(4 if self.ranks else 0):
            all_to_all(
                self.communicator, self.ranks, self.parts, [part.numel() for part in self.parts]
            ).wait()


class RingRun:
    """One layer's transfers of a ring: keys and values in the forward and again in the backward,
    and their gradients, each to the next rank of the group `degree` - 1 times. Other ranks look
    on."""

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
        self.communicator, self.times = communicator, 3 * (degree - 1)
        self.ranks = own_group(communicator, starts, degree)
        self.outgoing = torch.zeros(bytes_moved // self.times, dtype=torch.uint8, device=device)
        self.incoming = torch.empty_like(self.outgoing)

    def __call__(self) -> None:
        for _ in range(self.times if self.ranks else 0):
            self.post().wait()

    def post(self) -> Transfers:
        """One transfer on its way."""
        place, degree = self.communicator.rank - self.ranks[0], len(self.ranks)
        ahead, behind = self.ranks[(place + 1) % degree], self.ranks[(place - 1) % degree]
        return Transfers(
            self.communicator, sends=[(self.outgoing, ahead)], recvs=[(self.incoming, behind)]
        )


def own_group(communicator: Communicator, starts: Sequence[int], degree: int) -> list[int]:
    """The ranks of the group that this rank is in; none when it is in none of those that begin at
    `starts`."""
    start = next((start for start in starts if start <= communicator.rank < start + degree), None)
    return [] if start is None else list(range(start, start + degree))


class CountingKernel:
    """A kernel that counts its calls, to see how often a checkpointed layer repeats its
    attention."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.wide_gradients, self._kernel = kernel.name, kernel.wide_gradients, kernel
        self.forwards = self.backwards = 0

    def forward(self, *args: object, **kwargs: object):
        self.forwards += 1
        return self._kernel.forward(*args, **kwargs)

    def backward(self, *args: object, **kwargs: object):
        self.backwards += 1
        return self._kernel.backward(*args, **kwargs)


def ring_overlap(
    communicator: Communicator,
    compute: Run,
    *,
    bytes_moved: int,
    device: torch.device,
    rounds: int,
) -> float:
    """How much of the shorter one, of `compute` and of a transfer to the next rank, takes no time
    of its own when both run together: 0 to 1. Collective."""
    ring = RingRun(
        communicator, (0,), communicator.world_size, bytes_moved=bytes_moved, device=device
    )

    def both() -> None:
        transfers = ring.post()
        compute()
        transfers.wait()

    by_run = median_seconds(
        [compute, lambda: ring.post().wait(), both], communicator, device, rounds
    )
    compute_s, transfer_s, both_s = (statistics.mean(seconds) for seconds in by_run)
    hidden = (compute_s + transfer_s - both_s) / min(compute_s, transfer_s)
    return min(max(hidden, 0.0), 1.0)


class HopRun:
    """One transfer from every rank of node 0 to the rank with its place in node 1, or only from
    the first. Other ranks look on."""

    def __init__(
        self, communicator: Communicator, *, lone: bool, bytes_moved: int, device: torch.device
    ) -> None:
        self.communicator = communicator
        buffer = torch.zeros(bytes_moved, dtype=torch.uint8, device=device)
        node, place = divmod(communicator.rank, communicator.topology.ranks_per_node)
        works = node < 2 and (place == 0 or not lone)
        self.sends = (
            [(buffer, communicator.rank + communicator.topology.ranks_per_node)]
            if works and not node
            else []
        )
        self.recvs = (
            [(buffer, communicator.rank - communicator.topology.ranks_per_node)]
            if works and node
            else []
        )

    def __call__(self) -> None:
        Transfers(self.communicator, sends=self.sends, recvs=self.recvs).wait()


def measured_nics(
    communicator: Communicator, *, bytes_moved: int, device: torch.device, rounds: int
) -> tuple[int, float]:
    """How many links between nodes the ranks of a node have, and seconds of a transfer that is
    next to nothing.

    A node's ranks that send all together take as many times as long as one of them alone as there
    are ranks to a link. Collective; for two nodes and more.
    """
    per_node = communicator.topology.ranks_per_node
    runs = [
        HopRun(communicator, lone=lone, bytes_moved=n, device=device)
        for lone, n in ((True, bytes_moved), (False, bytes_moved), (True, 1))
    ]
    lone_s, together_s, transfer_s = map(max, median_seconds(runs, communicator, device, rounds))
    if lone_s < 2 * transfer_s:
        return 1, transfer_s  # too short to tell; one NIC is routed over by nobody
    slowdown = max(1.0, (together_s - transfer_s) / (lone_s - transfer_s))
    return max(1, round(per_node / slowdown)), transfer_s
