"""Where tokens stand outside of attention, when the layout that suits attention is uneven.

Norms, MLPs and the head take as long as a rank has tokens, attention as long as it has work. A
remapped micro-batch keeps its groups for attention, and spreads the tokens evenly for everything
else (Zeppelin, arXiv 2509.21841, the remapping layer): every layer brings queries, keys and values
from the even layout to the groups, and the output back.

    surplus     ranks with more tokens than their even share give their last ones away
    deficit     the others get them behind their own
    transport   first between ranks of one node, then between nodes

With link costs that only tell nodes apart this greedy transport is the optimum of the linear
program: the tokens that move are the sum of the surpluses whatever is done, and those that cross
nodes are the nodes' own surpluses. Rejected: solving the program, which finds the same numbers
slower, and an exact minimum of the busiest link, which needs it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_flexseq.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """`tokens` rows of rank `source` that stand on rank `target` outside of attention."""

    source: int
    target: int
    tokens: int


def even_layout(tokens: Sequence[int], topology: Topology) -> tuple[int, ...]:
    """Tokens of each rank when they are spread to within one. The larger shares go where the
    fewest tokens then cross nodes, and among those where the fewest move at all."""
    share, left = divmod(sum(tokens), topology.world_size)
    even = [share] * topology.world_size
    spare = [held - share * topology.ranks_per_node for held in _per_node(tokens, topology)]
    ranks = set(range(topology.world_size))

    def worth(rank: int) -> tuple[bool, bool, int]:
        return spare[_node(rank, topology)] > 0, tokens[rank] > share, -rank

    for _ in range(left):
        rank = max(ranks, key=worth)
        ranks.remove(rank)
        spare[_node(rank, topology)] -= 1
        even[rank] += 1
    return tuple(even)


def transport(tokens: Sequence[int], topology: Topology) -> tuple[Move, ...]:
    """The moves that turn `tokens` per rank into the even layout, by source, then by target."""
    even = even_layout(tokens, topology)
    surplus = [max(0, held - wanted) for held, wanted in zip(tokens, even, strict=True)]
    deficit = [max(0, wanted - held) for held, wanted in zip(tokens, even, strict=True)]
    moves = [
        move
        for node in range(topology.nodes)
        for move in _matched(
            _ranks_of(node, topology), _ranks_of(node, topology), surplus, deficit
        )
    ]
    everywhere = range(topology.world_size)
    moves += _matched(everywhere, everywhere, surplus, deficit)
    return tuple(sorted(moves, key=lambda move: (move.source, move.target)))


def _matched(
    sources: range, targets: range, surplus: list[int], deficit: list[int]
) -> Iterator[Move]:
    """Moves from `sources` to `targets` until one side has nothing left; what they take is taken
    off both lists."""
    open_targets = [rank for rank in targets if deficit[rank]]
    for source in sources:
        while surplus[source] and open_targets:
            target = open_targets[0]
            tokens = min(surplus[source], deficit[target])
            surplus[source] -= tokens
            deficit[target] -= tokens
            if not deficit[target]:
                open_targets.pop(0)
            yield Move(source=source, target=target, tokens=tokens)


def moved_tokens(moves: Sequence[Move], topology: Topology) -> tuple[int, int]:
    """(inside a node, between nodes): the most tokens a rank gives away or gets over each kind of
    link."""
    most = [0, 0]
    for rank in range(topology.world_size):
        for across in (False, True):
            mine = [m for m in moves if topology.spans_nodes(*_span(m)) == across]
            out, back = (
                sum(m.tokens for m in mine if m.source == rank),
                sum(m.tokens for m in mine if m.target == rank),
            )
            most[across] = max(most[across], out, back)
    return most[0], most[1]


def _span(move: Move) -> tuple[int, int]:
    """The rank range [start, stop) that a move spans."""
    return min(move.source, move.target), max(move.source, move.target) + 1


def _per_node(tokens: Sequence[int], topology: Topology) -> list[int]:
    return [
        sum(tokens[rank] for rank in _ranks_of(node, topology)) for node in range(topology.nodes)
    ]


def _node(rank: int, topology: Topology) -> int:
    return rank // topology.ranks_per_node


def _ranks_of(node: int, topology: Topology) -> range:
    return range(node * topology.ranks_per_node, (node + 1) * topology.ranks_per_node)
