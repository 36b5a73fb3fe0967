"""Provide the runs that a calibration times, apart from whole micro-batches of a model.

    LayerRun      attention of one layer in groups, as training runs it, on next to no tokens
    KernelRun     attention of one layer over one sequence, on every rank
    AllToAllRun   the exchanges of one layer in Ulysses groups
    RingRun       the transfers of one layer in rings
    HopRun        one transfer between two nodes, by all their ranks or by one pair

A run is made once, with all its tensors, and then called again and again. What tensors contain
does not matter to the seconds, so attention reads ones and transfers move zeros. A rank that has
no part in a run calls it, too, and does nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.cost.launches import EXCHANGES
from hf_flexseq.cost.rings import RING_PASSES
from hf_flexseq.distributed.all_to_all import all_to_all
from hf_flexseq.distributed.communicator import Communicator, Transfers
from hf_flexseq.kernels import Kernel, KernelCall
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.layers import Reach
from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.shard import make_shard

Run = Callable[[], object]


class LayerCall(NamedTuple):
    """What a layer's attention is called with."""

    query_heads: int
    kv_heads: int
    head_dim: int
    """Size of a head as kernels see it."""
    softcap: float | None = None
    """Bound of the scores; None for plain scores."""


REPEATS = 8  # of a run on next to no tokens, which takes about a millisecond


class LayerRun:
    """Attention of one layer in groups of one degree, forward and backward, several times."""

    def __init__(
        self,
        communicator: Communicator,
        micro_batch: MicroBatch,
        lengths: Sequence[int],
        kernel: Kernel,
        call: LayerCall,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """lengths: tokens of each sequence, by sequence id."""
        shard = make_shard(micro_batch, tuple(lengths), communicator.rank)
        self.context = SequenceContext(shard, communicator, kernel, device)
        tokens = shard.tokens
        options = {"dtype": dtype, "device": device, "requires_grad": True}
        # [tokens, query_heads, head_dim], [tokens, kv_heads, head_dim]
        self.q = torch.ones(tokens, call.query_heads, call.head_dim, **options)
        self.k = torch.ones(tokens, call.kv_heads, call.head_dim, **options)
        self.softcap = call.softcap

    def __call__(self) -> None:
        for _ in range(REPEATS):
            out = sequence_parallel_attention(
                self.q, self.k, self.k, self.context, softcap=self.softcap
            )
            torch.autograd.grad(out, (self.q, self.k), out)


class Repeated:
    """A run, several times."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self) -> None:
        for _ in range(REPEATS):
            self.run()


class KernelRun:
    """Attention of one layer over one sequence, forward and backward."""

    def __init__(
        self,
        kernel: Kernel,
        tokens: int,
        call: LayerCall,
        *,
        forwards: int,
        reach: Reach,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """tokens: length of the sequence. forwards: how often the forward runs for one backward.
        reach: which keys the queries read."""
        self.kernel = kernel
        self.forwards = forwards
        lengths = [span.queries for span in reach.spans(0, tokens)]
        segments = Segments(lengths, lengths, causal=True, device=device, window=reach.window)
        q = torch.ones(tokens, call.query_heads, call.head_dim, dtype=dtype, device=device)
        # The values are the keys, and the gradient of the output is the queries.
        k = torch.ones(tokens, call.kv_heads, call.head_dim, dtype=dtype, device=device)
        self.call = KernelCall(q, k, k, segments, call.head_dim**-0.5, call.softcap)

    def __call__(self) -> None:
        for _ in range(self.forwards):
            # [tokens, query_heads, head_dim] -> the same and lse [query_heads, tokens]
            out, lse = self.kernel.forward(self.call)
        self.kernel.backward(self.call, self.call.q, out, lse)


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
        part_bytes = max(1, bytes_moved // EXCHANGES // degree)
        self.sizes = [part_bytes] * len(self.ranks)  # by rank of the group
        self.sent = torch.zeros(sum(self.sizes), dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        if not self.ranks:
            return
        received = torch.empty_like(self.sent)
        for _ in range(EXCHANGES):
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
        nbytes = max(1, bytes_moved // self.transfers)
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
    """A transfer from each rank of node 0 to a rank of node 1.

    Ranks of other nodes do nothing.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        lone: bool,
        bytes_moved: int,
        device: torch.device,
        shift: int = 0,
    ) -> None:
        """lone: whether only the first rank of node 0 sends. bytes_moved: by each transfer. shift:
        index on its node of the rank that the first one sends to."""
        self.communicator = communicator
        buffer = torch.zeros(bytes_moved, dtype=torch.uint8, device=device)
        per_node = communicator.topology.ranks_per_node
        node, index = divmod(communicator.rank, per_node)
        sender = (index - shift) % per_node  # index of the rank that sends here, were this node 1
        self.sends: list[tuple[torch.Tensor, int]] = []  # (buffer, peer)
        self.recvs: list[tuple[torch.Tensor, int]] = []
        if node == 0 and (index == 0 or not lone):
            self.sends.append((buffer, per_node + (index + shift) % per_node))
        if node == 1 and (sender == 0 or not lone):
            self.recvs.append((buffer, sender))

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

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the call and pass it on: -> out [Tq, H, D], lse [H, Tq]."""
        self.forwards += 1
        return self._kernel.forward(call)

    def backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count the call and pass it on: dout and out [Tq, H, D], lse [H, Tq] -> dq [Tq, H, D],
        dk and dv [Tk, Hkv, D]."""
        self.backwards += 1
        return self._kernel.backward(call, dout, out, lse)
