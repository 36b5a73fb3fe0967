"""Whether the graph of a tower is kept: memory decides, and the plan's seconds."""

import random
import statistics
from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan.images import IMAGE, ImageSize, frames_of_parts, place_images
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.images import plan_images

COST = PRESETS["qwen3-vl-8b-h100"]
NODE = Topology(nodes=1, ranks_per_node=8)
MOST = COST.max_tokens_per_rank(8)
TOWER = replace(COST.tower, is_sharded=False)
FROZEN = replace(TOWER, patch_bytes=0.0)


def images_of(patches, count=8):
    """Images of so many patches each, one per sequence."""
    tokens = TOWER.tokens(patches)
    sizes = {"tokens": tokens, "patches": patches, "pairs": patches**2, "data_bytes": 0}
    return [ImageSize(sequence=i, modality=IMAGE, **sizes) for i in range(count)]


def patches_of_share(share):
    """Patches of an image whose graph takes a share of a rank's memory."""
    return int(share * COST.free_bytes(8) / TOWER.patch_bytes)


def planned_so(patches, lengths, cost=COST, tower=TOWER, **options):
    images = images_of(patches)
    return plan_images(images, lengths, tower, NODE, cost, PlanOptions(**options))


def test_a_graph_is_kept_where_the_step_does_not_need_its_memory():
    plan = planned_so(patches_of_share(0.5), [1000] * 8)
    assert plan.keeps_graph
    assert plan.loads == (TOWER.image_ns(images_of(patches_of_share(0.5))[0]),) * 8


def test_a_graph_is_not_kept_where_a_sequence_fits_nowhere_beside_it():
    lengths = [7 * MOST, *[1000] * 7]
    plan = planned_so(patches_of_share(0.5), lengths)
    assert not plan.keeps_graph
    held = plan.held_tokens(COST.token_bytes)
    assert make_plan(lengths, NODE, COST, held_tokens=held).lengths == tuple(lengths)
    # forward once more, and features alone are held
    kept = planned_so(patches_of_share(0.5), [1000] * 8)
    assert plan.seconds == pytest.approx(4 / 3 * kept.seconds, rel=1e-6)
    assert plan.held_bytes == TOWER.tokens(patches_of_share(0.5)) * TOWER.token_bytes


def test_a_graph_that_makes_plans_slow_is_not_kept():
    """With little room each sequence needs many ranks; a run of a cheap tower costs less."""
    cheap = replace(TOWER, patch_s=TOWER.patch_s / 1000, pair_s=0.0)
    slow = replace(TOWER, patch_s=TOWER.patch_s * 1000)
    lengths = [MOST // 2] * 8
    patches = patches_of_share(0.7)
    assert not planned_so(patches, lengths, tower=cheap).keeps_graph
    assert planned_so(patches, lengths, tower=slow).keeps_graph


def test_a_graph_is_kept_where_it_is_small_frozen_or_not_counted():
    lengths = [7 * MOST, *[1000] * 7]
    large = patches_of_share(0.5)
    assert planned_so(patches_of_share(0.04), [8 * MOST - 1000]).keeps_graph
    assert planned_so(large, lengths, tower=FROZEN).keeps_graph
    assert planned_so(large, lengths, max_tokens_per_rank=2 * MOST).keeps_graph


def test_the_graph_of_a_sharded_tower_is_kept_in_a_step_of_one_micro_batch():
    sharded = replace(TOWER, is_sharded=True)
    small = patches_of_share(0.04)
    assert planned_so(small, [MOST // 2] * 8, tower=sharded).keeps_graph
    assert not planned_so(small, [MOST // 2] * 16, tower=sharded).keeps_graph
    assert planned_so(small, [MOST // 2] * 16).keeps_graph
    assert planned_so(small, [100] * 8, tower=sharded, max_tokens_per_rank=110).keeps_graph
    assert not planned_so(small, [100] * 8, tower=sharded, max_tokens_per_rank=100).keeps_graph
    frozen = replace(FROZEN, is_sharded=True)
    assert planned_so(small, [MOST // 2] * 16, tower=frozen).keeps_graph


# ---- drawn steps


def long_tailed_images(rng):
    """Patches of each image of a sequence, as (frames, patches of a frame): a tenth has none."""
    count = 0 if rng.random() < 0.1 else min(20, int(rng.paretovariate(1.3)))
    return [(1, int(min(max(rng.lognormvariate(7.09, 1.0), 256), 16384))) for _ in range(count)]


def divided_video(rng):
    """The parts of a video, (frames, patches of a frame); a tenth of the sequences has none."""
    if rng.random() < 0.1:
        return []
    patches = int(min(max(rng.lognormvariate(6.4, 0.5), 128), 1536))
    frames = min(max(2, round(rng.lognormvariate(2.8, 1.2))), 98_304 // patches)
    return [(count, patches) for count in frames_of_parts(frames, patches)]


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize(("drawn", "per_rank"), [(long_tailed_images, 8), (divided_video, 2)])
def test_images_and_parts_of_videos_are_spread_evenly(drawn, per_rank, ranks):
    planned, as_drawn = [], []
    for seed in range(20):
        rng = random.Random(seed)
        costs, own = [], [0] * ranks
        for sequence in range(ranks * per_rank):
            for frames, patches in drawn(rng):
                image = images_of(patches, 1)[0]
                cost = frames * TOWER.image_ns(image)
                costs.append(cost)
                own[sequence % ranks] += cost
        placement = place_images(costs, ranks)
        mean = sum(costs) / ranks
        # an image is not divided: no placement is below the largest one over the mean
        assert placement.imbalance < 1.05 * max(1.0, max(costs) / mean)
        planned.append(placement.imbalance)
        as_drawn.append(max(own) / mean)
    assert statistics.median(planned) < 1.02 < 2 < statistics.median(as_drawn)
