"""Attention whose bits do not depend on the degree, the strategy, or which rank holds what:
`deterministic=True`.

Kernels round in an order that depends on the shape of a sequence, and sums depend on the order of
their terms. So here

1. every sequence lies on one grid of blocks of `BLOCK` tokens from its start, whoever holds them;
2. every pair of a block of queries and a block of keys is a sequence of its own for the kernel, at
   degree 1 as at any other, and one varlen call takes many of them (`block_pairs.py`);
3. a block belongs to one rank, the one that holds its first token, which fetches the queries and
   keys it needs;
4. that rank merges the block's outputs and sums its dQ from the nearest keys to the farthest, and
   sums the dK and dV of its keys in the order of the queries, over the whole sequence, in float32
   (float64 for float64).

Nothing is summed across ranks, so nothing depends on how many there are. In the backward a pair of
blocks of two ranks is computed by both: the one has the sum over keys, the other the sum over
queries. The price is rounds of small sums, copies of blocks, up to two backwards' work, and no
overlap inside a zone; `slowdown` measures the first two. The layout is the strategy's, the
traffic about that of `allgather`. A result of 16 bits is rounded after every block of keys;
elsewhere it is rounded once.

Rejected:

* a kernel call for each pair, which gives the same guarantee with a Python loop and some 20
  launches for each of 33,000 pairs at 32K tokens;
* one sequence of many blocks of queries over a block of keys, which saves the copies of keys, but
  libraries then tile the queries by how many there are;
* sending every pair's dK and dV to their owner to be summed there, which computes them once but
  moves as many bytes as there are pairs.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.block_pairs import (
    BLOCK,
    PaddedBlocks,
    SequenceBlocks,
    backward_rounds,
    forward_rounds,
)
from hf_flexseq.attention.local import LocalZone
from hf_flexseq.attention.relayout import Relayout
from hf_flexseq.attention.ring import merge
from hf_flexseq.attention.turns import Rows
from hf_flexseq.attention.types import Saved, Tensors, ZoneAttention
from hf_flexseq.attention.weave import END, ZoneSteps, run_zones
from hf_flexseq.distributed.communicator import Channel, Communicator
from hf_flexseq.distributed.tags import BLOCK_KEYS, BLOCK_QUERIES, BLOCK_RESULTS
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import Slice, Zone, group_slices, make_shard

# Elements that torch's functions on the CPU leave to one thread. Of more elements each thread has
# a share, and exponentials are rounded otherwise at the end of a share than within it.
SERIAL_ELEMENTS = 32768

SLOWDOWN_RUNS = 3  # times that `slowdown` measures each attention
SLOWDOWN_FIRST_TOKENS = 1024  # length that `slowdown` begins with
SLOWDOWN_SECONDS = 1.0  # that `slowdown` spends on its last length, about


class DeterministicZone:
    """This rank's part in a group of any strategy."""

    __slots__ = (
        "backward_rounds",
        "blocks_to_seq",
        "forward_rounds",
        "kernel",
        "own_blocks",
        "read_blocks",
        "reader_blocks",
        "rows",
        "seq_to_blocks",
        "seq_to_read",
        "seq_to_readers",
    )

    def __init__(self, zone: Zone, channel: Channel, kernel: Kernel, device: torch.device) -> None:
        """Deal the blocks to the ranks, and find the rows and kernel calls of this one."""
        self.rows = slice(zone.start, zone.stop)
        self.kernel = kernel

        # 1. by rank, the tokens of the strategy's layout and the blocks that follow from it
        lengths = _lengths_by_id(zone)
        tokens = [group_slices(zone.group, lengths, i) for i in range(zone.group.degree)]
        own = _dealt_blocks(tokens, lengths)

        # 2. by rank, the blocks that read those blocks and those that they read
        readers = [[blocks.readers for blocks in of_rank] for of_rank in own]
        read = [[blocks.read for blocks in of_rank] for of_rank in own]

        # 3. the ways between these layouts
        in_blocks = [_slices(of_rank) for of_rank in own]
        in_readers = [_slices(of_rank) for of_rank in readers]
        in_read = [_slices(of_rank) for of_rank in read]
        index = zone.index
        self.seq_to_blocks = Relayout(tokens, in_blocks, index, channel, device)
        self.blocks_to_seq = Relayout(in_blocks, tokens, index, channel, device)
        self.seq_to_readers = Relayout(tokens, in_readers, index, channel, device)
        self.seq_to_read = Relayout(tokens, in_read, index, channel, device)

        # 4. this rank's blocks with padding, and the kernel calls
        self.own_blocks = PaddedBlocks(own[index], device)
        self.reader_blocks = PaddedBlocks(readers[index], device)
        self.read_blocks = PaddedBlocks(read[index], device)
        self.forward_rounds = forward_rounds(own[index], device)
        self.backward_rounds = backward_rounds(own[index], device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Saved]]:
        """Return out [tokens, heads, head_dim], and save q, k, v, out, lse [tokens, heads].

        q: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim].
        """
        # [tokens, heads, head_dim] -> [tokens in blocks, heads, head_dim]
        queries = self.seq_to_blocks.post((q,), BLOCK_QUERIES)
        # [tokens, kv_heads, head_dim] -> [tokens read, kv_heads, head_dim]
        keys = self.seq_to_read.post((k, v), BLOCK_KEYS)
        yield 0.5
        (block_q,) = _padded(self.own_blocks, queries.wait())  # [blocks, BLOCK, heads, head_dim]
        block_k, block_v = _padded(self.read_blocks, keys.wait())
        results = self._attend(block_q, block_k, block_v, scale)
        # [tokens in blocks, heads, ...] -> [tokens, heads, ...]
        moving = self.blocks_to_seq.post(self._unpadded(results), BLOCK_RESULTS)
        yield END
        out, lse = moving.wait()  # [tokens, heads, head_dim], [tokens, heads]
        return out, Saved((q, k, v, out, lse))

    def backward(self, dout: torch.Tensor, saved: Saved, scale: float) -> ZoneSteps[Tensors]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        q, k, v, out, lse = saved.tensors
        # [tokens, heads, ...] -> [tokens of readers, heads, ...]
        queries = self.seq_to_readers.post((dout, q, out, lse), BLOCK_QUERIES)
        # [tokens, kv_heads, head_dim] -> [tokens read, kv_heads, head_dim]
        keys = self.seq_to_read.post((k, v), BLOCK_KEYS)
        yield 0.5
        reader_dout, reader_q, reader_out, reader_lse = _padded(
            self.reader_blocks, queries.wait()
        )  # [readers, BLOCK, heads, ...]
        block_k, block_v = _padded(self.read_blocks, keys.wait())
        grads = self._gradients(
            dout=reader_dout,
            q=reader_q,
            out=reader_out,
            lse=reader_lse,
            k=block_k,
            v=block_v,
            scale=scale,
        )
        # [tokens in blocks, heads, head_dim] -> [tokens, heads, head_dim]
        moving = self.blocks_to_seq.post(self._unpadded(grads), BLOCK_RESULTS)
        yield END
        return moving.wait()

    def backward_of_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
    ) -> ZoneSteps[Tensors]:
        """Return what `backward` does; these are the tensors that `forward` saves.

        q, out, dout: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim]. lse: [tokens,
        heads].
        """
        return self.backward(dout, Saved((q, k, v, out, lse)), scale)

    def _unpadded(self, results: Tensors) -> Tensors:
        """Return results of this rank's blocks, each [blocks, BLOCK, ...] -> [tokens in blocks,
        ...]."""
        return tuple(self.own_blocks.unpad(x) for x in results)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Tensors:
        """Return out [blocks, BLOCK, heads, head_dim] and lse [blocks, BLOCK, heads].

        q: [blocks, BLOCK, heads, head_dim]. k, v: [blocks read, BLOCK, kv_heads, head_dim].
        """
        out = q.new_zeros(q.shape, dtype=lse_dtype(q.dtype))
        lse = out.new_full(q.shape[:3], -torch.inf)
        pair_bytes = 2 * _block_bytes(q, k)  # q and out, k and v
        for call in self.forward_rounds.calls(pair_bytes):
            # [blocks, BLOCK, ...] -> [pairs * BLOCK, ...]
            (pair_q,) = _rows_of_pairs(call.queries, q)
            pair_k, pair_v = _rows_of_pairs(call.keys, k, v)
            rows_out, rows_lse = self.kernel.forward(
                pair_q, pair_k, pair_v, call.segments, scale=scale
            )
            # [pairs * BLOCK, heads, head_dim] -> [pairs, BLOCK, heads, head_dim]
            pair_out = rows_out.unflatten(0, (-1, BLOCK))
            # [heads, pairs * BLOCK] -> [pairs, BLOCK, heads]
            pair_lse = rows_lse.t().contiguous().unflatten(0, (-1, BLOCK))
            for pairs, share in call.shares():
                blocks = pairs.query_results.blocks
                _merge_round(out, lse, blocks, pair_out[share], pair_lse[share])
        return out.to(q.dtype), lse

    def _gradients(
        self,
        *,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> Tensors:
        """Return dq [blocks, BLOCK, heads, head_dim], dk and dv [blocks, BLOCK, kv_heads,
        head_dim].

        dout, q, out: [readers, BLOCK, heads, head_dim]. lse: [readers, BLOCK, heads]. k, v:
        [blocks read, BLOCK, kv_heads, head_dim].
        """
        # in float32 (float64 for float64), as lse is
        dq_sum = lse.new_zeros(self.own_blocks.blocks, *q.shape[1:])
        dk_sum = lse.new_zeros(self.own_blocks.blocks, *k.shape[1:])
        dv_sum = torch.zeros_like(dk_sum)
        pair_bytes = 4 * _block_bytes(q, k)  # dout, q, out and dq; k, v, dk and dv
        for call in self.backward_rounds.calls(pair_bytes):
            # [readers, BLOCK, ...] -> [pairs * BLOCK, ...]
            pair_dout, pair_q, pair_out, pair_lse = _rows_of_pairs(call.queries, dout, q, out, lse)
            pair_k, pair_v = _rows_of_pairs(call.keys, k, v)
            gradients = self.kernel.backward(
                pair_dout,
                pair_q,
                pair_k,
                pair_v,
                pair_out,
                pair_lse.t().contiguous(),  # [pairs * BLOCK, heads] -> [heads, pairs * BLOCK]
                call.segments,
                scale=scale,
            )
            # [pairs * BLOCK, heads, head_dim] -> [pairs, BLOCK, heads, head_dim]
            dq, dk, dv = (x.unflatten(0, (-1, BLOCK)) for x in gradients)
            for pairs, share in call.shares():
                of_queries = pairs.query_results
                of_queries.blocks.add_to(dq_sum, dq[share][of_queries.pairs])
                of_keys = pairs.key_results
                of_keys.blocks.add_to(dk_sum, dk[share][of_keys.pairs])
                of_keys.blocks.add_to(dv_sum, dv[share][of_keys.pairs])
        return dq_sum.to(q.dtype), dk_sum.to(q.dtype), dv_sum.to(q.dtype)


# ---- blocks and their results


def _padded(blocks: PaddedBlocks, tensors: Tensors) -> Tensors:
    """Return each tensor [tokens, ...] as [blocks, BLOCK, ...]."""
    return tuple(blocks.pad(x) for x in tensors)


def _rows_of_pairs(numbers: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
    """Return the blocks with these numbers, of each tensor [blocks, BLOCK, ...] ->
    [pairs * BLOCK, ...]."""
    return tuple(x.index_select(0, numbers).flatten(0, 1) for x in tensors)


def _block_bytes(q: torch.Tensor, k: torch.Tensor) -> int:
    """Return the bytes of a block of queries and a block of keys: q [blocks, BLOCK, heads,
    head_dim], k [blocks, BLOCK, kv_heads, head_dim]."""
    elements = math.prod(q.shape[1:]) + math.prod(k.shape[1:])
    return elements * q.element_size()


def _merge_round(
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Rows,
    pair_out: torch.Tensor,
    pair_lse: torch.Tensor,
) -> None:
    """Merge the results of a round into these blocks of the running result, in place.

    out: [blocks, BLOCK, heads, head_dim]. lse: [blocks, BLOCK, heads]. pair_out, pair_lse: the
    same of the pairs, one for each of these blocks.
    """
    most = blocks.tokens
    if lse.device.type == "cpu":
        most = max(1, SERIAL_ELEMENTS // math.prod(lse.shape[1:]))
    for start in range(0, blocks.tokens, most):
        piece = slice(start, min(start + most, blocks.tokens))
        merge(out, lse, _part(blocks, piece), (pair_out[piece], pair_lse[piece]))


def _part(rows: Rows, piece: slice) -> Rows:
    """Return some of these rows, counted from the first of them."""
    indices = rows.indices
    if isinstance(indices, torch.Tensor):
        return Rows(piece.stop - piece.start, indices[piece])
    assert indices is not None, "a round's blocks are known"
    first = indices.start
    return Rows(piece.stop - piece.start, slice(first + piece.start, first + piece.stop))


# ---- which rank has which blocks


def _slices(of_rank: Sequence[SequenceBlocks]) -> list[Slice]:
    """Return the tokens of a rank's blocks."""
    slices: list[Slice] = []
    for blocks in of_rank:
        slices.extend(blocks.slices)
    return slices


def _lengths_by_id(zone: Zone) -> list[int]:
    """Return the tokens of each sequence of the group, at the index of its id in the step; 0 at
    the ids of other groups' sequences."""
    lengths = [0] * (max(zone.group.sequences) + 1)
    for sequence, length in zip(zone.group.sequences, zone.lengths, strict=True):
        lengths[sequence] = length
    return lengths


def _dealt_blocks(
    tokens: Sequence[Sequence[Slice]], lengths: Sequence[int]
) -> list[list[SequenceBlocks]]:
    """Return by rank the blocks that it works on: those whose first token it holds.

    tokens: by rank, what it holds. lengths: tokens of each sequence, by id.
    """
    dealt = []
    for slices in tokens:
        numbers_by_sequence: dict[int, list[int]] = {}
        for part in slices:
            numbers = numbers_by_sequence.setdefault(part.sequence, [])
            numbers.extend(_blocks_that_begin_in(part))
        of_rank = []
        for sequence, numbers in sorted(numbers_by_sequence.items()):
            if numbers:
                of_rank.append(SequenceBlocks(sequence, lengths[sequence], tuple(sorted(numbers))))
        dealt.append(of_rank)
    return dealt


def _blocks_that_begin_in(part: Slice) -> range:
    """The numbers of the blocks whose first token is in the slice."""
    first = -(-part.start // BLOCK)  # rounded up
    stop = -(-part.stop // BLOCK)
    return range(first, stop)


# ---- the price


class Slowdown(NamedTuple):
    """What deterministic attention costs on one rank."""

    tokens: int  # of the sequence that was measured
    factor: float  # how many times as long it takes as one kernel call


def slowdown(
    longest: int, q: torch.Tensor, k: torch.Tensor, communicator: Communicator, kernel: Kernel
) -> Slowdown:
    """Measure how many times as long deterministic attention takes as one kernel call.

    The sequence has `longest` tokens, or the largest power of two of them that is measured in
    about `SLOWDOWN_SECONDS`. This rank has it alone; where ranks share one, each pair of blocks of
    two ranks is computed twice in the backward.

    q: [1, heads, head_dim] and k: [1, kv_heads, head_dim], one token.
    """
    tokens = min(longest, SLOWDOWN_FIRST_TOKENS)
    while True:
        usual_s, deterministic_s = _seconds_of_both(tokens, q, k, communicator, kernel)
        # twice the tokens have four times the pairs
        next_s = 4 * SLOWDOWN_RUNS * (usual_s + deterministic_s)
        if tokens == longest or next_s > SLOWDOWN_SECONDS:
            return Slowdown(tokens, deterministic_s / usual_s)
        tokens = min(2 * tokens, longest)


def _seconds_of_both(
    tokens: int, q: torch.Tensor, k: torch.Tensor, communicator: Communicator, kernel: Kernel
) -> tuple[float, float]:
    """Measure the seconds of one kernel call, and those of deterministic attention.

    q: [1, heads, head_dim] and k: [1, kv_heads, head_dim], each token of the sequence.
    """
    group = Group(ranks=(communicator.rank,), sequences=(0,), strategy="local")
    micro_batch = MicroBatch(groups=(group,))
    (zone,) = make_shard(micro_batch, [tokens], communicator.rank).zones
    channel = Channel(communicator, group, 0)
    usual = LocalZone(slice(0, tokens), zone.lengths, kernel, q.device)
    deterministic = DeterministicZone(zone, channel, kernel, q.device)
    q = q.repeat(tokens, 1, 1)  # [1, heads, head_dim] -> [tokens, heads, head_dim]
    k = k.repeat(tokens, 1, 1)
    return _seconds(usual, q, k), _seconds(deterministic, q, k)


def _seconds(zone: ZoneAttention, q: torch.Tensor, k: torch.Tensor) -> float:
    """Measure the seconds of a forward and a backward: the least of a few runs, for others may be
    at work on the machine. q: [tokens, heads, head_dim]. k: [tokens, kv_heads, head_dim]."""
    least = float("inf")
    for _ in range(SLOWDOWN_RUNS):
        start = time.perf_counter()
        ((out, saved),) = run_zones([zone.forward(q, k, k, 1.0)])
        run_zones([zone.backward(out, saved, 1.0)])
        if q.is_cuda:
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - start)
    return least
