"""How the heads of a layer are distributed over the ranks of an Ulysses group."""

import pytest

from hf_flexseq.program.heads import head_shares

HEADS = [(4, 4), (8, 2), (8, 8), (12, 4), (7, 7), (6, 1), (3, 3), (32, 8)]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_every_query_head_has_a_rank_and_the_kv_head_that_it_reads(heads, kv_heads):
    for degree in (1, 2, 3, 4, 8):
        shares = head_shares(heads, kv_heads, degree)
        assert [query for share in shares for query in share.queries] == list(range(heads))
        for share in shares:
            read = [query * kv_heads // heads for query in share.queries]
            assert list(share.keys) == sorted(set(read))
            # the kernel's own reading of what it is given
            given = share.keys
            if share.query2kv is not None:
                given = [share.keys[number] for number in share.query2kv]
            each = len(read) // max(1, len(given))
            assert [kv for kv in given for _ in range(each)] == read


def test_kv_heads_are_repeated_only_where_their_readers_are_uneven():
    assert [share.query2kv for share in head_shares(6, 3, 2)] == [(0, 0, 1), (0, 1, 1)]
    assert [share.query2kv for share in head_shares(8, 2, 2)] == [None, None]
