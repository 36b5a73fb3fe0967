"""How heads are dealt to ranks and cut into pieces, without processes."""

import pytest

from hf_flexseq.attention.ulysses import head_pieces

HEADS = [(4, 4), (8, 2), (8, 8), (12, 4), (7, 7), (6, 1), (3, 3), (32, 8)]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_every_head_comes_and_goes_once(heads, kv_heads, degree, most):
    pieces = head_pieces(heads, kv_heads, degree, most)
    assert 1 <= len(pieces) <= most
    queries = [q for i in range(degree) for piece in pieces for q in range(heads)[piece.queries[i]]]
    assert queries == list(range(heads))
    for i in range(degree):
        of_rank = {q * kv_heads // heads for piece in pieces for q in range(heads)[piece.queries[i]]}
        for way in ("arriving", "leaving"):
            assert [kv for piece in pieces for kv in range(kv_heads)[getattr(piece, way)[i]]] == sorted(of_rank)


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_a_head_is_read_once_it_is_there_and_leaves_when_it_has_been_read(heads, kv_heads, degree):
    pieces = head_pieces(heads, kv_heads, degree, 4)
    for i in range(degree):
        there: set[int] = set()
        gone: set[int] = set()
        for piece in pieces:
            share = piece.shares[i]
            there |= set(range(share.kv_new, share.kv_stop))
            reads = {q * kv_heads // heads for q in range(share.q_start, share.q_stop)}
            assert reads == set(range(share.kv_start, share.kv_stop))
            assert reads <= there - gone
            gone |= set(range(share.kv_start, share.kv_kept))


def test_every_rank_that_works_has_a_head_in_every_piece():
    assert len(head_pieces(7, 7, 3, 4)) == 2
    assert len(head_pieces(2, 1, 4, 4)) == 1
