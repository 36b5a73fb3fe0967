"""Steps of different kinds follow on each other: with images and without, of micro-batches that
run twice. Ranks of different devices place images alike."""

from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.steps.source_row import source_row
from tests.hf.random_steps import own_batches
from tests.hf.test_reach import keep_float64
from tests.hf.tiny import RandomPlanEngine, relative_errors
from tests.hf.vision import keep_all_float64, tiny_vision_model, vision_examples
from tests.hf.vision_runs import (
    COUNTS,
    is_of_tower,
    vision_reference,
    worst_errors,
)
from tests.no_graph import without_graphs
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

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


@pytest.mark.parametrize("freeze", [None, "text"])
def test_a_tower_whose_graph_is_not_kept_runs_again_in_the_last_backward(freeze):
    case = ("qwen3_vl", "ddp", False, freeze, COUNTS, 2, False)
    for worst in run_ranks(worst_errors, 2, *case, seconds=100):
        assert worst["gradients"] < 1e-10
        assert worst["runs"] == {2}


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


def test_positions_have_the_model_s_dtype_on_a_rank_without_images_too():
    """Qwen3-Omni counts positions in float32."""
    images = [2, 0, 0, 0, 1, 0, 0, 0, 0, 0]  # of rank 0 alone
    case = ("qwen3_omni_moe_thinker", "ddp", False, None, images, 1)
    for worst in run_ranks(worst_errors, 2, *case, seconds=100):
        assert worst["loss"] < 1e-12
        assert worst["gradients"] < 1e-10


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
