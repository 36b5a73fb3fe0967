"""Which images of a padded batch belong to which of its rows, and what of a batch a call takes."""

import pytest
import torch
import transformers
from transformers.models.swin.modeling_swin import SwinDropPath

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.towers import reader_of_text, towers_draw_noise
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.image_rows import images_of_rows, parts_of_rows
from hf_flexseq.steps.images import NO_ROW, image_rows
from hf_flexseq.steps.source_row import SourceRow
from tests.hf.tiny import refused
from tests.hf.vision import VIDEO, tiny_vision_model

IMAGE = 9


def with_grids(*grids):
    """Images of these heights and widths, in patches, which are numbered."""
    thw = torch.tensor([[1, *grid] for grid in grids])
    patches = torch.arange(int(thw.prod(dim=1).sum())).unsqueeze(1)
    return {"pixel_values": patches, "image_grid_thw": thw}


@pytest.mark.parametrize(
    ("tensors", "tokens"),
    [
        (with_grids((2, 2), (2, 4)), [2, 1]),  # cut in the middle of an image
        (with_grids((2, 2), (2, 4)), [1, 3]),  # tokens without patches
        (with_grids((2, 2)), [1, 1]),  # one image for two rows
        (with_grids((2, 2)), [0, 0]),
        (
            # sizes say nothing of numbers of tokens
            {
                "pixel_values": torch.ones(3, 3, 8, 8),
                "image_sizes": torch.tensor([[8, 8], [4, 8], [8, 8]]),
            },
            [4, 6],
        ),
    ],
)
def test_images_that_belong_to_no_row_for_certain_are_refused(tensors, tokens):
    with refused(
        "do not tell which of its pixel_values, image_.* belong to which row", ValueError
    ):
        parts_of_rows(tensors, tokens)


# ---- calls

IDS = torch.tensor([[0, 5, IMAGE, 6], [IMAGE, IMAGE, 7, 0]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
NAMES = {"image": ("pixel_values", "image_grid_thw")}


def call_with(**given):
    images = with_grids((2, 2), (2, 4))
    labels = IDS.masked_fill(IDS == IMAGE, IGNORE_INDEX)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": labels, **images, **given}
    return ModelCall.read(batch, of_tokens=True)


def divided(call):
    return images_of_rows(call, {"image": IMAGE}, NAMES)


def test_types_that_are_padded_on_another_side_are_refused():
    types = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 0]])
    with refused("not 1 at all of its tokens 9, .* padding_side='left'", ValueError):
        divided(call_with(mm_token_type_ids=types))


def test_seconds_of_videos_go_with_their_rows():
    grids = torch.tensor([[1, 2, 2], [2, 2, 2]])
    videos = {"pixel_values_videos": torch.arange(12).unsqueeze(1), "video_grid_thw": grids}
    ids = torch.tensor([[VIDEO, 4, 0], [5, 6, 0], [VIDEO, VIDEO, 7]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids, **videos}
    call = ModelCall.read(
        {**batch, "second_per_grid_ts": torch.tensor([0.5, 2.0])}, of_tokens=True
    )
    first, none, last = images_of_rows(call, {"video": VIDEO}, {"video": tuple(videos)})
    assert none == {}
    assert first["second_per_grid_ts"].tolist() == [0.5]
    assert last["second_per_grid_ts"].tolist() == [2.0]
    assert last["pixel_values_videos"].flatten().tolist() == list(range(4, 12))


def test_tensors_that_are_not_of_one_image_each_are_refused_by_name():
    with refused("a batch has video_times, .* leave them out", ValueError):
        divided(call_with(video_times=torch.ones(2)))


# ---- placeholders that are text


def read(kinds=None, **tensors):
    """What a model reads of a row with one token of a video. kinds: of its tokens."""
    ids = torch.tensor([5, VIDEO, 6])
    columns = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(3)}
    if kinds is not None:
        columns["mm_token_type_ids"] = torch.tensor(kinds)
    row = SourceRow(columns=columns, lengths=(3,), given_images=(tensors,) if tensors else ())
    return VisionModel(tiny_vision_model("qwen2_vl")).read(row)


def test_a_placeholder_that_is_text_by_its_type_is_text():
    row = read([0, 0, 0])
    assert row.images.images == ()
    assert image_rows(row.columns["input_ids"], row.images, [], []).tolist() == [NO_ROW] * 3


@pytest.mark.parametrize("kinds", [None, [0, 2, 0]])
def test_a_placeholder_without_pixels_is_refused(kinds):
    with refused("1 tokens 58, which stand for parts of videos, and no pixels", ValueError):
        read(kinds)


# ---- towers that draw random numbers


@pytest.mark.slow
def test_a_tower_that_leaves_out_branches_draws_random_numbers():
    model = tiny_vision_model("qwen2_vl")
    assert not towers_draw_noise(model)
    branch = SwinDropPath(0.0)
    model.get_submodule("model.visual").branch = branch
    assert not towers_draw_noise(model)
    branch.drop_prob = 0.1
    assert towers_draw_noise(model)


# ---- models that take text alone

WITH_IMAGES = transformers.Gemma3Config(image_token_id=9)
TYPES = {"token_type_ids": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("config", "columns", "message"),
    [
        (WITH_IMAGES, TYPES, "token_type_ids marks tokens of images"),
        (
            WITH_IMAGES,
            {"mm_token_type_ids": torch.tensor([0, 2])},
            "mm_token_type_ids marks tokens",
        ),
        (WITH_IMAGES, {"input_ids": torch.tensor([5, 9])}, "the token 9, config.image_token_id"),
        (WITH_IMAGES, {"token_type_ids": torch.tensor([0, 0])}, None),
        (transformers.GPT2Config(), TYPES, None),
    ],
)
def test_tokens_of_images_are_refused_where_a_model_takes_text(config, columns, message):
    text = {"input_ids": torch.tensor([5, 6])}
    row = SourceRow(columns=text | columns, lengths=(2,))
    reader = reader_of_text(config, "its layers see both ways")
    if message is None:
        assert reader.read(row).columns is row.columns
        return
    with refused(message):
        reader.read(row)
