"""The transport to an even layout against the linear program it stands for."""

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flexseq.base.topology import Topology
from hf_flexseq.published.zeppelin.moves import (
    Move,
    even_layout,
    moved_tokens,
    transport,
    transport_arrays,
)
from tests.budget import examples

SHAPES = st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 3), (3, 2), (4, 1)])


def crossing(moves: tuple[Move, ...], topology: Topology) -> int:
    return sum(
        m.tokens
        for m in moves
        if m.source // topology.ranks_per_node != m.target // topology.ranks_per_node
    )


def optimum(tokens: list[int], topology: Topology) -> tuple[int, int]:
    """(tokens that move, tokens that cross nodes) of the cheapest transport to any layout that is
    even to within one; crossing a node counts a hundredfold."""
    world, share = len(tokens), sum(tokens) // len(tokens)
    program = pulp.LpProblem("transport", pulp.LpMinimize)
    x = [
        [program.add_variable(f"x{i}_{j}", 0, None, pulp.LpInteger) for j in range(world)]
        for i in range(world)
    ]
    more = [program.add_variable(f"m{j}", cat=pulp.LpBinary) for j in range(world)]

    def node(rank: int) -> int:
        return rank // topology.ranks_per_node

    program += pulp.lpSum(
        (100 if node(i) != node(j) else 1) * x[i][j]
        for i in range(world)
        for j in range(world)
        if i != j
    )
    for i in range(world):
        program += pulp.lpSum(x[i]) == tokens[i]
        program += pulp.lpSum(row[i] for row in x) == share + more[i]
    program.solve(pulp.HiGHS(msg=False))
    found = [[round(value.value()) for value in row] for row in x]
    moved = [(i, j, found[i][j]) for i in range(world) for j in range(world) if i != j]
    return sum(n for _, _, n in moved), sum(n for i, j, n in moved if node(i) != node(j))


@settings(deadline=None, max_examples=examples(25), derandomize=True)
@given(SHAPES, st.data())
def test_transport_is_the_linear_programs(shape: tuple[int, int], data: st.DataObject) -> None:
    topology = Topology(nodes=shape[0], ranks_per_node=shape[1])
    world = topology.world_size
    tokens = data.draw(st.lists(st.integers(0, 50), min_size=world, max_size=world))
    moves = transport(tokens, topology)
    left = list(tokens)
    for move in moves:
        assert move.tokens > 0
        left[move.source] -= move.tokens
        left[move.target] += move.tokens
        assert move.source != move.target
    assert tuple(left) == even_layout(tokens, topology)
    assert max(left) - min(left) <= 1
    assert (sum(m.tokens for m in moves), crossing(moves, topology)) == optimum(tokens, topology)


@pytest.mark.parametrize("tokens", [[5, 5, 5, 5], [0, 0, 0, 0], [3, 2, 3, 2]])
def test_nothing_moves_where_tokens_are_even(tokens: list[int]) -> None:
    assert transport(tokens, Topology(nodes=2, ranks_per_node=2)) == ()


def test_the_busiest_rank_counts_by_kind_of_link() -> None:
    topology = Topology(nodes=2, ranks_per_node=2)
    moves = transport([12, 0, 0, 0], topology)
    assert moves == (
        Move(source=0, target=1, tokens=3),
        Move(source=0, target=2, tokens=3),
        Move(source=0, target=3, tokens=3),
    )
    assert moved_tokens(transport_arrays([12, 0, 0, 0], topology), topology) == (3, 6)
