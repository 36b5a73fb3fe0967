"""Seconds and bytes of a vision tower, by hand."""

from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import step_ns
from hf_flexseq.cost.tower import TowerCost, TowerShape
from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.images import IMAGE, ImageSize
from tests.costs import simple_cost
from tests.plans import group

SHAPE = TowerShape(layers=3, hidden=8, intermediate=20, patches_per_token=4.0, row_numbers=32)
# a nanosecond per patch, a thousandth of it per pair
SIMPLE = TowerCost(
    patch_s=1e-9, pair_s=1e-12, patch_bytes=6.0, token_bytes=2.0, patches_per_token=4.0
)


def image(sequence: int, patches: int, pairs: int = 0) -> ImageSize:
    return ImageSize(
        sequence=sequence,
        modality=IMAGE,
        tokens=SIMPLE.tokens(patches),
        patches=patches,
        pairs=pairs,
        data_bytes=0,
    )


def test_flops_and_bytes_are_counted():
    def cost(shape: TowerShape, checkpointing: bool) -> TowerCost:
        return TowerCost.of(shape, flops=1.0, dtype_bytes=2, checkpointing=checkpointing)

    frozen = cost(replace(SHAPE, is_trained=False), False)
    # queries, keys, values and output; the MLP; scores and values of a pair
    assert frozen.patch_s == 2 * 3 * (4 * 8 * 8 + 2 * 8 * 20)
    assert frozen.pair_s == 2 * 3 * (2 * 8)
    assert (frozen.patch_bytes, frozen.token_bytes) == (0.0, 64.0)
    kept, again = cost(SHAPE, False), cost(SHAPE, True)
    assert (kept.patch_s, again.patch_s) == (3 * frozen.patch_s, 4 * frozen.patch_s)
    assert kept.patch_bytes == 2 * 3 * (9 * 8 + 4 * 20)
    assert again.patch_bytes == 2 * (3 * 8 + 9 * 8 + 4 * 20)
    assert kept.token_bytes == 128.0  # with gradients


def test_a_rank_holds_its_images_and_a_share_of_the_features():
    images = [image(0, 40), image(1, 16), image(1, 8)]
    plan = SIMPLE.placed(images, 2)
    assert plan.loads == (40, 24)
    # 40 patches, and half of 16 tokens
    assert plan.held_bytes == 40 * 6 + 8 * 2


@pytest.mark.parametrize(("sync", "with_tower"), [("lockstep", 33), ("free", 31)])
def test_a_tower_on_every_rank_of_a_group_encodes_all_images_of_the_group(sync, with_tower):
    """By hand, a nanosecond per token and per patch: two ranks share sequence 0."""
    images = [image(0, 7), image(0, 2, pairs=1000), image(1, 6), image(4, 9)]
    assert SIMPLE.sequences_ns(images) == {0: 10, 1: 6, 4: 9}
    micro_batches = [
        MicroBatch(groups=(group(0, 2, 0),)),  # 4 + 10 on both ranks
        MicroBatch(groups=(group(0, 1, 1), group(1, 2, 2))),  # 3 + 6, and 7
        MicroBatch(groups=(group(0, 1, 3), group(1, 2, 4))),  # 1, and 1 + 9
    ]
    lengths = (8, 3, 7, 1, 1)
    topology = Topology(nodes=1, ranks_per_node=2)
    given = (simple_cost(tower=SIMPLE), micro_batches, lengths, topology)
    image_ns = SIMPLE.sequences_ns(images)
    assert step_ns(*given, sync=sync, image_ns=image_ns) == with_tower
    assert step_ns(*given, sync=sync) == 12


def test_seconds_that_no_clock_can_count_are_refused():
    cost = simple_cost(tower=replace(SIMPLE, patch_s=1.0))
    cost.check_images([image(0, 999_999)])
    with pytest.raises(ValueError, match=r"may take 2e\+06 s for 2 images of a step"):
        cost.check_images([image(0, 10**6), image(1, 10**6)])
    simple_cost().check_images([image(0, 10**9)])
