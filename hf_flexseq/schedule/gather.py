"""Which chunks of keys and values go from whom to whom, so that every rank gets those that its
queries read.

    inside a node     straight from the owner to every reader
    between nodes     once per destination node, to one of its ranks, and from there to the readers
                      beside it

What crosses is a share of what the readers of a node would fetch one by one, and links between
nodes are what an all-gather waits for. The rank that receives a chunk for its node is the one that
has received the fewest tokens from other nodes so far, so that where every rank has a NIC all of
them carry about the same; a reader where there is the choice. Gradients take the same ways back,
summed inside a node before they cross.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from hf_flexseq.plan.shard import Cut, held_chunks

Piece = tuple[int, int]  # place of the sequence in the group, chunk


class Hop(NamedTuple):
    """A chunk that the rank of index `source` sends to the one of `target`."""

    piece: Piece
    source: int
    target: int


@functools.lru_cache(maxsize=64)
def gather_hops(
    cuts: tuple[Cut, ...], degree: int, ranks_per_node: int
) -> tuple[tuple[Hop, ...], ...]:
    """By leg, each of which needs what the one before it brought. A group inside a node has one
    leg."""
    first, second = [], []
    crossed = [0] * degree  # tokens that each rank has received from other nodes
    for piece, owner, readers in _pieces(cuts, degree):
        for node in sorted({reader // ranks_per_node for reader in readers}):
            beside = [reader for reader in readers if reader // ranks_per_node == node]
            if node == owner // ranks_per_node:
                first += [Hop(piece, owner, reader) for reader in beside]
                continue
            ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
            relay = min(ranks, key=lambda rank: (crossed[rank], rank not in beside, rank))
            crossed[relay] += cuts[piece[0]].tokens(piece[1:])
            first.append(Hop(piece, owner, relay))
            second += [Hop(piece, relay, reader) for reader in beside if reader != relay]
    return (tuple(first), tuple(second)) if degree > ranks_per_node else (tuple(first),)


def _pieces(cuts: tuple[Cut, ...], degree: int) -> Iterator[tuple[Piece, int, list[int]]]:
    """Every chunk that has tokens, the rank that holds it, and the others that read it."""
    for place, cut in enumerate(cuts):
        held = [
            [
                c
                for c in held_chunks("allgather", i, degree, mirrored=cut.mirrored)
                if cut.tokens((c,))
            ]
            for i in range(degree)
        ]
        for owner, chunks in enumerate(held):
            for chunk in chunks:
                readers = [
                    i for i in range(degree) if i != owner and held[i] and held[i][-1] >= chunk
                ]
                yield (place, chunk), owner, readers
