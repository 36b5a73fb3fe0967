"""Where tokens stand outside of attention, when the layout that suits attention is uneven.

Norms, MLPs and the head take as long as a rank has tokens, attention as long as it has work. A
remapped micro-batch keeps its groups for attention, and spreads the tokens evenly for everything
else (Zeppelin, arXiv 2509.21841, the remapping layer): every layer brings queries, keys and values
from the even layout to the groups, and the output back.

    surplus     ranks with more tokens than their even share give their last ones away
    deficit     the others get them behind their own
    transport   first between ranks of one node, then between nodes

With link costs that only tell nodes apart this greedy transport is the optimum of the linear
program that tests/plan/test_remap.py solves: the tokens that move are the sum of the surpluses
whatever is done, and those that cross nodes are the nodes' own surpluses. Rejected: solving the
program, which finds the same numbers slower, and an exact minimum of the busiest link, which needs
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_flexseq.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Rows that one rank holds in attention and another one outside of it."""

    source: int
    """The rank that holds the rows in attention."""
    target: int
    """The rank that holds the rows outside of attention."""
    tokens: int
    """Number of rows."""


def even_layout(tokens: Sequence[int], topology: Topology) -> tuple[int, ...]:
    """Return the tokens of each rank, [world_size], when they are spread to within one token.

    The larger shares go where the fewest tokens then cross nodes, and among those where the fewest
    tokens move at all. tokens: [world_size] tokens of each rank in attention.
    """
    share, left = divmod(sum(tokens), topology.world_size)

    def worth(rank: int) -> tuple[bool, int]:
        """Return the place of a rank among those that may get one more: ascending."""
        return tokens[rank] <= share, rank

    # 1. Ranks whose one more keeps a token of their node from crossing: so many of each node as it
    #    has tokens above the shares of its ranks.
    keeping = []
    for node in range(topology.nodes):
        ranks = _ranks_of(node, topology)
        spare = sum(tokens[rank] for rank in ranks) - share * len(ranks)
        keeping += sorted(ranks, key=worth)[: max(spare, 0)]
    larger = sorted(keeping, key=worth)[:left]
    # 2. Then any others.
    if len(larger) < left:
        others = set(range(topology.world_size)).difference(larger)
        larger += sorted(others, key=worth)[: left - len(larger)]
    even = [share] * topology.world_size
    for rank in larger:
        even[rank] += 1
    return tuple(even)


def transport(tokens: Sequence[int], topology: Topology) -> tuple[Move, ...]:
    """Return the moves that turn `tokens` per rank into the even layout, by source, then by
    target."""
    surplus = []
    deficit = []
    for current, wanted in zip(tokens, even_layout(tokens, topology), strict=True):
        surplus.append(max(0, current - wanted))
        deficit.append(max(0, wanted - current))
    moves: list[Move] = []
    # 1. between ranks of one node
    for node in range(topology.nodes):
        moves += _matched(_ranks_of(node, topology), surplus, deficit)
    # 2. what is left, between nodes
    moves += _matched(range(topology.world_size), surplus, deficit)
    return tuple(sorted(moves, key=lambda move: (move.source, move.target)))


def _matched(ranks: range, surplus: list[int], deficit: list[int]) -> list[Move]:
    """Return moves among `ranks` until none of them has a surplus, or none a deficit, left.

    surplus, deficit: [world_size] tokens; what the moves take is taken off both.
    """
    moves = []
    targets = [rank for rank in ranks if deficit[rank]]
    for source in ranks:
        while surplus[source] and targets:
            target = targets[0]
            tokens = min(surplus[source], deficit[target])
            surplus[source] -= tokens
            deficit[target] -= tokens
            if not deficit[target]:
                targets.pop(0)
            moves.append(Move(source=source, target=target, tokens=tokens))
    return moves


def moved_tokens(moves: Sequence[Move], topology: Topology) -> tuple[int, int]:
    """Return the most tokens a rank gives away or gets: (inside its node, between nodes)."""
    # [world_size] tokens by whether they cross nodes
    sent = {False: [0] * topology.world_size, True: [0] * topology.world_size}
    received = {False: [0] * topology.world_size, True: [0] * topology.world_size}
    for move in moves:
        crosses = _node(move.source, topology) != _node(move.target, topology)
        sent[crosses][move.source] += move.tokens
        received[crosses][move.target] += move.tokens
    inside = max(*sent[False], *received[False])
    between = max(*sent[True], *received[True])
    return inside, between


def _node(rank: int, topology: Topology) -> int:
    return rank // topology.ranks_per_node


def _ranks_of(node: int, topology: Topology) -> range:
    start = node * topology.ranks_per_node
    return range(start, start + topology.ranks_per_node)
