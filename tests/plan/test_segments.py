import itertools
import random

import pytest

from hf_flexseq.plan.groups import Group, MicroBatch
from hf_flexseq.plan.segments import chains_of
from hf_flexseq.plan.shard import make_shard

STRATEGIES = ("ulysses", "zigzag", "balanced", "hybrid")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_chains_go_through_every_sequence_once_and_are_the_rows_of_their_ranks(strategy, degree):
    rng = random.Random(degree)
    for _ in range(20):
        lengths = [rng.choice((1, 2, 3, 5, 8, 13, 40)) for _ in range(rng.randint(1, 5))]
        name = strategy if degree > 1 else "local"
        members = tuple(range(len(lengths)))
        group = Group(ranks=tuple(range(degree)), sequences=members, strategy=name)
        chains = {}
        rows = {}  # (rank, member, token) -> row
        for rank in range(degree):
            (zone,) = make_shard(MicroBatch(groups=(group,)), lengths, rank).zones
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
            assert chain[0].start == 0
            assert chain[-1].stop == length
            for before, after in itertools.pairwise(chain):
                assert before.stop == after.start
                assert before.holder != after.holder
