"""Rows of a step with the same images: each image is encoded once, and rows that begin alike share
their prefixes, images included, with the loss and gradients of rows by themselves."""

import pytest
import torch.nn.functional as F

from hf_flexseq import DataCollatorForFlexSeq
from tests.hf.random_steps import attached, errors, random_steps
from tests.hf.test_reach import keep_float64
from tests.hf.vision import tiny_vision_model, vision_examples
from tests.hf.vision_runs import vision_reference
from tests.ranks import run_cases

pytestmark = pytest.mark.processes

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
            images = len(item.step.images.plan.placement.owners)
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
