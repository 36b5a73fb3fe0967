"""Whether the graph of a tower is kept: memory decides, and the plan's seconds."""

from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B, PRESETS
from hf_flexseq.plan.images import IMAGE, ImageSize
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.images import plan_images

COST = PRESETS["qwen3-vl-8b-h100"]
NODE = Topology(nodes=1, ranks_per_node=8)
MOST = COST.max_tokens_per_rank(8)
TOWER = replace(COST.tower, is_sharded=False)


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
    assert plan.placement.loads == (TOWER.image_ns(images_of(patches_of_share(0.5))[0]),) * 8


def test_a_graph_is_not_kept_where_a_sequence_fits_nowhere_beside_it():
    lengths = [7 * MOST, *[1000] * 7]
    plan = planned_so(patches_of_share(0.5), lengths)
    assert not plan.keeps_graph
    held = plan.held_tokens(COST.token_bytes)
    assert make_plan(lengths, NODE, COST, held_tokens=held).lengths == tuple(lengths)
    # forward once more, and features alone are held
    kept = planned_so(patches_of_share(0.5), [1000] * 8)
    assert plan.placement.seconds == pytest.approx(4 / 3 * kept.placement.seconds, rel=1e-6)
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
    assert planned_so(large, lengths, tower=TOWER.forward_only()).keeps_graph
    assert planned_so(large, lengths, max_tokens_per_rank=2 * MOST).keeps_graph


def test_the_graph_of_a_sharded_tower_is_kept_in_a_step_of_one_micro_batch():
    sharded = replace(TOWER, is_sharded=True)
    small = patches_of_share(0.04)
    assert planned_so(small, [MOST // 2] * 8, tower=sharded).keeps_graph
    assert not planned_so(small, [MOST // 2] * 16, tower=sharded).keeps_graph
    assert planned_so(small, [MOST // 2] * 16).keeps_graph
    assert planned_so(small, [100] * 8, tower=sharded, max_tokens_per_rank=110).keeps_graph
    assert not planned_so(small, [100] * 8, tower=sharded, max_tokens_per_rank=100).keeps_graph
    frozen = sharded.forward_only()
    assert planned_so(small, [MOST // 2] * 16, tower=frozen).keeps_graph


def test_choices_for_activations_may_make_room_for_a_graph():
    """Micro-batches that recompute layers hold a long sequence beside the graph: a step of this
    tower, whose second forward takes long, is planned so."""
    llama = analytic_cost_model(LLAMA_8B, DEVICES["H100"], NODE, zero_stage=3, checkpointing=False)
    cost = replace(llama, tower=TOWER)
    most = cost.max_tokens_per_rank(8)
    slow = replace(TOWER, patch_s=TOWER.patch_s * 1000)
    lengths = [6 * most, *[1000] * 7]
    patches = int(0.5 * cost.free_bytes(8) / TOWER.patch_bytes)
    without = replace(cost, activations=None)
    assert not planned_so(patches, lengths, cost=without, tower=slow).keeps_graph
    assert planned_so(patches, lengths, cost=cost, tower=slow).keeps_graph
