"""Which rank encodes which images, by hand, and that load as a record."""

import random
from dataclasses import replace

import pytest

from hf_flexseq.plan.images import (
    PART_PATCHES,
    TowerLoad,
    frames_of_parts,
    place_images,
)


def test_images_go_to_the_rank_with_the_least_work_the_longest_first():
    plan = place_images([3, 7, 5, 4], 2)
    assert plan.owners == (0, 0, 1, 1)
    assert plan.loads == (10, 9)
    assert plan.imbalance == 10 / 9.5
    assert plan.seconds == 10e-9
    assert plan.by_rank() == [[0, 1], [2, 3]]


def test_ranks_without_an_image_stand_in_with_the_cheapest():
    plan = place_images([6, 2], 4)
    assert plan.by_rank() == [[0], [1], [1], [1]]
    assert plan.loads == (6, 2, 0, 0)


def test_no_rank_has_more_than_the_mean_and_an_image():
    rng = random.Random(0)
    for _ in range(50):
        world_size = rng.randint(1, 9)
        costs = [1 + int(rng.lognormvariate(3, 1.5)) for _ in range(rng.randint(1, 60))]
        loads = place_images(costs, world_size).loads
        assert sum(loads) == sum(costs)
        assert max(loads) <= sum(costs) / world_size + max(costs)
        assert max(loads) - min(loads) <= max(costs)


def test_a_load_is_read_as_it_was_written_and_nothing_else_is():
    load = TowerLoad.of(replace(place_images([10**9, 3 * 10**9], 2), keeps_graph=False))
    record = load.to_record()
    assert record == {"images": 2, "seconds": 3.0, "imbalance": 1.5, "forwards": 2}
    assert TowerLoad.from_record(record) == load
    for change, said in (
        ({"images": 0}, "images=0: must be at least 1"),
        ({"seconds": -1.0}, "seconds=-1.0: must not be negative"),
        ({"imbalance": "x"}, "imbalance='x': must be a finite number"),
        ({"more": 1}, "unknown keys"),
    ):
        with pytest.raises(ValueError, match=said):
            TowerLoad.from_record(record | change)


def test_parts_of_a_video_have_enough_patches_and_nearly_as_many_frames():
    assert frames_of_parts(1, 10_000) == [1]
    assert frames_of_parts(7, 10_000) == [1] * 7
    assert frames_of_parts(3, PART_PATCHES - 1) == [3]
    assert frames_of_parts(5, PART_PATCHES - 1) == [3, 2]
    assert frames_of_parts(9, PART_PATCHES // 4) == [5, 4]
    rng = random.Random(0)
    for _ in range(200):
        frames, patches = rng.randint(1, 300), rng.randint(1, 2000)
        parts = frames_of_parts(frames, patches)
        assert sum(parts) == frames
        assert max(parts) - min(parts) <= 1
        assert len(parts) == 1 or min(parts) * patches >= PART_PATCHES
