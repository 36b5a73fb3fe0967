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

The price is many small calls, up to twice the backward, and no overlap inside a zone; `slowdown`
measures the first. The layout is the strategy's, the traffic about that of `allgather`. Results of
16 bits are rounded once per block of keys, not once.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.attention.local import LocalZone, Tensors
from hf_flexseq.attention.relayout import Relayout
from hf_flexseq.attention.ring import merge
from hf_flexseq.attention.turns import Rows
from hf_flexseq.attention.weave import END, ZoneSteps, run_zones
from hf_flexseq.distributed.communicator import Channel, Communicator
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import Slice, Zone, group_slices, make_shard

BLOCK = 128  # one tile of the CUDA kernels in the direction in which they would add atomically
QUERIES, KEYS, RESULTS = 0, 8, 16  # tags
EVERY_ROW = Rows(BLOCK, None)


class KeyBlocks(NamedTuple):
    """A sequence's blocks that one rank works on, by number, ascending."""

    sequence: int
    length: int
    numbers: tuple[int, ...]

    def block(self, number: int) -> Slice:
        return Slice(
            sequence=self.sequence,
            start=number * BLOCK,
            stop=min((number + 1) * BLOCK, self.length),
        )

    @property
    def own(self) -> list[Slice]:
        return [self.block(number) for number in self.numbers]

    @property
    def later(self) -> Slice:
        """Whose queries read the keys of these blocks, or are in them."""
        return Slice(
            sequence=self.sequence, start=self.block(self.numbers[0]).start, stop=self.length
        )

    @property
    def earlier(self) -> Slice:
        """Whose keys the queries of these blocks read."""
        return Slice(sequence=self.sequence, start=0, stop=self.block(self.numbers[-1]).stop)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(block of queries, block of keys) in which they take part, in an order that is ascending
        in both."""
        own = set(self.numbers)
        for q in range(self.numbers[0], -(-self.length // BLOCK)):
            yield from ((q, k) for k in range(q + 1) if q in own or k in own)


class Call(NamedTuple):
    """One kernel call: rows of the queries and keys that were fetched, and the rows of this rank's
    results that it adds to, None where they are another rank's."""

    queries: slice
    keys: slice
    causal: bool
    of_queries: slice | None
    of_keys: slice | None

    def segments(self, device: torch.device) -> Segments:
        return _segments(_size(self.queries), _size(self.keys), self.causal, device)


class DeterministicZone:
    """This rank's part in a group of any strategy."""

    __slots__ = (
        "backward_calls",
        "forward_calls",
        "kernel",
        "rows",
        "to_earlier",
        "to_later",
        "to_own",
        "to_tokens",
    )

    def __init__(self, zone: Zone, channel: Channel, kernel: Kernel, device: torch.device) -> None:
        self.rows, self.kernel = slice(zone.start, zone.stop), kernel
        lengths = dict(zip(zone.group.sequences, zone.lengths, strict=True))
        tokens = [group_slices(zone.group, lengths, i) for i in range(zone.group.degree)]
        blocks = _dealt_blocks(tokens, lengths)
        own = [[piece for x in of_rank for piece in x.own] for of_rank in blocks]

        def relayout(
            held: Sequence[Sequence[Slice]], wanted: Sequence[Sequence[Slice]]
        ) -> Relayout:
            return Relayout(held, wanted, zone.index, channel, device)

        self.to_own, self.to_tokens = relayout(tokens, own), relayout(own, tokens)
        self.to_later = relayout(tokens, [[x.later for x in of_rank] for of_rank in blocks])
        self.to_earlier = relayout(tokens, [[x.earlier for x in of_rank] for of_rank in blocks])
        self.forward_calls = tuple(_forward_calls(blocks[zone.index]))
        self.backward_calls = tuple(_backward_calls(blocks[zone.index]))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Tensors]]:
        """q [t, H, D], k, v [t, Hkv, D] of this rank's tokens -> out [t, H, D], and what
        `backward` needs."""
        queries, keys = self.to_own.post((q,), QUERIES), self.to_earlier.post((k, v), KEYS)
        yield 0.5
        moving = self.to_tokens.post(self._attend(*queries.wait(), *keys.wait(), scale), RESULTS)
        yield END
        out, lse = moving.wait()  # [t, H, D], [t, H]
        return out, (q, k, v, out, lse)

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> ZoneSteps[Tensors]:
        q, k, v, out, lse = saved
        queries, keys = (
            self.to_later.post((dout, q, out, lse), QUERIES),
            self.to_earlier.post((k, v), KEYS),
        )
        yield 0.5
        moving = self.to_tokens.post(
            self._gradients(*queries.wait(), *keys.wait(), scale), RESULTS
        )
        yield END
        return moving.wait()

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> ZoneSteps[Tensors]:  # type: ignore[no-untyped-def]
        """`backward` from this rank's rows and the last of what `forward` left."""
        return self.backward(dout, (q, k, v, out, lse), scale)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Tensors:
        """out [own, H, D] and lse [own, H] of this rank's blocks."""
        out = q.new_zeros(q.shape, dtype=lse_dtype(q.dtype))
        lse = out.new_full(q.shape[:2], -torch.inf)
        for call in self.forward_calls:
            tensors = _copies(call.queries, q) + _copies(call.keys, k, v)
            block_out, block_lse = self.kernel.forward(
                *tensors, call.segments(q.device), scale=scale
            )
            merge(
                out[call.of_queries],
                lse[call.of_queries],
                EVERY_ROW,
                (block_out, block_lse.t().contiguous()),
            )
        return out.to(q.dtype), lse

    def _gradients(self, dout, q, out, lse, k, v, scale: float) -> Tensors:  # type: ignore[no-untyped-def]
        """dq [own, H, D], dk and dv [own, Hkv, D] of this rank's blocks."""
        sums = [lse.new_zeros(self.to_own.tokens, *x.shape[1:]) for x in (q, k, v)]
        for call in self.backward_calls:
            block_dout, block_q, block_out, block_lse = _copies(call.queries, dout, q, out, lse)
            tensors = (
                block_dout,
                block_q,
                *_copies(call.keys, k, v),
                block_out,
                block_lse.t().contiguous(),
            )
            made = self.kernel.backward(*tensors, call.segments(q.device), scale=scale)
            for total, rows, part in zip(
                sums, (call.of_queries, call.of_keys, call.of_keys), made, strict=True
            ):
                if rows is not None:
                    total[rows] += part
        return tuple(x.to(q.dtype) for x in sums)


