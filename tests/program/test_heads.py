"""How heads are distributed over the ranks of an Ulysses group and cut into pieces."""

from itertools import product

import pytest

from hf_flexseq.program.compile import FORWARD
from hf_flexseq.program.heads import call_heads, head_pieces
from hf_flexseq.program.instructions import LayerShape
from tests.program.rank_programs import programs_of_group

HEADS = [(4, 4), (8, 2), (8, 8), (12, 4), (7, 7), (6, 1), (3, 3), (32, 8)]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_every_query_head_has_a_rank_and_the_kv_head_that_it_reads(heads, kv_heads):
    for degree, most in product((1, 2, 3, 4, 8), (1, 2, 3, 4)):
        pieces = head_pieces(heads, kv_heads, degree, most)
        assert 1 <= len(pieces) <= most
        worked_on = []
        for rank in range(degree):
            read_by_rank = set()
            for share in (piece.shares[rank] for piece in pieces):
                read = [query * kv_heads // heads for query in share.queries]
                assert list(share.keys) == sorted(set(read))
                # the kernel's own reading of what it is given
                given = share.keys
                if share.query2kv is not None:
                    given = [share.keys[number] for number in share.query2kv]
                each = len(read) // max(1, len(given))
                assert [kv for kv in given for _ in range(each)] == read
                worked_on += share.queries
                read_by_rank.update(read)
            assert list(pieces[0].arriving[rank]) == sorted(read_by_rank)
            assert pieces[-1].leaving[rank] == pieces[0].arriving[rank]
            assert not any(piece.arriving[rank] for piece in pieces[1:])
            assert not any(piece.leaving[rank] for piece in pieces[:-1])
        assert worked_on == list(range(heads))


@pytest.mark.parametrize("tokens, per_node, pieces", [(16500, 4, 1), (16500, 2, 2), (80, 2, 1)])
def test_heads_come_in_pieces_across_nodes_where_they_are_worth_calls(tokens, per_node, pieces):
    shape = LayerShape(query_heads=16, kv_heads=4, head_dim=8, dtype="bfloat16")
    options = {"per_node": per_node, "device": "cuda", "whats": (FORWARD,)}
    found = programs_of_group("ulysses", 4, (tokens,), shape, **options)
    assert {program.kernel_calls for program in found[FORWARD].values()} == {pieces}


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("degree, per_node, most", [(1, 1, 1), (3, 3, 1), (4, 4, 1), (8, 4, 4)])
def test_heads_of_all_calls_are_known_before(heads, kv_heads, degree, per_node, most):
    shape = LayerShape(query_heads=heads, kv_heads=kv_heads, head_dim=8, dtype="bfloat16")
    strategies = ["local"] if degree == 1 else ["ulysses", "hybrid"]
    found = set()
    for strategy, tokens in product(strategies, (60, 10_000, 400_000)):
        options = {"per_node": per_node, "device": "cuda", "whats": (FORWARD,)}
        programs = programs_of_group(strategy, degree, (tokens, 9), shape, **options)
        for program in programs[FORWARD].values():
            for instruction in program.instructions:
                if instruction.operation == "attend":
                    q, k, _ = (program.all_values[number].shape[1] for number in instruction.ins)
                    found.add((q, k))
    known = call_heads(heads, kv_heads, degree, most)
    if degree == 8:  # a hybrid exchanges heads inside of nodes
        known |= call_heads(heads, kv_heads, per_node, 1)
    assert found <= known
    assert degree == 8 or found == known
