"""Which chunks of keys and values travel where in an all-gather over a group.

Every chunk goes from the rank that holds it (its owner) to the ranks whose queries read it:

    inside a node     straight from the owner to every reader
    between nodes     once per destination node, to one of its ranks (the relay), and from there to
                      the readers beside it

Each of these sends is a `Hop`. Hops between nodes come first; hops from a relay need what those
brought, so they form a second leg.

What crosses is a fraction of what the readers of a node would fetch one by one, and links between
nodes are what an all-gather waits for. The relay of a chunk is the rank of its node that has
received the fewest tokens from other nodes so far, so that where every rank has a NIC all NICs
carry about the same; among equals a rank that reads the chunk itself. Gradients take the same hops
back and are summed inside a node before they cross.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from hf_flexseq.plan.shard import Cut, held_chunks
from hf_flexseq.schedule.attention import ChunkKey


class Hop(NamedTuple):
    """A send of one chunk from one rank of the group to another."""

    chunk: ChunkKey
    """The chunk that travels."""

    source: int
    """Index in the group of the rank that sends."""

    target: int
    """Index in the group of the rank that receives."""


@functools.lru_cache(maxsize=64)
def gather_hops(
    cuts: tuple[Cut, ...], degree: int, ranks_per_node: int
) -> tuple[tuple[Hop, ...], ...]:
    """Return the hops of the all-gather, by leg: one leg inside a node, two across nodes.

    cuts: the cut of every sequence of the group.
    A leg needs what the leg before it brought.
    """
    first: list[Hop] = []
    second: list[Hop] = []
    crossed = [0] * degree  # tokens that each rank has received from other nodes
    for chunk, owner, readers in _read_chunks(cuts, degree):
        owner_node = owner // ranks_per_node
        for node in sorted({reader // ranks_per_node for reader in readers}):
            readers_there = [reader for reader in readers if reader // ranks_per_node == node]
            if node == owner_node:
                first += [Hop(chunk, owner, reader) for reader in readers_there]
                continue
            relay = _relay(node, ranks_per_node, crossed, readers_there)
            crossed[relay] += _tokens(cuts, chunk)
            first.append(Hop(chunk, owner, relay))
            second += [Hop(chunk, relay, reader) for reader in readers_there if reader != relay]
    if degree > ranks_per_node:
        return tuple(first), tuple(second)
    return (tuple(first),)


def _relay(node: int, ranks_per_node: int, crossed: list[int], readers: list[int]) -> int:
    """Return the rank of `node` that receives the next chunk from another node.

    crossed: tokens received from other nodes so far, by rank.
    """
    ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    return min(ranks, key=lambda rank: (crossed[rank], rank not in readers, rank))


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


def _tokens(cuts: tuple[Cut, ...], key: ChunkKey) -> int:
    sequence, chunk = key
    return cuts[sequence].tokens((chunk,))