def _dealt_blocks(
    tokens: Sequence[Sequence[Slice]], lengths: dict[int, int]
) -> list[list[KeyBlocks]]:
    """By rank the blocks it works on: those whose first token it holds. tokens: what each rank
    holds."""

    def numbers(piece: Slice) -> range:
        return range(-(-piece.start // BLOCK), -(-piece.stop // BLOCK))

    dealt = []
    for held in tokens:
        found: dict[int, list[int]] = {}
        for piece in held:
            found.setdefault(piece.sequence, []).extend(numbers(piece))
        dealt.append(
            [
                KeyBlocks(s, lengths[s], tuple(sorted(own)))
                for s, own in sorted(found.items())
                if own
            ]
        )
    return dealt


def _forward_calls(dealt: Sequence[KeyBlocks]) -> Iterator[Call]:
    key_row = 0
    for blocks, own in _with_rows(dealt):
        for i, j in blocks.pairs():
            if i in own:
                yield Call(own[i], _rows(blocks.block(j), key_row), i == j, own[i], None)
        key_row += blocks.earlier.tokens


def _backward_calls(dealt: Sequence[KeyBlocks]) -> Iterator[Call]:
    query_row = key_row = 0
    for blocks, own in _with_rows(dealt):
        for i, j in blocks.pairs():
            queries = _rows(blocks.block(i), query_row - blocks.later.start)
            yield Call(queries, _rows(blocks.block(j), key_row), i == j, own.get(i), own.get(j))
        query_row += blocks.later.tokens
        key_row += blocks.earlier.tokens


def _with_rows(dealt: Sequence[KeyBlocks]) -> Iterator[tuple[KeyBlocks, dict[int, slice]]]:
    """Every sequence's blocks with their rows among all blocks of this rank."""
    start = 0
    for blocks in dealt:
        rows = {}
        for number in blocks.numbers:
            rows[number] = slice(start, start + blocks.block(number).tokens)
            start = rows[number].stop
        yield blocks, rows


def _rows(block: Slice, shift: int) -> slice:
    return slice(block.start + shift, block.stop + shift)


def _size(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _copies(rows: slice, *tensors: torch.Tensor) -> Tensors:
    """Rows of them in memory of their own: some libraries round by how their operands are
    aligned."""
    return tuple(x[rows].clone() for x in tensors)


@functools.cache
def _segments(queries: int, keys: int, causal: bool, device: torch.device) -> Segments:
    return Segments((queries,), (keys,), causal=causal, device=device)


def slowdown(
    q: torch.Tensor, k: torch.Tensor, communicator: Communicator, kernel: Kernel
) -> float:
    """How many times as long this takes as one kernel call, measured on one sequence that this
    rank has alone; where ranks share one, each pair of blocks of two ranks is computed twice in
    the backward. q [t, H, D], k [t, Hkv, D]."""
    group = Group(ranks=(communicator.rank,), sequences=(0,), strategy="local")
    (zone,) = make_shard(MicroBatch(groups=(group,)), [len(q)], communicator.rank).zones
    plain = LocalZone(slice(0, len(q)), zone.lengths, kernel, q.device)
    fixed = DeterministicZone(zone, Channel(communicator, group, 0), kernel, q.device)
    return _seconds(fixed, q, k) / _seconds(plain, q, k)


def _seconds(zone: LocalZone | DeterministicZone, q: torch.Tensor, k: torch.Tensor) -> float:
    """Of a forward and a backward; the least of a few, for others may be at work on the
    machine."""

    def once() -> float:
        start = time.perf_counter()
        ((out, saved),) = run_zones([zone.forward(q, k, k, 1.0)])
        run_zones([zone.backward(out, saved, 1.0)])
        if q.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return min(once() for _ in range(4))
