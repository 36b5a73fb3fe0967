"""How heads are distributed over ranks and cut into pieces."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hf_flexseq.cost import HEAD_PIECES, PIECE_ROWS
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.program.heads import head_pieces, overlapping, pieces_per_head

HEADS = [(4, 4), (8, 2), (8, 8), (12, 4), (7, 7), (6, 1), (3, 3), (32, 8)]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_every_head_comes_and_goes_once(heads, kv_heads):
    for degree, most in product((1, 2, 3, 4, 8), (1, 2, 3, 4)):
        pieces = head_pieces(heads, kv_heads, degree, most)
        assert 1 <= len(pieces) <= most
        held = []
        queries = []
        for i in range(degree):
            of_rank = [q for piece in pieces for q in range(heads)[piece.queries[i]]]
            read = {q * kv_heads // heads for q in of_rank}
            for way in ("kv_arriving", "kv_leaving"):
                moved = [kv for piece in pieces for kv in range(kv_heads)[getattr(piece, way)[i]]]
                assert moved == sorted(read)
            queries += of_rank
            held += moved
        assert queries == list(range(heads))
        # ranks overlap where one KV head has readers on several
        is_shared = len(held) > len(set(held))
        assert overlapping([piece.kv_leaving for piece in pieces]) == is_shared
        assert not overlapping([piece.queries for piece in pieces])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cost_model_knows_how_many_pieces_there_are(device):
    cost = replace(
        PRESETS["llama-3.1-8b-h200"], all_to_all_overlap=1.0, piece_rows=PIECE_ROWS[device]
    )
    assert cost.heads == 32
    for degree, length in product((2, 4, 8, 16, 32), (100, 1000, 8192, 20_000, 70_000)):
        worth = int(pieces_per_head([length], device) * 32 / degree)
        pieces = len(head_pieces(32, 32, degree, max(1, min(worth, HEAD_PIECES))))
        assert cost.hidden_share(np.array([float(length)]), degree, "ulysses") == pytest.approx(
            [1 - 1 / pieces]
        )


def test_every_rank_that_works_has_a_head_in_every_piece():
    assert len(head_pieces(7, 7, 3, 4)) == 2
    assert len(head_pieces(2, 1, 4, 4)) == 1
