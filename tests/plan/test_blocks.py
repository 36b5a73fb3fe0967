"""Blocks of tokens that see each other both ways."""

from itertools import combinations

from hf_flexseq.plan.blocks import later_pairs


def test_pairs_of_a_query_and_a_later_key_are_counted_by_block():
    blocks = [(0, 1), (3, 7), (7, 9)]
    pairs = [pair for start, stop in blocks for pair in combinations(range(start, stop), 2)]
    assert later_pairs(blocks) == len(pairs) == 7
