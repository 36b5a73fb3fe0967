"""The segments of recurrent layers: chains through whole sequences, and their rows on ranks."""

import itertools
import random

import pytest

from hf_flexseq.plan.segments import chains_of
from tests.plans import shards_of


@pytest.mark.parametrize("strategy", ["ulysses", "zigzag", "balanced", "hybrid"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_chains_go_through_every_sequence_once_and_are_the_rows_of_their_ranks(strategy, degree):
    rng = random.Random(degree)
    for _ in range(10):
        lengths = [rng.choice((1, 2, 3, 5, 8, 13, 40)) for _ in range(rng.randint(1, 5))]
        chains = {}
        rows = {}  # (rank, member, token) -> row
        for rank, shard in enumerate(shards_of(strategy, degree, lengths)):
            (zone,) = shard.zones
            found = chains_of(zone)
            for member, chain in found.chains.items():
                assert chains.setdefault(member, chain) == chain
            for one in found.held:
                segment = chains[one.member][one.place]
                assert segment.holder == rank
                for token in range(segment.start, segment.stop):
                    rows[rank, one.member, token] = one.row + token - segment.start
            row = 0
            for part in zone.slices:
                for token in range(part.start, part.stop):
                    assert rows.pop((rank, part.sequence, token)) == row
                    row += 1
        assert not rows
        for member, length in enumerate(lengths):
            chain = chains[member]
            assert (chain[0].start, chain[-1].stop) == (0, length)
            for before, after in itertools.pairwise(chain):
                assert before.stop == after.start
                assert before.holder != after.holder
