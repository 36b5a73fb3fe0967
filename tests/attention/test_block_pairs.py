"""The pairs of blocks of one rank against a list of all pairs, and the calls that take them."""

import pytest
import torch

from hf_flexseq.attention import block_pairs
from hf_flexseq.attention.block_pairs import (
    BLOCK,
    PaddedBlocks,
    SequenceBlocks,
    backward_rounds,
    forward_rounds,
)

CPU = torch.device("cpu")

# by sequence, its tokens and which of its blocks the rank has
CASES = {
    "alone": [(5 * BLOCK, range(5))],
    "both ends": [(9 * BLOCK - 7, (0, 1, 7, 8))],
    "one in the middle": [(7 * BLOCK + 1, (3,))],
    "the first one": [(4 * BLOCK, (0,))],
    "several": [(3 * BLOCK + 41, (0, 2)), (1, (0,)), (6 * BLOCK, (1, 2, 5)), (2 * BLOCK, (1,))],
    "nothing": [],
}


def sequences_of(case):
    return [
        SequenceBlocks(i, tokens, tuple(numbers))
        for i, (tokens, numbers) in enumerate(CASES[case])
    ]


def names_of(sequences):
    """(sequence, number) of every block, in the order of the layout."""
    return [(blocks.sequence, number) for blocks in sequences for number in blocks.numbers]


def blocks_of(rows, names):
    """The names of the blocks that the results of a round belong to."""
    chosen = torch.arange(len(names))[rows.where]
    assert len(chosen) == rows.blocks
    return [names[i] for i in chosen.tolist()]


def named_rounds(rounds, sequences, query_names):
    """By round, its pairs as (sequence, q, k), and the blocks of its dQ and of its dK."""
    own, key_names = names_of(sequences), names_of([blocks.read for blocks in sequences])
    found = []
    for pairs in rounds.rounds:
        queries = [query_names[i] for i in pairs.queries.tolist()]
        keys = [key_names[i] for i in pairs.keys.tolist()]
        assert [q[0] for q in queries] == [k[0] for k in keys]
        of_queries, of_keys = pairs.query_results, pairs.key_results
        assert queries[of_queries.pairs] == blocks_of(of_queries.blocks, own)
        assert keys[of_keys.pairs] == blocks_of(of_keys.blocks, own)
        found.append(
            (
                [(s, q, k) for (s, q), (_, k) in zip(queries, keys, strict=True)],
                queries[of_queries.pairs],
                keys[of_keys.pairs],
            )
        )
    return found


def all_pairs(sequences):
    return [
        (blocks.sequence, q, k)
        for blocks in sequences
        for q in range(blocks.all_blocks)
        for k in range(q + 1)
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_forward_has_every_pair_of_this_ranks_queries_once(case):
    sequences = sequences_of(case)
    own = names_of(sequences)
    rounds = named_rounds(forward_rounds(sequences, CPU), sequences, own)
    found = [pair for pairs, _, _ in rounds for pair in pairs]
    assert sorted(found) == [(s, q, k) for s, q, k in all_pairs(sequences) if (s, q) in own]
    for distance, (pairs, of_queries, of_keys) in enumerate(rounds):
        assert {q - k for _, q, k in pairs} == {distance}
        assert len(of_queries) == len(set(of_queries)) == len(pairs)
        assert not of_keys


@pytest.mark.parametrize("case", CASES)
def test_the_backward_has_every_pair_of_this_ranks_queries_and_keys_once(case):
    sequences = sequences_of(case)
    own = names_of(sequences)
    readers = names_of([blocks.readers for blocks in sequences])
    rounds = named_rounds(backward_rounds(sequences, CPU), sequences, readers)
    found = [pair for pairs, _, _ in rounds for pair in pairs]
    wanted = [p for p in all_pairs(sequences) if (p[0], p[1]) in own or (p[0], p[2]) in own]
    assert sorted(found) == wanted
    for distance, (pairs, of_queries, of_keys) in enumerate(rounds):
        assert {q - k for _, q, k in pairs} == {distance}
        assert sorted(of_queries) == sorted((s, q) for s, q, _ in pairs if (s, q) in own)
        assert sorted(of_keys) == sorted((s, k) for s, _, k in pairs if (s, k) in own)
        assert len(set(of_queries)) == len(of_queries)
        assert len(set(of_keys)) == len(of_keys)


@pytest.mark.parametrize("case", CASES)
def test_padding_comes_and_goes(case):
    sequences = sequences_of(case)
    padded = PaddedBlocks(sequences, CPU)
    tokens = sum(part.tokens for blocks in sequences for part in blocks.slices)
    x = torch.arange(1.0, 2 * tokens + 1).view(tokens, 2)
    blocks = padded.pad(x)
    assert blocks.shape == (len(names_of(sequences)), BLOCK, 2)
    assert torch.equal(padded.unpad(blocks), x)
    assert blocks.sum() == x.sum()


def test_blocks_that_follow_each_other_are_one_slice_of_tokens():
    blocks = SequenceBlocks(3, 5 * BLOCK - 1, (0, 1, 3, 4))
    found = [(part.sequence, part.start, part.stop) for part in blocks.slices]
    assert found == [(3, 0, 2 * BLOCK), (3, 3 * BLOCK, 5 * BLOCK - 1)]


@pytest.mark.parametrize("most", [1, 7, 8, 9, 10**6])
def test_a_call_takes_whole_rounds_up_to_a_bound(monkeypatch, most):
    monkeypatch.setattr(block_pairs, "CALL_BYTES", {"cpu": 10 * most})
    rounds = forward_rounds([SequenceBlocks(0, 8 * BLOCK, tuple(range(8)))], CPU)
    calls = rounds.calls(10)
    assert [pairs for call in calls for pairs in call.rounds] == list(rounds.rounds)
    for call in calls:
        assert len(call.rounds) == 1 or len(call.queries) <= most
        assert call.segments.causal == (call is calls[0])
        assert call.segments.q_lens == (BLOCK,) * len(call.queries)
        for pairs, share in call.shares():
            assert torch.equal(call.queries[share], pairs.queries)
            assert torch.equal(call.keys[share], pairs.keys)
    assert len(calls) == {1: 8, 7: 6, 8: 6, 9: 5, 10**6: 2}[most]
    assert rounds.calls(10) is calls


def test_a_gpu_takes_the_pairs_of_32k_tokens_in_a_hundredth_as_many_calls(monkeypatch):
    """With 32 query heads and 8 KV heads of size 128 in 16 bits."""
    monkeypatch.setitem(block_pairs.CALL_BYTES, "cpu", block_pairs.CALL_BYTES["cuda"])
    rounds = forward_rounds([SequenceBlocks(0, 2**15, tuple(range(256)))], CPU)
    calls = rounds.calls(2 * BLOCK * (32 + 8) * 128 * 2)
    pairs = [len(call.queries) for call in calls]
    assert sum(pairs) == 32_896
    assert max(pairs) == 256
    assert len(calls) == 220
