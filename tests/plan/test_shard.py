"""Layouts, on ints alone: every token is held once, ranks are even, and the zigzag is balanced."""

import random

import pytest

from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.shard import (
    make_shard,
    mirrored,
)
from tests.budget import for_seeds
from tests.plans import group, random_plan, shards_of


def pieces(shard):
    return [(s.sequence, s.start, s.stop) for s in shard.slices]


@pytest.mark.parametrize(
    "strategy, lengths, parts",
    [
        ("ulysses", [5, 4], [[(0, 0, 4)], [(0, 4, 5), (1, 0, 4)]]),  # the concatenation is cut
        ("zigzag", [8], [[(0, 0, 2), (0, 6, 8)], [(0, 2, 4), (0, 4, 6)]]),  # front and back
        # the second sequence lies the other way round
        ("balanced", [8, 6], [[(0, 0, 4), (1, 3, 6)], [(0, 4, 8), (1, 0, 3)]]),
    ],
)
def test_slices_of_two_ranks(strategy, lengths, parts):
    assert [pieces(shard) for shard in shards_of(strategy, 2, lengths)] == parts


def test_nested_groups_lie_one_after_the_other():
    micro_batch = MicroBatch(groups=(group(0, 2, 0), group(1, 2, 1)))
    shard = make_shard(micro_batch, [6, 4], 1)
    assert [(zone.start, zone.stop) for zone in shard.zones] == [(0, 3), (3, 7)]
    assert shard.tokens == 7
    assert make_shard(micro_batch, [6, 4], 2).zones == ()


@for_seeds(20)
def test_every_token_is_held_once_and_no_rank_holds_more_than_its_share(seed):
    rng = random.Random(seed)
    world_size = rng.randint(1, 9)
    lengths = [rng.choice([1, 2, 3, rng.randint(1, 50)]) for _ in range(rng.randint(1, 12))]
    plan = random_plan(lengths, world_size, rng)
    held = {(i, t): 0 for i, n in enumerate(lengths) for t in range(n)}
    for micro_batch in plan.micro_batches:
        limits = micro_batch.tokens_per_rank(lengths, world_size)
        for rank in range(world_size):
            shard = make_shard(micro_batch, lengths, rank)
            assert shard.tokens == sum(s.tokens for s in shard.slices) <= limits[rank]
            for piece in shard.slices:
                for token in range(piece.start, piece.stop):
                    held[piece.sequence, token] += 1
    assert set(held.values()) == {1}


@pytest.mark.parametrize("degree", [2, 3, 5, 8])
def test_zigzag_shares_causal_work_evenly(degree):
    """Query-key pairs per rank, counted one by one."""
    length = 40 * degree
    work = [
        sum(position + 1 for s in shard.slices for position in range(s.start, s.stop))
        for shard in shards_of("zigzag", degree, [length])
    ]
    assert max(work) <= 1.02 * min(work)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_rounding_of_short_sequences_does_not_pile_up(degree):
    tokens = [shard.tokens for shard in shards_of("zigzag", degree, [1] * 25 + [2] * 7)]
    assert max(tokens) - min(tokens) <= 1


def test_about_half_of_the_tokens_lie_the_other_way_round():
    assert mirrored([5]) == (False,)
    assert mirrored([5, 5]) == (False, True)
    assert mirrored([3, 9, 5, 2]) == (True, False, True, True)
    assert mirrored([100, 1, 2, 3]) == (False,) * 4  # not worth it
