"""Attention whose bits do not depend on the degree, the strategy, or which rank holds what:
`deterministic=True`.

Kernels round in an order that depends on the shape of a sequence, and sums depend on the order of
their terms. So here

1. every sequence lies on one grid of blocks of `BLOCK` tokens from its start, whoever holds them;
2. every pair of a block of queries and a block of keys is a sequence of its own for the kernel, at
   degree 1 as at any other, and one varlen call takes many of them (`attention/block_pairs.py`);
3. a block belongs to one rank, the one that holds its first token, which fetches the queries and
   keys it needs;
4. that rank merges the block's outputs and sums its dQ from the nearest keys to the farthest, and
   sums the dK and dV of its keys in the order of the queries, over the whole sequence, in float32
   (float64 for float64).

Nothing is summed across ranks, so nothing depends on how many there are. In the backward a pair of
blocks of two ranks is computed by both: the one has the sum over keys, the other the sum over
queries. The price is rounds of small sums, copies of blocks, up to two backwards' work, and no
overlap inside a zone; `attention/deterministic.py` measures the first two. The layout is the
strategy's, the traffic about that of `allgather`. A result of 16 bits is rounded after every block
of keys; elsewhere it is rounded once.

Rejected:

* a kernel call for each pair, which gives the same guarantee with a Python loop and some 20
  launches for each of 33,000 pairs at 32K tokens;
* one sequence of many blocks of queries over a block of keys, which saves the copies of keys, but
  libraries then tile the queries by how many there are;
* sending every pair's dK and dV to their owner to be summed there, which computes them once but
  moves as many bytes as there are pairs.
"""

from collections.abc import Sequence

from hf_flexseq.plan.shard import Slice, Zone, group_slices
from hf_flexseq.program.blocks import BLOCK, BlocksSpec, SequenceBlocks
from hf_flexseq.program.builder import Builder, Tables, Values
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.instructions import INPUT, WIDE, Value
from hf_flexseq.program.relayout import Relayout
from hf_flexseq.program.tags import BLOCK_KEYS, BLOCK_QUERIES, BLOCK_RESULTS
from hf_flexseq.program.weave import END, ZoneSteps
from hf_flexseq.program.zones import SavesRows, Sinks


class DeterministicZone(SavesRows):
    """This rank's part in a group of any strategy."""

    __slots__ = (
        "blocks",
        "blocks_to_seq",
        "rows",
        "seq_to_blocks",
        "seq_to_read",
        "seq_to_readers",
    )

    def __init__(self, zone: Zone, channel: Channel, tables: Tables) -> None:
        """Deal the blocks to the ranks, and find the rows of this one."""
        self.rows = slice(zone.start, zone.stop)

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
        self.seq_to_blocks = Relayout(tokens, in_blocks, index, channel, tables)
        self.blocks_to_seq = Relayout(in_blocks, tokens, index, channel, tables)
        self.seq_to_readers = Relayout(tokens, in_readers, index, channel, tables)
        self.seq_to_read = Relayout(tokens, in_read, index, channel, tables)

        # 4. this rank's blocks
        self.blocks = BlocksSpec(channel.number, tuple(own[index]))

    def forward(
        self, b: Builder, q: Value, k: Value, v: Value, sinks: Sinks | None = None
    ) -> ZoneSteps[tuple[Value, Values]]:
        """Return out [tokens, heads, head_dim], and save q, k, v, out, lse [tokens, heads].

        q: [tokens, heads, head_dim]. k, v: [tokens, kv_heads, head_dim].
        """
        # [tokens, heads, head_dim] -> [tokens in blocks, heads, head_dim]
        queries = self.seq_to_blocks.post(b, (q,), BLOCK_QUERIES)
        # [tokens, kv_heads, head_dim] -> [tokens read, kv_heads, head_dim]
        keys = self.seq_to_read.post(b, (k, v), BLOCK_KEYS)
        yield 0.5
        (block_q,) = queries.wait()
        made = ((block_q.shape, INPUT), (block_q.shape[:2], WIDE))
        results = b.special("attend_blocks", (block_q, *keys.wait()), made, self.blocks)
        # [tokens in blocks, heads, ...] -> [tokens, heads, ...]
        moving = self.blocks_to_seq.post(b, results, BLOCK_RESULTS)
        yield END
        out, lse = moving.wait()  # [tokens, heads, head_dim], [tokens, heads]
        if sinks is not None:
            sinks.apply(b, out, b.turned(lse))
        return out, (q, k, v, out, lse)

    def backward(
        self, b: Builder, dout: Value, saved: Values, sinks: Sinks | None = None
    ) -> ZoneSteps[Values]:
        """Return dq [tokens, heads, head_dim], dk and dv [tokens, kv_heads, head_dim]."""
        q, k, v, out, lse = saved
        if sinks is not None:
            sinks.add_gradient(b, dout, out, b.turned(lse))
        # [tokens, heads, ...] -> [tokens of readers, heads, ...]
        queries = self.seq_to_readers.post(b, (dout, q, out, lse), BLOCK_QUERIES)
        # [tokens, kv_heads, head_dim] -> [tokens read, kv_heads, head_dim]
        keys = self.seq_to_read.post(b, (k, v), BLOCK_KEYS)
        yield 0.5
        tokens = self.seq_to_blocks.tokens
        made = [((tokens, *x.shape[1:]), INPUT) for x in (q, k, v)]
        read = (*queries.wait(), *keys.wait())
        grads = b.special("gradients_of_blocks", read, made, self.blocks)
        # [tokens in blocks, heads, head_dim] -> [tokens, heads, head_dim]
        moving = self.blocks_to_seq.post(b, grads, BLOCK_RESULTS)
        yield END
        return moving.wait()


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
