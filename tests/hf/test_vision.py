"""Models with images give the same loss and gradients, of text, projector and tower, under any
plan, to rounding: float64, random legal plans that cut images anywhere, against one process that
takes one example at a time through the model's own forward, with pixels. And where one pixel
changes, exactly those outputs change that change in one process."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from hf_flexseq.hf.model.small import small_config
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.steps.images import UnsupportedImages
from tests.budget import others_nightly
from tests.hf.model_families import GIVEN, image_families
from tests.hf.vision import tiny_config, tiny_vision_model
from tests.hf.vision_families import FAMILIES, IMAGE, OTHERS
from tests.hf.vision_runs import COUNTS, probe_pixel, worst_errors
from tests.ranks import run_cases
from tests.versions import skip_where_the_plain_model_fails

pytestmark = pytest.mark.processes

# Grids and features of layers; rows that the forward projects, and experts; masks both ways.
EVERY_TIME = ("qwen3_vl", "fuyu", "llama4", "gemma3")
FEW = [0, 0, 0, 2, 0, 0, 0, 1, 0, 0]  # images of which some ranks draw none


def assert_exact(case, by_rank):
    """Assert that the errors of a case are those of rounding, and that it ran what it should."""
    _, sharding, _, freeze, _, _ = case
    for worst in by_rank:
        assert worst["loss"] < 1e-12, case
        assert worst["gradients"] < 1e-10, case
        assert max(worst["micro_batches"]) > 1, case
        # A sharded tower that is trained keeps no graph beyond a micro-batch.
        most = 2 if sharding == "fsdp2" and freeze is None else 1
        assert max(worst["runs"]) == most, case


@pytest.mark.parametrize("name", others_nightly(list(FAMILIES), EVERY_TIME))
def test_families_equal_one_process(name):
    skip_where_the_plain_model_fails(name)
    case = (name, "ddp", False, None, COUNTS, 1)
    (by_rank,) = run_cases(worst_errors, 2, [case], seconds=120)
    assert_exact(case, by_rank)


# ranks would gather two towers together, which is refused
SHARDED = [name for name in FAMILIES if name != "video_llava"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHARDED)
def test_families_under_fsdp2_with_checkpointing(name):
    skip_where_the_plain_model_fails(name)
    case = (name, "fsdp2", True, None, COUNTS, 2)
    (by_rank,) = run_cases(worst_errors, 2, [case], seconds=120)
    assert_exact(case, by_rank)


@pytest.mark.parametrize("name", others_nightly(list(FAMILIES), EVERY_TIME[:1]))
def test_a_pixel_changes_what_it_changes_in_one_process(name):
    skip_where_the_plain_model_fails(name)
    (by_rank,) = run_cases(probe_pixel, 2, [(name,)], seconds=120)
    for found in by_rank:
        assert found["changed"]
        assert found["unchanged"] or FAMILIES[name].is_prefix
        assert found["off"] < 1e-9  # of the largest change
        assert found["leaked"] < 1e-12


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, [("qwen3_vl", "ddp", False, None, COUNTS, 1)]),
        (
            3,
            [
                ("qwen3_vl", "fsdp2", True, None, FEW, 1),
                ("qwen3_vl", "ddp", False, "tower", COUNTS, 1),
            ],
        ),
    ],
)
def test_other_numbers_of_ranks(world_size, cases):
    for case, by_rank in zip(cases, run_cases(worst_errors, world_size, cases), strict=True):
        assert_exact(case, by_rank)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_frozen_parts_and_few_images(world_size):
    cases = [
        ("qwen3_vl", "ddp", False, None, COUNTS, 3),
        ("qwen3_vl", "ddp", True, None, FEW, 2),
        ("qwen3_vl", "ddp", False, "tower", COUNTS, 2),
        ("qwen3_vl", "ddp", False, "text", COUNTS, 2),
        ("qwen3_vl", "fsdp2", False, None, FEW, 2),
        ("qwen3_vl", "fsdp2", False, "tower", COUNTS, 2),
    ]
    if world_size == 1:
        cases = [case for case in cases if case[1] == "ddp"]
    options = {"ranks_per_node": 2 if world_size == 4 else None, "seconds": 150}
    results = run_cases(worst_errors, world_size, cases, **options)
    for case, by_rank in zip(cases, results, strict=True):
        assert_exact(case, by_rank)


# ---- what a model's forward would do with features


def empty_model(config):
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def empty_vision_model(name, **changes):
    """An empty model of a family. changes: of its configuration."""
    return empty_model(tiny_config(name, **changes))


def test_forwards_that_read_more_than_rows_are_refused():
    options = {"image_token_id": IMAGE, "visual_indicator_token_ids": OTHERS[:5]}
    kind = image_families()["ovis2"].kind
    ovis = empty_model(small_config(kind, options))
    with pytest.raises(UnsupportedImages, match="reads visual_indicator_features"):
        VisionModel(ovis)


def test_a_forward_that_fails_before_it_reads_features_is_refused_with_its_error(monkeypatch):
    llava = empty_vision_model("llava")
    forward = type(llava.model).forward

    @functools.wraps(forward)
    def changed(self, *args, mm_encoder_outputs=None, **kwargs):
        if mm_encoder_outputs is not None:
            raise AttributeError("features have no all_rows")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(llava.model), "forward", changed)
    end = "it must read one; the trial ended with AttributeError: features have no all_rows"
    with pytest.raises(UnsupportedImages, match=f"reads none of pooler_output .*{end}"):
        VisionModel(llava)


def test_towers_that_normalize_over_images_are_refused():
    emu = empty_model(small_config(image_families()["emu3"].kind, GIVEN["emu3"]))
    with pytest.raises(UnsupportedImages, match="batch norm"):
        VisionModel(emu)


def test_switched_adapters_of_a_tower_are_noticed():
    of_tower = LoraConfig(target_modules=r".*visual.*qkv")
    adapted = get_peft_model(tiny_vision_model("qwen3_vl"), of_tower).requires_grad_(False)
    model = VisionModel(adapted.get_base_model())
    before = model.weights
    assert model.weights == before
    with adapted.disable_adapter():
        assert model.weights != before
    assert model.weights == before
    adapted.add_adapter("other", of_tower)
    adapted.set_adapter("other")
    assert model.weights != before
