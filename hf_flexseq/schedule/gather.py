"""Which chunks of keys and values travel where in an all-gather over a group.

Every chunk goes from the rank that holds it (its owner) to the ranks whose queries read it:

    inside a node     straight from the owner to every reader
    between nodes     once per destination node, to one of its ranks (the relay), and from there to
                      the readers beside it

Each of these sends is a `Hop`. Hops between nodes come first; hops from a relay need what those
brought, so they form a second leg.

What crosses is a fraction of what the readers of a node would fetch one by one, and links between
nodes are what an all-gather waits for. The relay of a chunk is the rank that stands in its node
where the owner stands in its own. The chunks of a sequence are equally long to within two tokens,
and every node has as many owners at each place, so that all ranks of a node receive the same from
other nodes to within a few tokens; and where every rank has a NIC, NICs of the same place talk to
each other only. Gradients take the same hops back and are summed inside a node before they cross.

`gather_of_rank` finds the messages of one rank, in time that grows with sequences x degree.
`gather_hops` lists the hops of all ranks, in time that grows with the square of the degree: its
slow twin, for tests. Rejected: the relay that has received the fewest tokens so far. It is no more
even, and a rank would have to follow all chunks of all nodes to know where its own go.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.plan.shard import Cut, held_chunks
from hf_flexseq.schedule.attention import ChunkKey

Message = tuple[int, tuple[ChunkKey, ...]]  # (index of the other rank, the chunks that travel)


class Hop(NamedTuple):
    """A send of one chunk from one rank of the group to another."""

    chunk: ChunkKey
    """The chunk that travels."""

    source: int
    """Index in the group of the rank that sends."""

    target: int
    """Index in the group of the rank that receives."""


class RankLeg(NamedTuple):
    """The messages of one rank in one leg of the gather."""

    sent: tuple[Message, ...]
    """What goes to other ranks, by the index of the target."""

    received: tuple[Message, ...]
    """What comes from other ranks, by the index of the source."""


# ---- the part of one rank


def gather_of_rank(
    cuts: tuple[Cut, ...], degree: int, ranks_per_node: int, index: int
) -> tuple[RankLeg, ...]:
    """Return the messages of the rank of `index`, by leg: one leg inside a node, two across nodes.

    cuts: the cut of every sequence of the group.
    They are the hops of `gather_hops` from and to this rank, in its order.
    """
    finder = _RankGather(degree, min(ranks_per_node, degree), index)
    for sequence, cut in enumerate(cuts):
        finder.add(sequence, cut)
    return finder.legs()


class _RankGather:
    """Collects the messages of one rank, sequence by sequence."""

    def __init__(self, degree: int, ranks_per_node: int, index: int) -> None:
        self._degree = degree
        self._per_node = ranks_per_node
        self._index = index
        self._node, self._local = divmod(index, ranks_per_node)
        # by leg: (sent, received), each index of the other rank -> chunks
        self._legs: list[tuple[dict[int, list[ChunkKey]], dict[int, list[ChunkKey]]]] = []
        for _ in range(1 if degree == ranks_per_node else 2):
            self._legs.append((defaultdict(list), defaultdict(list)))

    def legs(self) -> tuple[RankLeg, ...]:
        """Return what was collected."""
        return tuple(RankLeg(_messages(sent), _messages(got)) for sent, got in self._legs)

    def add(self, sequence: int, cut: Cut) -> None:
        """Add the messages of one sequence."""
        layout = _Layout(cut, self._degree)
        first = self._node * self._per_node
        beside = [rank for rank in range(first, first + self._per_node) if rank != self._index]
        # the last chunk that each rank of this node reads, {index: chunk}, and that any reads
        reads_to = {rank: int(layout.last[rank]) for rank in (self._index, *beside)}
        node_reads_to = max(reads_to.values())
        sent, received = self._legs[0]
        # 1. first leg: this rank's own chunks, to readers here and to relays elsewhere
        for chunk in layout.chunks_of(np.array([self._index])):
            for target in self._first_targets(layout, chunk):
                sent[target].append((sequence, chunk))
        # 2. first leg: the chunks of the ranks beside this one
        for owner in beside:
            chunks = layout.chunks_of(np.array([owner]), reads_to[self._index])
            received[owner] += [(sequence, chunk) for chunk in chunks]
        if len(self._legs) == 1:
            return
        # 3. first leg: the chunks of which this rank is the relay, from their owners
        for owner in self._owners_of(self._local):
            chunks = layout.chunks_of(np.array([owner]), node_reads_to)
            received[owner] += [(sequence, chunk) for chunk in chunks]
        # 4. second leg: between the relays of this node
        sent, received = self._legs[1]
        relayed = self._owners_of(self._local)
        for rank in beside:
            chunks = layout.chunks_of(relayed, reads_to[rank])
            sent[rank] += [(sequence, chunk) for chunk in chunks]
            owners = self._owners_of(rank - first)
            chunks = layout.chunks_of(owners, reads_to[self._index])
            received[rank] += [(sequence, chunk) for chunk in chunks]

    def _first_targets(self, layout: "_Layout", chunk: int) -> list[int]:
        """Return the ranks to which this rank sends one of its own chunks."""
        reads = (layout.last >= chunk).reshape(-1, self._per_node)  # [nodes, ranks per node]
        reads[self._node, self._local] = False
        targets = reads.any(axis=1)[:, None] & (np.arange(self._per_node) == self._local)
        targets[self._node] = reads[self._node]
        return np.flatnonzero(targets).tolist()

    def _owners_of(self, local: int) -> NDArray[np.int64]:
        """Return the ranks of other nodes whose chunks the rank at a place of this node relays."""
        owners = np.arange(local, self._degree, self._per_node)
        elsewhere: NDArray[np.int64] = owners[owners // self._per_node != self._node]
        return elsewhere


class _Layout:
    """Which chunks of one sequence the ranks of a group hold, and how far they read."""

    def __init__(self, cut: Cut, degree: int) -> None:
        tokens = np.diff(np.array(cut.bounds))  # [chunks]
        front = np.arange(degree)
        if cut.mirrored:
            front = front[::-1]
        # [degree, 2] the chunks that each rank holds, and whether they have tokens
        self.held = np.stack((front, 2 * degree - 1 - front), axis=1)
        self.filled = tokens[self.held] > 0
        # [degree] the last chunk with tokens that each rank holds, -1 for none: it reads that far
        self.last = np.where(self.filled, self.held, -1).max(axis=1)

    def chunks_of(self, owners: NDArray[np.int64], last: int | None = None) -> list[int]:
        """Return the chunks with tokens of some ranks, one rank after the other.

        last: the last chunk that counts; None for all.
        """
        held = self.held[owners]  # [owners, 2]
        counts = self.filled[owners]
        if last is not None:
            counts &= held <= last
        chunks: list[int] = held[counts].tolist()
        return chunks


def _messages(chunks_by_rank: dict[int, list[ChunkKey]]) -> tuple[Message, ...]:
    """Return the messages that are not empty, by the index of the other rank."""
    return tuple(
        (rank, tuple(chunks)) for rank, chunks in sorted(chunks_by_rank.items()) if chunks
    )


# ---- the hops of all ranks


def gather_hops(
    cuts: tuple[Cut, ...], degree: int, ranks_per_node: int
) -> tuple[tuple[Hop, ...], ...]:
    """Return the hops of the all-gather, by leg: one leg inside a node, two across nodes.

    cuts: the cut of every sequence of the group.
    A leg needs what the leg before it brought.
    """
    first: list[Hop] = []
    second: list[Hop] = []
    for chunk, owner, readers in _read_chunks(cuts, degree):
        owner_node, owner_local = divmod(owner, ranks_per_node)
        for node in sorted({reader // ranks_per_node for reader in readers}):
            readers_there = [reader for reader in readers if reader // ranks_per_node == node]
            if node == owner_node:
                first += [Hop(chunk, owner, reader) for reader in readers_there]
                continue
            relay = node * ranks_per_node + owner_local
            first.append(Hop(chunk, owner, relay))
            second += [Hop(chunk, relay, reader) for reader in readers_there if reader != relay]
    if degree > ranks_per_node:
        return tuple(first), tuple(second)
    return (tuple(first),)


def _read_chunks(cuts: tuple[Cut, ...], degree: int) -> Iterator[tuple[ChunkKey, int, list[int]]]:
    """Yield (chunk, its owner, the other ranks that read it) for every chunk that has tokens.

    A rank reads all chunks up to the last one that it holds itself.
    """
    for sequence, cut in enumerate(cuts):
        chunks_of = []  # by rank, the chunks with tokens that it holds
        for index in range(degree):
            chunks = held_chunks("allgather", index, degree, mirrored=cut.mirrored)
            chunks_of.append([chunk for chunk in chunks if cut.tokens((chunk,))])
        for owner in range(degree):
            for chunk in chunks_of[owner]:
                readers = []
                for index in range(degree):
                    if index != owner and chunks_of[index] and chunks_of[index][-1] >= chunk:
                        readers.append(index)
                yield (sequence, chunk), owner, readers
