"""Where tokens stand outside of attention, when the layout that suits attention is uneven.

Norms, MLPs and the head take as long as a rank has tokens, attention as long as it has work. A
remapped micro-batch keeps its groups for attention, and spreads the tokens evenly for everything
else (Zeppelin, arXiv 2509.21841, the remapping layer): every layer brings queries, keys and values
from the even layout to the groups, and the output back.

    surplus     ranks with more tokens than their even share give their last ones away
    deficit     the others get them after their own
    transport   first between ranks of one node, then between nodes

With link costs that only distinguish nodes this greedy transport is the optimum of the linear
program that tests/published/zeppelin/test_remap.py solves: the tokens that move are the sum of the
surpluses whatever is done, and those that cross nodes are the nodes' own surpluses. Rejected:
solving the program, which finds the same numbers slower, and an exact minimum of the busiest link,
which needs it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.topology import Topology

Ints = NDArray[np.int64]


class Moves(NamedTuple):
    """Rows that one rank holds in attention and another one outside of it: arrays [moves], by
    source, then by target."""

    source: Ints
    """The rank that holds the rows in attention."""
    target: Ints
    """The rank that holds the rows outside of attention."""
    tokens: Ints
    """Number of rows."""


def _even(tokens: Ints, topology: Topology) -> Ints:
    """Return the tokens of each rank, [world_size], when they are spread to within one token.

    The larger shares go where the fewest tokens then cross nodes, and among those where the fewest
    tokens move at all. tokens: [world_size] tokens of each rank in attention.
    """
    world_size = topology.world_size
    share, left = divmod(int(tokens.sum()), world_size)
    # Ranks in the order in which they may get one more: first those that have more than a share.
    order = np.argsort(tokens <= share, kind="stable")
    # 1. Ranks whose one more keeps a token of their node from crossing: so many of each node as it
    #    has tokens above the shares of its ranks.
    by_node = tokens.reshape(topology.nodes, topology.ranks_per_node)
    spare = by_node.sum(axis=1) - share * topology.ranks_per_node  # [nodes]
    order_of_node = np.argsort(by_node <= share, axis=1, kind="stable")
    place_in_node = np.argsort(order_of_node, axis=1)  # the inverse
    keeps = (place_in_node < spare[:, None]).reshape(-1)  # [world_size]
    # 2. Then any others.
    first_those = np.argsort(~keeps[order], kind="stable")
    even = np.full(world_size, share)
    even[order[first_those[:left]]] += 1
    return even


def transport(tokens: Sequence[int], topology: Topology) -> Moves:
    """Return the moves from `tokens` per rank to the even layout."""
    current = np.array(tokens, dtype=np.int64)
    wanted = _even(current, topology)
    surplus = np.maximum(current - wanted, 0)
    deficit = np.maximum(wanted - current, 0)
    # 1. between ranks of one node: the first tokens of both, as many as both have there
    given = _first_of_node(surplus, deficit, topology)
    taken = _first_of_node(deficit, surplus, topology)
    inside = _matched(given, taken)
    # 2. what is left, between nodes
    between = _matched(surplus - given, deficit - taken)
    source, target, moved = map(np.concatenate, zip(inside, between, strict=True))
    order = np.lexsort((target, source))
    return Moves(source[order], target[order], moved[order])


def _first_of_node(of_ranks: Ints, of_others: Ints, topology: Topology) -> Ints:
    """Return how many of each rank's tokens are among the first of its node, [world_size].

    of_ranks, of_others: [world_size] surpluses and deficits, or the other way round. A node has as
    many first tokens as the lesser of its two sums.
    """
    shape = (topology.nodes, topology.ranks_per_node)
    by_node = of_ranks.reshape(shape)
    first = np.minimum(by_node.sum(axis=1), of_others.reshape(shape).sum(axis=1))  # [nodes]
    up_to = np.minimum(by_node.cumsum(axis=1), first[:, None])  # [nodes, ranks per node]
    of_each: Ints = np.diff(up_to, axis=1, prepend=0).reshape(-1)
    return of_each


def _matched(given: Ints, taken: Ints) -> Moves:
    """Return moves of equal sums of tokens, in the order of givers and takers, [world_size]."""
    given_up_to = given.cumsum()
    taken_up_to = taken.cumsum()
    # Every move ends where a giver has given all, or a taker taken all.
    # (Not np.union1d, whose first call imports numpy.ma for 10 ms.)
    stops = np.sort(np.concatenate((given_up_to, taken_up_to)))
    tokens = np.diff(stops, prepend=0)
    stops, tokens = stops[tokens > 0], tokens[tokens > 0]
    source = np.searchsorted(given_up_to, stops)
    target = np.searchsorted(taken_up_to, stops)
    return Moves(source, target, tokens)


def moved_tokens(moves: Moves, topology: Topology) -> tuple[int, int]:
    """Return the most tokens a rank gives away or gets: (inside its node, between nodes)."""
    per_node = topology.ranks_per_node
    crosses = (moves.source // per_node != moves.target // per_node).astype(np.int64)  # [moves]
    sent = np.zeros((2, topology.world_size), dtype=np.int64)  # by whether tokens cross nodes
    received = np.zeros_like(sent)
    np.add.at(sent, (crosses, moves.source), moves.tokens)
    np.add.at(received, (crosses, moves.target), moves.tokens)
    inside, between = np.maximum(sent, received).max(axis=1).tolist()
    return inside, between
