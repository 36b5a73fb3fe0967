"""Models with images give the same loss and gradients, of text, projector and tower, under any
plan, to rounding: float64, random legal plans that cut images anywhere, against one process that
takes one example at a time through the model's own forward, with pixels. Images that rows share
are encoded once; steps with images and steps of text follow on each other."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForImageTextToText

from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.hf.model.small import small_config
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.steps.images import UnsupportedImages
from hf_flexseq.steps.source_row import source_row
from tests.budget import others_nightly
from tests.hf.model_families import GIVEN, image_families
from tests.hf.test_reach import keep_float64
from tests.hf.tiny import (
    RandomPlanEngine,
    attached,
    errors,
    own_batches,
    random_steps,
    relative_errors,
)
from tests.hf.vision import keep_all_float64, tiny_vision_model, vision_examples
from tests.hf.vision_families import FAMILIES, IMAGE, OTHERS
from tests.hf.vision_runs import COUNTS, is_of_tower, vision_reference, worst_errors
from tests.no_graph import without_graphs
from tests.ranks import run_cases, run_ranks
from tests.versions import skip_where_the_plain_model_fails

pytestmark = pytest.mark.processes

FEW = [0, 0, 0, 2, 0, 0, 0, 1, 0, 0]  # images of which some ranks draw none
OF_RANK_0 = [2, 0, 0, 0, 1, 0, 0, 0, 0, 0]
MANY = [
    ("qwen3_vl", "ddp", False, None, COUNTS, 3),
    ("qwen3_vl", "ddp", True, None, FEW, 2),
    ("qwen3_vl", "ddp", False, "text", COUNTS, 2),
    ("qwen3_vl", "fsdp2", False, None, FEW, 2),
    ("qwen3_vl", "fsdp2", False, "tower", COUNTS, 2),
]
RUNS = {  # by name: the number of ranks, and arguments of `worst_errors`
    **{name: (2, [(name, "ddp", False, None, COUNTS, 1)]) for name in FAMILIES},
    **{
        f"{name} under FSDP2": (2, [(name, "fsdp2", True, None, COUNTS, 2)])
        for name in FAMILIES
        if name != "video_llava"  # ranks would gather two towers together, which is refused
    },
    "one rank": (1, [("qwen3_vl", "ddp", False, None, COUNTS, 1)]),
    "three ranks": (
        3,
        [
            ("qwen3_vl", "fsdp2", True, None, FEW, 1),
            ("qwen3_vl", "ddp", False, "tower", COUNTS, 1),
        ],
    ),
    "many on three": (3, MANY),
    "many on four": (4, MANY),
    "towers whose graphs are not kept": (
        2,
        [("qwen3_vl", "ddp", False, freeze, COUNTS, 2, False) for freeze in (None, "text")],
    ),
    # Qwen3-Omni counts positions in float32, and so does a rank without images
    "positions in float32": (
        2,
        [("qwen3_omni_moe_thinker", "ddp", False, None, OF_RANK_0, 1)],
    ),
}
# Grids and features of layers; rows that the forward projects, and experts; masks both ways.
EVERY_TIME = ("qwen3_vl", "fuyu", "llama4", "gemma3", "one rank", "three ranks")
EVERY_TIME += ("towers whose graphs are not kept", "positions in float32")


@pytest.mark.parametrize("name", others_nightly(list(RUNS), EVERY_TIME))
def test_plans_equal_one_process(name):
    world_size, cases = RUNS[name]
    skip_where_the_plain_model_fails(cases[0][0])
    options = {"ranks_per_node": 2 if world_size == 4 else None, "seconds": 150}
    by_case = run_cases(worst_errors, world_size, cases, **options)
    for case, by_rank in zip(cases, by_case, strict=True):
        _, sharding, _, freeze, _, _, *keeps_graph = case
        # A sharded tower that is trained keeps no graph beyond a micro-batch.
        keeps_none = sharding == "fsdp2" and freeze is None
        for worst in by_rank:
            assert worst["loss"] < 1e-12, case
            assert worst["gradients"] < 1e-10, case
            assert max(worst["micro_batches"]) > 1, case
            assert max(worst["runs"]) == (2 if keeps_none or keeps_graph else 1), case
            assert not keeps_graph or worst["runs"] == {2}, "again in the last backward"


# ---- what a model's forward would do with features


def empty_model(config):
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def test_forwards_that_read_more_than_rows_are_refused():
    options = {"image_token_id": IMAGE, "visual_indicator_token_ids": OTHERS[:5]}
    kind = image_families()["ovis2"].kind
    ovis = empty_model(small_config(kind, options))
    with pytest.raises(UnsupportedImages, match="reads visual_indicator_features"):
        VisionModel(ovis)


def test_towers_that_normalize_over_images_are_refused():
    emu = empty_model(small_config(image_families()["emu3"].kind, GIVEN["emu3"]))
    with pytest.raises(UnsupportedImages, match="batch norm"):
        VisionModel(emu)


# ---- rows with the same images, each of which is encoded once


PROMPTS = [1, 2, 0, 1]  # images of each
ANSWERS = 3


def answers_to(prompts):
    """Three rows for every prompt, which differ in the words that follow on it."""
    rows = []
    for number, prompt in enumerate(prompts):
        long = [*prompt["input_ids"], *range(3, 23)]
        for answer in range(ANSWERS):
            words = [5 + answer, 7 + number, 11, 13][: 2 + answer]
            labels = [-100] * len(long) + words
            tensors = {n: v.clone() for n, v in prompt.items() if n not in ("input_ids", "labels")}
            if "token_type_ids" in tensors:
                more = len(long) + len(words) - len(prompt["input_ids"])
                tensors["token_type_ids"] = F.pad(tensors["token_type_ids"], (0, more))
            rows.append({"input_ids": long + words, "labels": labels, **tensors})
    return rows


def shared_run(rank, world_size, name, changes):
    """Errors, images encoded and tokens spared under random plans. changes: whether the image of
    one row differs in one value."""
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        rows = answers_to(vision_examples(name, PROMPTS))
        if changes:
            rows[1]["pixel_values"].view(-1)[-1] += 0.5
        wanted = vision_reference(tiny_vision_model(name), rows)
        model = tiny_vision_model(name).train()
        engine = attached(model, world_size)
        mine = [DataCollatorForFlexSeq()(rows[rank::world_size])]
        # a tower's head is not used
        ddp = {"find_unused_parameters": True} if world_size > 1 else None
        found = []
        for item, loss, gradients in random_steps(engine, model, mine, ddp=ddp, plans=4):
            images = len(item.step.images.plan.owners)
            found.append((errors(loss, gradients, wanted), images, item.plan.tokens_spared))
        return found


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("qwen3_vl", 2),
        ("gemma3", 1),
        pytest.param("qwen3_vl", 1, marks=pytest.mark.nightly),
        pytest.param("gemma3", 2, marks=pytest.mark.nightly),
    ],
)
def test_each_image_is_encoded_once_for_all_rows(name, world_size):
    cases = [(name, False), (name, True)]
    by_case = run_cases(shared_run, world_size, cases, seconds=120)
    for (_, changes), by_rank in zip(cases, by_case, strict=True):
        for steps in by_rank:
            for apart, images, _ in steps:
                assert apart["loss"] < 1e-12
                assert apart["gradients"] < 1e-10
                assert images == sum(PROMPTS) + changes
            # rows with blocks that see both ways are planned by themselves
            assert any(spared for *_, spared in steps) == (name != "gemma3")


# ---- steps of different kinds that follow on each other


# Images of each example, step by step.
STEPS = ([1, 0, 2, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1])


def errors_of_steps(rank, world_size):
    """The largest error of each step's gradients under a DDP that expects all of them, and whether
    the tower has any."""
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        model = tiny_vision_model("qwen3_vl").train()
        engine = RandomPlanEngine(Accelerator(cpu=True), seed=3)
        engine.attach(model)
        wrapped = DistributedDataParallel(model, find_unused_parameters=False)
        found = []
        for seed, counts in enumerate(STEPS):
            examples = vision_examples("qwen3_vl", counts, seed=seed)
            _, wanted = vision_reference(tiny_vision_model("qwen3_vl"), examples)
            for item in engine.steps(own_batches(examples, rank, world_size), 2):
                item.backward(wrapped)
            of_step, has_tower = {}, set()
            for name, parameter in model.named_parameters():
                if is_of_tower(name):
                    has_tower.add(parameter.grad is not None)
                if parameter.grad is not None:
                    of_step[name] = parameter.grad.clone()
            errors = relative_errors(of_step, {name: wanted[name] for name in of_step})
            found.append((max(errors.values()), has_tower))
            model.zero_grad()
        engine.detach()
        return found


def test_steps_of_text_alone_leave_the_tower_without_gradients_and_ddp_in_order():
    for found in run_ranks(errors_of_steps, 2, seconds=100):
        for (error, has_tower), counts in zip(found, STEPS, strict=True):
            assert error < 1e-10
            assert has_tower == {any(counts)}


def tower_runs_with_router_loss(rank, world_size, keeps_graph):
    """How often the tower runs in a step of two passes and several micro-batches."""
    graphs = nullcontext() if keeps_graph else without_graphs()
    with pytest.MonkeyPatch.context() as patch, graphs:
        keep_all_float64(patch)
        model = tiny_vision_model("qwen3_vl_moe").train()
        model.config.output_router_logits = True
        model.config.text_config.output_router_logits = True
        engine = RandomPlanEngine(
            Accelerator(cpu=True), seed=3, accepts=lambda plan: len(plan.micro_batches) > 1
        )
        engine.attach(model)
        assert engine.whole_model.router is not None
        examples = vision_examples("qwen3_vl_moe", STEPS[0])
        for item in engine.steps(own_batches(examples, rank, world_size), 2):
            item.backward(model)
            assert item.step.passes == 2
            runs = item.step.images.runs
        engine.detach()
        return runs


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_a_tower_runs_forward_once_for_both_passes_of_a_router_loss(keeps_graph):
    runs = 1 if keeps_graph else 2  # with the backward
    assert run_ranks(tower_runs_with_router_loss, 2, keeps_graph, seconds=100) == [runs, runs]


def read_positions(examples, **columns):
    """Positions of examples in a row, [tokens, axes], where the first has these columns, too."""
    model = VisionModel(tiny_vision_model("qwen3_vl"))
    for example in examples:
        tokens = len(example["input_ids"])
        example["position_ids"] = torch.arange(tokens)
    examples[0] |= columns
    return model.read(source_row([DataCollatorForFlexSeq()(examples)])).images.positions


def test_given_positions_are_those_of_text_beside_images():
    text, image = vision_examples("qwen3_vl", [0, 1])
    given = 5 + torch.arange(len(text["input_ids"]))
    positions = read_positions([text, image], position_ids=given)
    assert torch.equal(positions[: len(given)], given.unsqueeze(1).expand(-1, 3))
    assert positions[len(given)].tolist() == [0, 0, 0]


def test_given_positions_of_an_example_with_images_are_refused():
    (image,) = vision_examples("qwen3_vl", [1])
    given = 5 + torch.arange(len(image["input_ids"]))
    with pytest.raises(ValueError, match="sequence 0 .* leave the column out"):
        read_positions([image], position_ids=given)


def test_grids_without_pixels_are_refused_before_the_step():
    (image,) = vision_examples("qwen3_vl", [1])
    del image["pixel_values"]
    with pytest.raises(ValueError, match="sequence 0 .* and image_grid_thw: cut examples"):
        read_positions([image])
