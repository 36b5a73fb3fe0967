"""Attention whose bits do not depend on the degree, the strategy, or which rank holds what:
`deterministic=True`.

Kernels round in an order that depends on the shape of a call, and sums depend on the order of
their terms. So here

1. every sequence lies on one grid of blocks of `BLOCK` tokens from its start, whoever holds them;
2. one kernel call computes one block of queries over one block of keys, at degree 1 as at any
   other;
3. a block belongs to one rank, the one that holds its first token, which fetches the queries and
   keys it needs;
4. that rank merges the block's outputs and sums its dQ in the order of the keys, and sums the dK
   and dV of its keys in the order of the queries, over the whole sequence, in float32 (float64 for
   float64).

Nothing is summed across ranks, so nothing depends on how many there are. In the backward a pair of
blocks of two ranks is computed by both: the one has the sum over keys, the other the sum over
queries. Rejected: sending every pair's dK and dV to their owner to be summed there, which computes
them once but moves as many bytes as there are pairs.

The price is many small calls, up to two backwards' work, and no overlap inside a zone; `slowdown`
measures the first. The layout is the strategy's, the traffic about that of `allgather`. A result
of 16 bits is rounded after every block of keys; elsewhere it is rounded once.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.local import LocalZone
from hf_flexseq.attention.relayout import Relayout
from hf_flexseq.attention.ring import merge
from hf_flexseq.attention.turns import Rows
from hf_flexseq.attention.types import Saved, Tensors, ZoneAttention
from hf_flexseq.attention.weave import END, ZoneSteps, run_zones
from hf_flexseq.distributed.communicator import Channel, Communicator
from hf_flexseq.distributed.tags import BLOCK_KEYS, BLOCK_QUERIES, BLOCK_RESULTS
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import Slice, Zone, group_slices, make_shard

# Tokens of a block: one tile of the CUDA kernels in the direction in which they would add
# atomically.
BLOCK = 128

EVERY_ROW = Rows(BLOCK, None)
SLOWDOWN_RUNS = 4  # times that `slowdown` measures each attention


class KeyBlocks(NamedTuple):
    """The blocks of one sequence that a rank works on: as queries and as keys."""

    sequence: int  # id in the step
    length: int  # tokens of the sequence
    numbers: tuple[int, ...]  # of the blocks, counted from the start of the sequence, ascending

    def block(self, number: int) -> Slice:
        """The tokens of a block of the sequence; the last one may be shorter than `BLOCK`."""
        start = number * BLOCK
        stop = min(start + BLOCK, self.length)
        return Slice(sequence=self.sequence, start=start, stop=stop)

    @property
    def slices(self) -> list[Slice]:
        """The tokens of these blocks."""
        return [self.block(number) for number in self.numbers]

    @property
    def readers(self) -> Slice:
        """The tokens from the first of these blocks on: their queries read keys of the blocks."""
        start = self.block(self.numbers[0]).start
        return Slice(sequence=self.sequence, start=start, stop=self.length)

    @property
    def read(self) -> Slice:
        """The tokens up to the last of these blocks: queries of the blocks read their keys."""
        stop = self.block(self.numbers[-1]).stop
        return Slice(sequence=self.sequence, start=0, stop=stop)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (block of queries, block of keys), at least one of them among these blocks, in an
        order that is ascending in both."""
        mine = set(self.numbers)
        all_blocks = -(-self.length // BLOCK)  # rounded up
        for q in range(self.numbers[0], all_blocks):
            for k in range(q + 1):
                if q in mine or k in mine:
                    yield q, k


class BlockPair(NamedTuple):
    """A kernel call: a block of queries over a block of keys."""

    queries: slice  # rows of the queries that were fetched
    keys: slice  # rows of the keys that were fetched
    causal: bool  # both are the same block
    query_results: slice | None  # rows of this rank's results of queries; None: another rank's
    key_results: slice | None  # rows of this rank's results of keys; None: another rank's

    def segments(self, device: torch.device) -> Segments:
        """The lengths of the call's queries and keys."""
        return _segments(_size(self.queries), _size(self.keys), self.causal, device)


class DeterministicZone:
    """This rank's part in a group of any strategy."""

    __slots__ = (
        "backward_calls",
        "blocks_to_seq",
        "forward_calls",
        "kernel",
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
        dealt = _dealt_blocks(tokens, lengths)

        # 2. by rank, the tokens of its blocks, those that read them and those that they read
        in_blocks: list[list[Slice]] = []
        readers: list[list[Slice]] = []
        read: list[list[Slice]] = []
        for of_rank in dealt:
            slices: list[Slice] = []
            for blocks in of_rank:
                slices.extend(blocks.slices)
            in_blocks.append(slices)
            readers.append([blocks.readers for blocks in of_rank])
            read.append([blocks.read for blocks in of_rank])

        # 3. the ways between these layouts
        self.seq_to_blocks = Relayout(tokens, in_blocks, zone.index, channel, device)
        self.blocks_to_seq = Relayout(in_blocks, tokens, zone.index, channel, device)
        self.seq_to_readers = Relayout(tokens, readers, zone.index, channel, device)
        self.seq_to_read = Relayout(tokens, read, zone.index, channel, device)

        # 4. the kernel calls
        self.forward_calls = tuple(_forward_calls(dealt[zone.index]))
        self.backward_calls = tuple(_backward_calls(dealt[zone.index]))

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
        (block_q,) = queries.wait()
        block_k, block_v = keys.wait()
        results = self._attend(block_q, block_k, block_v, scale)
        # [tokens in blocks, heads, ...] -> [tokens, heads, ...]
        moving = self.blocks_to_seq.post(results, BLOCK_RESULTS)
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
        reader_dout, reader_q, reader_out, reader_lse = queries.wait()
        block_k, block_v = keys.wait()
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
        moving = self.blocks_to_seq.post(grads, BLOCK_RESULTS)
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

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Tensors:
        """Return out [tokens in blocks, heads, head_dim] and lse [tokens in blocks, heads].

        q: [tokens in blocks, heads, head_dim]. k, v: [tokens read, kv_heads, head_dim].
        """
        out = q.new_zeros(q.shape, dtype=lse_dtype(q.dtype))
        lse = out.new_full(q.shape[:2], -torch.inf)
        for call in self.forward_calls:
            (block_q,) = _copies(call.queries, q)
            block_k, block_v = _copies(call.keys, k, v)
            segments = call.segments(q.device)
            block_out, block_lse = self.kernel.forward(
                block_q, block_k, block_v, segments, scale=scale
            )
            block_lse = block_lse.t().contiguous()  # [heads, block] -> [block, heads]
            rows = call.query_results
            merge(out[rows], lse[rows], EVERY_ROW, (block_out, block_lse))
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
        """Return dq [tokens in blocks, heads, head_dim], dk and dv [tokens in blocks, kv_heads,
        head_dim].

        dout, q, out: [tokens of readers, heads, head_dim]. lse: [tokens of readers, heads]. k, v:
        [tokens read, kv_heads, head_dim].
        """
        tokens = self.seq_to_blocks.tokens
        # in float32 (float64 for float64), as lse is
        dq_sum = lse.new_zeros(tokens, *q.shape[1:])
        dk_sum = lse.new_zeros(tokens, *k.shape[1:])
        dv_sum = lse.new_zeros(tokens, *v.shape[1:])
        for call in self.backward_calls:
            block_dout, block_q, block_out, block_lse = _copies(call.queries, dout, q, out, lse)
            block_k, block_v = _copies(call.keys, k, v)
            dq, dk, dv = self.kernel.backward(
                block_dout,
                block_q,
                block_k,
                block_v,
                block_out,
                block_lse.t().contiguous(),  # [block, heads] -> [heads, block]
                call.segments(q.device),
                scale=scale,
            )
            if call.query_results is not None:
                dq_sum[call.query_results] += dq
            if call.key_results is not None:
                dk_sum[call.key_results] += dk
                dv_sum[call.key_results] += dv
        return dq_sum.to(q.dtype), dk_sum.to(q.dtype), dv_sum.to(q.dtype)


def _lengths_by_id(zone: Zone) -> list[int]:
    """Return the tokens of each sequence of the group, at the index of its id in the step; 0 at
    the ids of other groups' sequences."""
    lengths = [0] * (max(zone.group.sequences) + 1)
    for sequence, length in zip(zone.group.sequences, zone.lengths, strict=True):
        lengths[sequence] = length
    return lengths


def _dealt_blocks(
    tokens: Sequence[Sequence[Slice]], lengths: Sequence[int]
) -> list[list[KeyBlocks]]:
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
                of_rank.append(KeyBlocks(sequence, lengths[sequence], tuple(sorted(numbers))))
        dealt.append(of_rank)
    return dealt


def _blocks_that_begin_in(part: Slice) -> range:
    """The numbers of the blocks whose first token is in the slice."""
    first = -(-part.start // BLOCK)  # rounded up
    stop = -(-part.stop // BLOCK)
    return range(first, stop)


def _forward_calls(dealt: Sequence[KeyBlocks]) -> Iterator[BlockPair]:
    """Yield the calls of this rank's blocks of queries, in the order of the keys.

    The queries of a call are rows of the tokens in blocks, its keys rows of the tokens read.
    """
    key_row = 0  # where the keys of the sequence begin
    for blocks, block_rows in _with_rows(dealt):
        for q, k in blocks.pairs():
            if q in block_rows:
                yield BlockPair(
                    queries=block_rows[q],
                    keys=_rows(blocks.block(k), key_row),
                    causal=q == k,
                    query_results=block_rows[q],
                    key_results=None,
                )
        key_row += blocks.read.tokens


def _backward_calls(dealt: Sequence[KeyBlocks]) -> Iterator[BlockPair]:
    """Yield the calls of this rank's blocks of queries and of keys, ascending in both.

    The queries of a call are rows of the tokens of readers, its keys rows of the tokens read.
    """
    query_row = 0  # where the readers of the sequence begin
    key_row = 0  # where the keys of the sequence begin
    for blocks, block_rows in _with_rows(dealt):
        for q, k in blocks.pairs():
            yield BlockPair(
                queries=_rows(blocks.block(q), query_row - blocks.readers.start),
                keys=_rows(blocks.block(k), key_row),
                causal=q == k,
                query_results=block_rows.get(q),
                key_results=block_rows.get(k),
            )
        query_row += blocks.readers.tokens
        key_row += blocks.read.tokens


def _with_rows(dealt: Sequence[KeyBlocks]) -> Iterator[tuple[KeyBlocks, dict[int, slice]]]:
    """Yield every sequence's blocks, with the rows of each among all blocks of this rank."""
    start = 0
    for blocks in dealt:
        rows = {}
        for number in blocks.numbers:
            stop = start + blocks.block(number).tokens
            rows[number] = slice(start, stop)
            start = stop
        yield blocks, rows


def _rows(block: Slice, shift: int) -> slice:
    """The rows of a block, where token 0 of its sequence would be row `shift`."""
    return slice(block.start + shift, block.stop + shift)


def _size(rows: slice) -> int:
    """The number of rows."""
    return int(rows.stop - rows.start)


def _copies(rows: slice, *tensors: torch.Tensor) -> Tensors:
    """Copy [rows, ...] of each tensor [tokens, ...] to memory of its own: some libraries round by
    how their operands are aligned."""
    return tuple(x[rows].clone() for x in tensors)


@functools.cache
def _segments(queries: int, keys: int, causal: bool, device: torch.device) -> Segments:
    """The lengths of a call of one sequence; few differ, so they are kept."""
    return Segments((queries,), (keys,), causal=causal, device=device)


def slowdown(
    q: torch.Tensor, k: torch.Tensor, communicator: Communicator, kernel: Kernel
) -> float:
    """Measure how many times as long deterministic attention takes as one kernel call.

    q: [tokens, heads, head_dim] and k: [tokens, kv_heads, head_dim] of one sequence, which this
    rank has alone here; where ranks share one, each pair of blocks of two ranks is computed twice
    in the backward.
    """
    group = Group(ranks=(communicator.rank,), sequences=(0,), strategy="local")
    micro_batch = MicroBatch(groups=(group,))
    (zone,) = make_shard(micro_batch, [len(q)], communicator.rank).zones
    channel = Channel(communicator, group, 0)
    usual = LocalZone(slice(0, len(q)), zone.lengths, kernel, q.device)
    deterministic = DeterministicZone(zone, channel, kernel, q.device)
    return _seconds(deterministic, q, k) / _seconds(usual, q, k)


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
