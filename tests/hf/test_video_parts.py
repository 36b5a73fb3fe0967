"""Videos whose frames a model encodes independently are divided between ranks, with the loss and
gradients of one process. A trial finds out which models these are."""

import random

import pytest
import torch
from torch import nn

from hf_flexseq.hf.model.tower_trial import has_independent_frames, try_features
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.plan.images import IMAGE, VIDEO
from tests.budget import others_nightly
from tests.hf.vision import IMAGES, tiny_vision_model, vision_examples
from tests.hf.vision_families import FAMILIES
from tests.hf.vision_runs import COUNTS, VIDEOS, worst_errors
from tests.ranks import run_cases

PART = "hf_flexseq.plan.images.PART_PATCHES"
GRID = "video_grid_thw"


def a_video(name):
    """Tensors of a video of a family, those of a drawn example; None without grids."""
    family = FAMILIES[name]
    video = {}
    if family.video is not None:
        video = IMAGES[family.video](random.Random(0), torch.Generator().manual_seed(0))
    return video if GRID in video else None


WITH_GRIDS = [name for name in FAMILIES if a_video(name) is not None]
# Frames attend to each other, or tokens are made of several frames.
DEPENDENT = ("minimax_m3_vl", "kimi_k25", "ernie4_5_vl_moe")
EVERY_TIME = (*DEPENDENT, "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
DIVIDED = [name for name in WITH_GRIDS if name not in DEPENDENT]


# ---- the trial


def passes(model, name):
    """What the trial finds about a model of a family."""
    (modality,) = [one for one in try_features(model) if one.name == VIDEO]
    return has_independent_frames(model, modality, a_video(name))


@pytest.mark.parametrize("name", others_nightly(WITH_GRIDS, EVERY_TIME))
def test_the_trial_tells_which_models_encode_frames_independently(name):
    assert passes(tiny_vision_model(name), name) == (name not in DEPENDENT)


def test_modules_of_the_user_s_own_are_not_tried():
    class OverFrames(nn.Module):
        """May do anything."""

    model = tiny_vision_model("qwen3_vl")
    model.model.visual.blocks[0].mlp = OverFrames()
    assert not passes(model, "qwen3_vl")


# ---- gradients


def divided_errors(rank, world_size, name, *case):
    """As `worst_errors`, with every frame a part, and what the tower encoded on this rank: how
    many images, and how many frames of videos."""
    encoded = {IMAGE: 0, VIDEO: 0}
    own = VisionModel._encode_together

    def counting(self, images):
        for image in images:
            encoded[image.size.modality] += 1
        return own(self, images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PART, 1)
        patch.setattr(VisionModel, "_encode_together", counting)
        return {**worst_errors(rank, world_size, name, *case), **encoded}


def assert_divided(name, by_rank):
    """Assert the errors of rounding, and that each image and each frame was encoded once."""
    frames = 0
    for example in vision_examples(name, COUNTS, videos=VIDEOS):
        frames += sum(grid[0] for grid in example.get(GRID, torch.empty(0, 3)).tolist())
    assert frames > len(VIDEOS)
    assert sum(worst[VIDEO] for worst in by_rank) == frames
    assert sum(worst[IMAGE] for worst in by_rank) == sum(COUNTS)
    for worst in by_rank:
        assert worst["loss"] < 1e-12
        assert worst["gradients"] < 1e-10
        assert worst["runs"] == {1}
        assert max(worst["micro_batches"]) > 1
        assert worst[VIDEO]


# Of each, whether the tower is frozen.
OFTEN = [(2, "qwen2_vl", None), (2, "qwen2_5_vl", "tower"), (3, "qwen3_vl", None)]
EVERY = [(n, name, what) for n in (2, 3) for name in DIVIDED for what in (None, "tower")]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "name", "freeze"),
    [case if case in OFTEN else pytest.param(*case, marks=pytest.mark.nightly) for case in EVERY],
)
def test_divided_videos_equal_one_process(world_size, name, freeze):
    case = (name, "ddp", False, freeze, COUNTS, 1)
    (by_rank,) = run_cases(divided_errors, world_size, [case], seconds=150)
    assert_divided(name, by_rank)
