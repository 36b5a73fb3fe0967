"""Everybody gets the chunks it reads, and what crosses to a node crosses once."""

import random
from collections import Counter, defaultdict

import pytest

from hf_flexseq.plan.shard import cuts, held_chunks
from hf_flexseq.schedule.gather import RankLeg, gather_hops, gather_of_rank

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


every_pack = pytest.mark.parametrize("lengths", PACKS)
every_group = pytest.mark.parametrize(
    "degree, per_node", [(2, 1), (2, 2), (3, 3), (4, 2), (6, 3), (8, 2), (8, 4), (8, 8)]
)


@every_group
@every_pack
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


def messages_of(hops, index):
    """The part of the rank of `index` in a leg, from the hops of all ranks."""
    sent, received = defaultdict(list), defaultdict(list)
    for hop in hops:
        if hop.source == index:
            sent[hop.target].append(hop.chunk)
        elif hop.target == index:
            received[hop.source].append(hop.chunk)
    return RankLeg(
        tuple((rank, tuple(sent[rank])) for rank in sorted(sent)),
        tuple((rank, tuple(received[rank])) for rank in sorted(received)),
    )


@every_group
@every_pack
def test_a_rank_finds_its_own_hops_without_those_of_the_others(degree, per_node, lengths):
    group_cuts = cuts("allgather", lengths, degree)
    legs = gather_hops(group_cuts, degree, per_node)
    for index in range(degree):
        found = gather_of_rank(group_cuts, degree, per_node, index)
        assert found == tuple(messages_of(hops, index) for hops in legs)


def crossed_tokens(group_cuts, degree, per_node):
    """Tokens that each rank receives from other nodes."""
    crossed = Counter(dict.fromkeys(range(degree), 0))
    for hop in gather_hops(group_cuts, degree, per_node)[0]:
        if hop.source // per_node != hop.target // per_node:
            sequence, chunk = hop.chunk
            crossed[hop.target] += group_cuts[sequence].tokens((chunk,))
    return crossed


def test_what_crosses_evens_out_over_the_ranks_of_a_node():
    group_cuts = cuts("allgather", (64,), 4)
    # 8 tokens a chunk; fetched by every reader it would be 32, 32, 16, 16
    assert crossed_tokens(group_cuts, 4, 2) == {0: 16, 1: 16, 2: 8, 3: 8}


@pytest.mark.parametrize("degree, per_node", [(8, 2), (16, 8), (32, 4), (64, 8)])
def test_ranks_of_a_node_get_the_same_from_other_nodes_to_within_a_few_tokens(degree, per_node):
    rng = random.Random(degree)
    for _ in range(5):
        lengths = tuple(rng.randint(1, 20_000) for _ in range(rng.randint(1, 8)))
        crossed = crossed_tokens(cuts("allgather", lengths, degree), degree, per_node)
        for first in range(0, degree, per_node):
            of_node = [crossed[rank] for rank in range(first, first + per_node)]
            assert max(of_node) - min(of_node) <= 2 * len(lengths)
