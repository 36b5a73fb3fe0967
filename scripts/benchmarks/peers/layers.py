"""Attention of one layer by several methods: the rows each holds on this rank, and how it attends.

Peers keep their own layouts, as they are meant to be used: ring-flash-attn two chunks of every
sequence (`zigzag`), yunchang one contiguous part of the packed row. Both need lengths that are
multiples of twice the ranks.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import contiguous_part, make_shard
from peers import flash_attn_stand_in

INSTALL = "pip install --no-deps ring-flash-attn==0.1.8 yunchang==0.6.4"
CPU = torch.device("cpu")
# q, k, v of this rank's rows -> out
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Call(NamedTuple):
    """One attention call of this rank."""

    rows: torch.Tensor
    """Indices of this rank's tokens in the packed row of all sequences, [tokens]."""
    attend: Attend
    """The call itself: q, k, v of these rows -> out, all [tokens, heads, head_dim]."""


class Peers(NamedTuple):
    """The imported libraries."""

    ring_flash_attn: ModuleType
    yunchang: ModuleType


def import_peers() -> Peers:
    """Import both libraries on torch's CPU kernel.

    Raises ImportError, saying how to install them, when one is missing.
    """
    flash_attn_stand_in.install()
    # Its adapter for transformers, which is not used here, does not import with transformers 5.
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules[adapters.__name__] = adapters
    try:
        import ring_flash_attn
        import yunchang
    except ImportError as error:
        raise ImportError(f"{error}; the peers are extras: {INSTALL}") from error
    return Peers(ring_flash_attn, yunchang)


# ---- ours


def flexseq_calls(
    micro_batches: Sequence[MicroBatch], lengths: Sequence[int], world: Communicator
) -> list[Call]:
    """Return our call of every micro-batch."""
    return [_flexseq_call(micro_batch, lengths, world) for micro_batch in micro_batches]


def one_group(strategy: str, lengths: Sequence[int], world: Communicator) -> MicroBatch:
    """Return the micro-batch of all sequences on all ranks."""
    ranks = tuple(range(world.world_size))
    return MicroBatch(
        groups=(Group(ranks=ranks, sequences=tuple(range(len(lengths))), strategy=strategy),)
    )


def _flexseq_call(micro_batch: MicroBatch, lengths: Sequence[int], world: Communicator) -> Call:
    """Return our call of a micro-batch."""
    shard = make_shard(micro_batch, lengths, world.rank)
    starts = list(accumulate(lengths, initial=0))  # of each sequence in the packed row
    rows = [torch.arange(0)]  # a rank may hold nothing
    for part in shard.slices:
        start = starts[part.sequence]
        rows.append(torch.arange(start + part.start, start + part.stop))
    seq_ctx = SequenceContext(shard, world, choose_kernel(CPU, torch.bfloat16, 32), CPU)
    return Call(torch.cat(rows), partial(sequence_parallel_attention, seq_ctx=seq_ctx))


# ---- peers


def zigzag_varlen_call(peers: Peers, lengths: Sequence[int], rank: int, degree: int) -> Call:
    """Return the call of ring-flash-attn's `zigzag_ring_flash_attn_varlen_func`."""
    rows = []
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        chunk, rest = divmod(length, 2 * degree)
        assert not rest, (
            f"a sequence of {length} tokens cannot be cut into {2 * degree} equal chunks"
        )
        for index in (rank, 2 * degree - 1 - rank):
            rows.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    shares = [length // degree for length in lengths]
    function = partial(
        peers.ring_flash_attn.zigzag_ring_flash_attn_varlen_func,
        cu_seqlens=_cumulative(shares),
        max_seqlen=max(shares),
        causal=True,
    )
    return Call(torch.cat(rows), function)


def receives_first(peers: Peers) -> type:
    """Return ring-flash-attn's communication with receives posted before sends.

    gloo serialises them otherwise. The library does not have this help by itself.
    """

    class ReceivesFirst(peers.ring_flash_attn.utils.RingComm):
        def commit(self) -> None:
            self._ops.sort(key=lambda op: op.op is dist.isend)
            super().commit()

    return ReceivesFirst


def ulysses_call(peers: Peers, lengths: Sequence[int], rank: int, degree: int) -> Call:
    """Return the call of yunchang's `UlyssesAttention`.

    It knows nothing of packed rows, so where there are several sequences the kernel that it calls
    is replaced by the one for packed sequences: a help that it does not have by itself.
    """
    layer = peers.yunchang.UlyssesAttention(None)
    if len(lengths) > 1:
        layer.attn_fn = partial(_packed, cu_seqlens=_cumulative(lengths), longest=max(lengths))
    start, stop = contiguous_part(sum(lengths), rank, degree)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # [tokens, heads, head_dim] -> [1, tokens, heads, head_dim] and back
        return layer(q[None], k[None], v[None], causal=True)[0]

    return Call(torch.arange(start, stop), attend)


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    longest: int,
    **options: Any,
) -> torch.Tensor:
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    return flash_attn_stand_in.flash_attn_varlen_func(q[0], k[0], v[0], *lengths, **options)[None]


def _cumulative(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
