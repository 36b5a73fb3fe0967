"""Everybody gets the chunks it reads, and what crosses to a node crosses once."""

import random
from collections import Counter

import pytest

from hf_flexseq.plan.shard import cuts, held_chunks
from hf_flexseq.schedule.gather import gather_hops

PACKS = [
    (1,),
    (2, 1),
    (17,),
    (64,),
    (40, 3, 29),
    tuple(random.Random(0).choices(range(1, 30), k=12)),
]


def chunks_held(group_cuts, index, degree):
    """(sequence, chunk) of every chunk with tokens that the rank of `index` holds."""
    return {
        (sequence, chunk)
        for sequence, cut in enumerate(group_cuts)
        for chunk in held_chunks("allgather", index, degree, mirrored=cut.mirrored)
        if cut.tokens((chunk,))
    }


@pytest.mark.parametrize(
    "degree, per_node", [(2, 1), (2, 2), (3, 3), (4, 2), (6, 3), (8, 2), (8, 4), (8, 8)]
)
@pytest.mark.parametrize("lengths", PACKS)
def test_ranks_get_what_they_read_and_lend_what_they_have(degree, per_node, lengths):
    group_cuts = cuts("allgather", lengths, degree)
    owned = [chunks_held(group_cuts, i, degree) for i in range(degree)]
    have = [set(chunks) for chunks in owned]
    legs = gather_hops(group_cuts, degree, per_node)
    assert len(legs) == (1 if degree <= per_node else 2)
    crossings = Counter()
    for hops in legs:
        had = [set(chunks) for chunks in have]
        for hop in hops:
            assert hop.chunk in had[hop.source]
            assert hop.chunk not in have[hop.target], "twice"
            have[hop.target].add(hop.chunk)
            if hop.source // per_node != hop.target // per_node:
                crossings[hop.chunk, hop.target // per_node] += 1
    for i in range(degree):
        read = {
            (sequence, chunk)
            for sequence, chunk in set().union(*owned)
            if any(sequence == s and chunk <= c for s, c in owned[i])
        }
        assert read <= have[i]
    assert set(crossings.values()) <= {1}


def test_what_crosses_evens_out_over_the_ranks_of_a_node():
    group_cuts = cuts("allgather", (64,), 4)
    crossed = Counter()
    for hop in gather_hops(group_cuts, 4, 2)[0]:
        if hop.source // 2 != hop.target // 2:
            crossed[hop.target] += group_cuts[0].tokens(hop.chunk[1:])
    # 8 tokens a chunk; fetched by every reader it would be 32, 32, 16, 16
    assert crossed == {0: 16, 1: 16, 2: 8, 3: 8}
