"""Models with images give the same loss and gradients, of text, projector and tower, under any
plan, to rounding: float64, random legal plans that cut images anywhere, against one process that
takes one example at a time through the model's own forward, with pixels."""

import inspect

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq import DataCollatorForFlexSeq
from tests.hf.test_exactness import whole
from tests.hf.test_reach import keep_float64
from tests.hf.tiny import RandomPlanEngine, relative_errors, taken_gradients
from tests.hf.vision import FAMILIES, called_with, tiny_vision_model, vision_examples
from tests.ranks import run_cases

pytestmark = pytest.mark.processes

# Images of each example, by the order in which ranks draw them.
COUNTS = [1, 0, 2, 1, 0, 3, 1, 1, 0, 1]
VIDEOS = (1, 2, 6)
UNUSED = ("gemma3", "llava", "paligemma")


def vision_reference(model, examples):
    """Loss and gradients of one process: one example at a time, with its pixels."""
    takes = inspect.signature(model.forward).parameters
    total, targets = 0.0, 0
    for example in examples:
        given = {name: value for name, value in called_with(example).items() if name in takes}
        logits = model(**given, use_cache=False).logits[0].double()
        labels = torch.tensor([*example["labels"][1:], -100])
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        targets += int((labels != -100).sum())
    (total / targets).backward()
    return float(total.detach()) / targets, taken_gradients(model)


def rank_batches(examples, rank, world_size):
    """What a rank's dataloader gives: two batches of every world_size-th example."""
    mine = examples[rank::world_size]
    half = len(mine) // 2
    collate = DataCollatorForFlexSeq()
    return [collate(part) for part in (mine[:half], mine[half:]) if part]


def is_of_tower(name):
    return not name.startswith(("model.language_model", "lm_head"))


def frozen(model, what):
    """The model with its tower, or its text, without gradients."""
    for name, parameter in model.named_parameters():
        if what and is_of_tower(name) == (what == "tower"):
            parameter.requires_grad_(False)
    return model


def sharded(model):
    """The model under FSDP2: a unit for each layer of text and tower, and one for the rest."""
    for module in list(model.modules()):
        if type(module).__name__.endswith(
            ("DecoderLayer", "EncoderLayer", "Block", "AttentionLayer")
        ):
            fully_shard(module)
    return fully_shard(model)


def worst_errors(rank, world_size, name, sharding, checkpointing, freeze, counts, plans):
    """The largest relative errors of loss and gradients, and the runs of the tower per step."""
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        grid_sample = F.grid_sample  # of GLM-4V, whose table is float64 then, and the grid is not
        patch.setattr(
            F, "grid_sample", lambda x, grid, **how: grid_sample(x, grid.double(), **how)
        )
        examples = vision_examples(name, counts, videos=VIDEOS)
        reference = frozen(tiny_vision_model(name), freeze)
        wanted_loss, wanted = vision_reference(reference, examples)
        model = frozen(tiny_vision_model(name), freeze)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if sharding == "fsdp2":
            sharded(model)
        model.train()
        engine = RandomPlanEngine(Accelerator(cpu=True), seed=7 * world_size)
        engine.attach(model)
        wrapped = model
        if sharding == "ddp" and world_size > 1:
            # Some towers end with a norm or a head that is not used.
            wrapped = DistributedDataParallel(model, find_unused_parameters=name in UNUSED)
        worst = {"loss": 0.0, "gradients": 0.0, "runs": set(), "micro_batches": set()}
        for _ in range(plans):
            for item in engine.steps(rank_batches(examples, rank, world_size), 2):
                loss = item.backward(wrapped)
                worst["runs"].add(item.step.images.runs)
                worst["micro_batches"].add(len(item.plan.micro_batches))
            if world_size > 1:
                torch.distributed.all_reduce(loss)
            found = {}
            for parameter_name, parameter in model.named_parameters():
                gradient = parameter.grad
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                found[parameter_name] = whole(gradient).double()
            model.zero_grad()
            errors = relative_errors(found, wanted)
            worst["loss"] = max(worst["loss"], abs(float(loss) / world_size / wanted_loss - 1))
            worst["gradients"] = max(worst["gradients"], *errors.values())
        engine.detach()
        return worst


@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_one_process(name):
    cases = [(name, "ddp", False, None, COUNTS, 3), (name, "fsdp2", True, None, COUNTS, 2)]
    for by_rank in run_cases(worst_errors, 2, cases, seconds=120):
        for worst in by_rank:
            assert worst["loss"] < 1e-12
            assert worst["gradients"] < 1e-10
            assert max(worst["micro_batches"]) > 1


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_other_numbers_of_ranks_and_frozen_parts(world_size):
    few = [0, 0, 0, 2, 0, 0, 0, 1, 0, 0]  # images of which some ranks draw none
    cases = [
        ("qwen3_vl", "ddp", False, None, COUNTS, 3),
        ("qwen3_vl", "ddp", True, None, few, 2),
        ("qwen3_vl", "ddp", False, "tower", COUNTS, 2),
        ("qwen3_vl", "ddp", False, "text", COUNTS, 2),
        ("qwen3_vl", "fsdp2", False, None, few, 2),
        ("qwen3_vl", "fsdp2", False, "tower", COUNTS, 2),
    ]
    if world_size == 1:
        cases = [case for case in cases if case[1] == "ddp"]
    options = {"ranks_per_node": 2 if world_size == 4 else None, "seconds": 150}
    for case, by_rank in zip(
        cases, run_cases(worst_errors, world_size, cases, **options), strict=True
    ):
        for worst in by_rank:
            assert worst["loss"] < 1e-12, case
            assert worst["gradients"] < 1e-10, case
            assert max(worst["micro_batches"]) > 1, case
            _, sharding, _, freeze, _, _ = case
            # A sharded tower that is trained keeps no graph beyond a micro-batch.
            most = 2 if sharding == "fsdp2" and freeze is None else 1
            assert max(worst["runs"]) == most, case
