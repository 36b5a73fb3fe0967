"""How heads are dealt to ranks and cut into pieces."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.cost import HEAD_PIECES, PIECE_ROWS
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program.heads import head_pieces, overlapping, pieces_per_head
from tests.ranks import join, run_threads

HEADS = [(4, 4), (8, 2), (8, 8), (12, 4), (7, 7), (6, 1), (3, 3), (32, 8)]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_every_head_comes_and_goes_once(heads, kv_heads, degree, most):
    pieces = head_pieces(heads, kv_heads, degree, most)
    assert 1 <= len(pieces) <= most
    queries = [
        q for i in range(degree) for piece in pieces for q in range(heads)[piece.queries[i]]
    ]
    assert queries == list(range(heads))
    for i in range(degree):
        of_rank = {
            q * kv_heads // heads for piece in pieces for q in range(heads)[piece.queries[i]]
        }
        for way in ("kv_arriving", "kv_leaving"):
            assert [
                kv for piece in pieces for kv in range(kv_heads)[getattr(piece, way)[i]]
            ] == sorted(of_rank)


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_ranks_overlap_where_one_kv_head_has_readers_on_several(heads, kv_heads, degree):
    pieces = head_pieces(heads, kv_heads, degree, 4)
    held = [
        kv
        for i in range(degree)
        for piece in pieces
        for kv in range(kv_heads)[piece.kv_leaving[i]]
    ]
    assert overlapping([piece.kv_leaving for piece in pieces]) == (len(held) > len(set(held)))
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


def gradients(rank, world_size, heads, kv_heads):
    """Of q, k and v, without and with checkpointing: there the backward has q, k, v and out in the
    token layout."""
    group = Group(ranks=tuple(range(world_size)), sequences=(0, 1), strategy="ulysses")
    shard, cpu = make_shard(MicroBatch(groups=(group,)), (23, 40), rank), torch.device("cpu")
    options = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(rank)}
    tensors = [torch.randn(shard.tokens, h, 8, **options) for h in (heads, kv_heads, kv_heads)]
    seq_ctx = SequenceContext(shard, join(), choose_kernel(cpu, torch.float64, 8), cpu)
    found = []
    for run in (lambda attend, *qkv: attend(*qkv), partial(checkpoint, use_reentrant=False)):
        qkv = [x.clone().requires_grad_() for x in tensors]
        out = run(partial(sequence_parallel_attention, seq_ctx=seq_ctx), *qkv)
        out.square().sum().backward()
        found.append([x.grad for x in qkv])
    return [bool((a == b).all()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_checkpointing_changes_no_bit(world_size, heads, kv_heads):
    assert run_threads(gradients, world_size, heads, kv_heads) == [[True] * 3] * world_size
