"""Pairs of blocks that one rank computes in deterministic attention, and the kernel calls that
take them.

A sequence is cut into blocks of `BLOCK` tokens from its start. Block q of the queries reads the
blocks 0, 1, ..., q of the keys; q - k is the *distance* of the pair (q, k). Pairs are taken in
rounds, one for every distance:

    round 0    (0, 0) (1, 1) (2, 2) (3, 3)    causal: a block reads itself
    round 1    (1, 0) (2, 1) (3, 2)
    round 2    (2, 0) (3, 1)
    round 3    (3, 0)

1. A round has each block of queries at most once, and each block of keys. So one indexed operation
   merges or adds the results of a whole round, and no two results meet in it.
2. Over the rounds a block of queries meets its keys from the nearest to the farthest, and a block
   of keys its queries in their order. Both orders depend on the sequence alone.
3. A kernel call takes whole rounds, as many as fit into `CALL_BYTES` and at least one. A round has
   no more copies than this rank's own blocks, twice that in the backward.

Blocks are padded to `BLOCK` rows, so that all of them are alike: one index names a block, and
every block is aligned as the others are, by which some libraries round. The padding is exact. A
query that is no token gets a result that is dropped, and gives nothing but zeros to keys, since
its dout is zero. A key that is no token stands behind the last token, where causal queries do not
look. A GPU computes whole tiles anyway; on the CPU sequences far shorter than a block pay for it.

Rejected: rounds by block of keys, of which the backward could only add dQ, as every pair of a
round would add to the same dK; and blocks without padding, whose indices would have to name rows:
half a gigabyte of them for a sequence of 128K tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hf_flexseq.kernels.merge import merge_into
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.program.blocks import BLOCK, SequenceBlocks

# Bytes of what a kernel call is given and returns, by type of device. With 32 query heads and 8
# KV heads of size 128 in 16 bits, 2**28 bytes are 102 pairs in the forward and 51 in the backward,
# each with a tile for every head, several for every processor of a large GPU. The CPU's kernel
# goes from pair to pair, and is faster where these stay in its cache.
CALL_BYTES = {"cpu": 2**24, "cuda": 2**28}


# ---- blocks


class PaddedBlocks:
    """The way between the tokens of some blocks, one after the other, and padded blocks."""

    __slots__ = ("blocks", "slots")

    def __init__(self, sequences: Sequence[SequenceBlocks], device: torch.device) -> None:
        """Find the place of every token."""
        tokens = []  # of each block
        for blocks in sequences:
            for number in blocks.numbers:
                tokens.append(min(BLOCK, blocks.length - number * BLOCK))
        self.blocks = len(tokens)
        # by token, its row among all rows of all blocks; None where no block has padding
        self.slots: torch.Tensor | None = None
        if sum(tokens) < self.blocks * BLOCK:
            rows = torch.arange(self.blocks * BLOCK).view(self.blocks, BLOCK)
            is_token = torch.arange(BLOCK) < torch.tensor(tokens).unsqueeze(1)  # [blocks, BLOCK]
            self.slots = to_device(rows[is_token], device)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [tokens, ...] as [blocks, BLOCK, ...], with zeros where there is no token."""
        if self.slots is not None:
            padded = x.new_zeros(self.blocks * BLOCK, *x.shape[1:])
            padded[self.slots] = x
            x = padded
        return x.unflatten(0, (self.blocks, BLOCK))

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens of x: [blocks, BLOCK, ...] -> [tokens, ...]."""
        x = x.flatten(0, 1)
        if self.slots is None:
            return x
        return x.index_select(0, self.slots)


# ---- rounds and calls


class OwnResults(NamedTuple):
    """Some of this rank's blocks, none twice, as rows of a tensor [all blocks, ...]."""

    blocks: int

    where: torch.Tensor | slice
    """int64 [blocks], or a slice where they stand together."""

    def part(self, start: int, stop: int) -> "OwnResults":
        """Return those from `start` to `stop`."""
        if isinstance(self.where, slice):
            first: int = self.where.start
            return OwnResults(stop - start, slice(first + start, first + stop))
        return OwnResults(stop - start, self.where[start:stop])

    def add_to(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add part [blocks, ...] to these rows of total [all blocks, ...], in its dtype."""
        if isinstance(self.where, slice):
            total[self.where].add_(part)
        else:
            total.index_add_(0, self.where, part.to(total.dtype))

    def merge_into(
        self, out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
    ) -> None:
        """Merge results into these rows of the running result, in place.

        out: [all blocks, BLOCK, heads, head_dim]. lse: [all blocks, BLOCK, heads]. part_out,
        part_lse: the same of [blocks, ...].
        """
        row_out = out[self.where]  # a view where it is a slice
        row_lse = lse[self.where]
        merge_into(row_out, row_lse, part_out, part_lse)
        if not isinstance(self.where, slice):
            out[self.where] = row_out
            lse[self.where] = row_lse


class RoundResults(NamedTuple):
    """Results of a round that belong to blocks of this rank."""

    pairs: slice  # those of the round that have such a result
    blocks: OwnResults  # the block of each, among this rank's


class Round(NamedTuple):
    """The pairs of blocks of one distance."""

    queries: torch.Tensor  # int64 [pairs]: blocks among those whose queries were fetched
    keys: torch.Tensor  # int64 [pairs]: blocks among those whose keys were fetched
    query_results: RoundResults
    key_results: RoundResults


class PairCall(NamedTuple):
    """A kernel call in which every pair is a sequence of its own."""

    segments: Segments
    queries: torch.Tensor  # int64 [pairs], as those of its rounds
    keys: torch.Tensor  # int64 [pairs]
    rounds: tuple[Round, ...]  # whose pairs these are, one round after the other

    def shares(self) -> Iterator[tuple[Round, slice]]:
        """Yield every round, and which pairs of the call are the round's."""
        start = 0
        for pairs_of_round in self.rounds:
            stop = start + len(pairs_of_round.queries)
            yield pairs_of_round, slice(start, stop)
            start = stop


class PairRounds:
    """All pairs of one direction, and the kernel calls that take them."""

    __slots__ = ("_calls", "device", "rounds")

    def __init__(self, rounds: Sequence[Round], device: torch.device) -> None:
        """rounds: by distance, from 0 on."""
        self.rounds = rounds
        self.device = device
        self._calls: dict[int, tuple[PairCall, ...]] = {}

    def calls(self, pair_bytes: int) -> tuple[PairCall, ...]:
        """Return the calls, which are made with the first layer and kept.

        pair_bytes: of what one pair gives to a call and gets from it.
        """
        kind = "cpu" if self.device.type == "cpu" else "cuda"
        most = CALL_BYTES[kind] // pair_bytes
        if most not in self._calls:
            self._calls[most] = tuple(self._make_calls(most))
        return self._calls[most]

    def _make_calls(self, most: int) -> Iterator[PairCall]:
        """Yield calls of at most so many pairs, or of one round."""
        waiting: list[Round] = []
        pairs = 0
        for distance, pairs_of_round in enumerate(self.rounds):
            added = len(pairs_of_round.queries)
            # the first round is a call of its own, since it alone is causal
            if waiting and (distance == 1 or pairs + added > most):
                yield self._call(waiting, causal=distance == 1)
                waiting = []
                pairs = 0
            waiting.append(pairs_of_round)
            pairs += added
        if waiting:
            yield self._call(waiting, causal=len(self.rounds) == 1)

    def _call(self, rounds: Sequence[Round], *, causal: bool) -> PairCall:
        """Return the call that takes these rounds."""
        queries = torch.cat([pairs.queries for pairs in rounds])
        lengths = (BLOCK,) * len(queries)
        return PairCall(
            segments=Segments(lengths, lengths, causal=causal, device=self.device),
            queries=queries,
            keys=torch.cat([pairs.keys for pairs in rounds]),
            rounds=tuple(rounds),
        )


# ---- which pairs there are


class HostRound(NamedTuple):
    """A round before it is on the device. All tensors are int64."""

    queries: torch.Tensor  # [pairs]
    keys: torch.Tensor  # [pairs]
    query_blocks: torch.Tensor  # of the last pairs: this rank's block of queries
    key_blocks: torch.Tensor  # of the first pairs: this rank's block of keys


class OwnBlocks:
    """This rank's blocks, with an entry for each in every tensor; all are int64 on the host."""

    __slots__ = ("number", "of_sequence", "own_of", "read_start", "reader_start", "table_start")

    def __init__(self, sequences: Sequence[SequenceBlocks]) -> None:
        """Find where the sequence of every block begins in each layout."""
        counts = torch.tensor([len(blocks.numbers) for blocks in sequences], dtype=torch.int64)
        numbers = [number for blocks in sequences for number in blocks.numbers]
        self.number = torch.tensor(numbers, dtype=torch.int64)  # in its sequence

        # 1. by sequence, its blocks, and where its block 0 stands, or would stand
        totals: list[int] = []
        read: list[int] = []
        readers: list[int] = []
        tables: list[int] = []
        read_blocks = 0
        reader_blocks = 0
        for blocks in sequences:
            read.append(read_blocks)
            readers.append(reader_blocks - blocks.readers.numbers[0])
            tables.append(sum(totals))
            totals.append(blocks.all_blocks)
            read_blocks += len(blocks.read.numbers)
            reader_blocks += len(blocks.readers.numbers)

        # 2. the same by block
        def by_block(by_sequence: list[int]) -> torch.Tensor:
            return torch.tensor(by_sequence, dtype=torch.int64).repeat_interleave(counts)

        self.of_sequence = by_block(totals)  # blocks that its sequence has
        self.read_start = by_block(read)  # block 0 among the blocks read
        self.reader_start = by_block(readers)  # block 0 among the readers
        self.table_start = by_block(tables)  # block 0 in `own_of`

        # 3. by block of all these sequences: which of this rank's it is, -1 for none
        self.own_of = torch.full((sum(totals),), -1)
        self.own_of[self.table_start + self.number] = torch.arange(len(self.number))

    def forward_round(self, distance: int) -> HostRound:
        """Return the pairs of this rank's queries at this distance."""
        mine = torch.nonzero(self.number >= distance).flatten()
        none = mine[:0]
        keys = (self.read_start + self.number)[mine] - distance
        return HostRound(queries=mine, keys=keys, query_blocks=mine, key_blocks=none)

    def backward_round(self, distance: int) -> HostRound:
        """Return the pairs of this rank's queries, of its keys, or of both at this distance: first
        those of its keys only, at last those of its queries only."""
        number = self.number

        # 1. the block of keys of each block of queries, and the other way round
        queries = torch.nonzero(number >= distance).flatten()
        keys_of = self.own_of[(self.table_start + number)[queries] - distance]
        keys = torch.nonzero(number + distance < self.of_sequence).flatten()
        queries_of = self.own_of[(self.table_start + number)[keys] + distance]
        keys_only = keys[queries_of < 0]
        both = queries[keys_of >= 0]
        queries_only = queries[keys_of < 0]

        # 2. the pairs in these three parts
        query_blocks = torch.cat((both, queries_only))
        reader = self.reader_start + number
        read = self.read_start + number
        return HostRound(
            queries=torch.cat((reader[keys_only] + distance, reader[query_blocks])),
            keys=torch.cat((read[keys_only], read[query_blocks] - distance)),
            query_blocks=query_blocks,
            key_blocks=torch.cat((keys_only, keys_of[keys_of >= 0])),
        )


def forward_rounds(sequences: Sequence[SequenceBlocks], device: torch.device) -> PairRounds:
    """Return the pairs of the queries of a rank's blocks.

    The queries of a pair are one of these blocks, its keys one of the blocks that they read.
    """
    own = OwnBlocks(sequences)
    distances = max((blocks.numbers[-1] for blocks in sequences), default=-1) + 1
    rounds = [own.forward_round(distance) for distance in range(distances)]
    return PairRounds(_on_device(rounds, device), device)


def backward_rounds(sequences: Sequence[SequenceBlocks], device: torch.device) -> PairRounds:
    """Return the pairs of the queries and of the keys of a rank's blocks, each pair once.

    The queries of a pair are one of the readers of these blocks, its keys one of the blocks that
    they read.
    """
    own = OwnBlocks(sequences)
    distances = 0
    for blocks in sequences:
        to_keys = blocks.numbers[-1] + 1
        to_queries = blocks.all_blocks - blocks.numbers[0]
        distances = max(distances, to_keys, to_queries)
    rounds = [own.backward_round(distance) for distance in range(distances)]
    return PairRounds(_on_device(rounds, device), device)


def _on_device(rounds: Sequence[HostRound], device: torch.device) -> list[Round]:
    """Copy the rounds to the device, all at once."""
    if not rounds:
        return []
    parts = [tensor for pairs in rounds for tensor in pairs]
    copies = iter(to_device(torch.cat(parts), device).split([len(part) for part in parts]))
    on_device = []
    for host in rounds:
        pairs = len(host.queries)
        first = pairs - len(host.query_blocks)
        on_device.append(
            Round(
                queries=next(copies),
                keys=next(copies),
                query_results=RoundResults(
                    slice(first, pairs), _blocks(host.query_blocks, next(copies))
                ),
                key_results=RoundResults(
                    slice(0, len(host.key_blocks)), _blocks(host.key_blocks, next(copies))
                ),
            )
        )
    return on_device


def _blocks(host: torch.Tensor, copy: torch.Tensor) -> OwnResults:
    """Return these blocks, as a slice where they follow each other: it takes no copies."""
    if len(host) and bool((host.diff() == 1).all()):
        return OwnResults(len(host), slice(int(host[0]), int(host[-1]) + 1))
    return OwnResults(len(host), copy)
