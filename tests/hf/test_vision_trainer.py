"""FlexSeqTrainer on examples with images trains as the plain Trainer does: two ranks with two
examples each against one process with four, whose mean over a batch is the step's token mean."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqTrainer
from tests.budget import others_nightly
from tests.hf.plain import logged
from tests.hf.test_metrics import at_tokens, best
from tests.hf.trainers import (
    assert_logged_alike,
    distance,
    trained,
    trainer_of,
    weights_apart,
    weights_of,
    zero,
)
from tests.hf.vision import tiny_vision_model, vision_examples
from tests.hf.vision_families import IMAGE
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

STEPS, SAVED = 3, 1
IMAGES = [1, 0, 2, 1, 0, 0, 0, 0, 1, 0, 1, 2]  # of each example, again and again
HELD_OUT = 8  # so one of the steps has no image
SETTINGS = {
    "resumed": {"save_strategy": "steps", "save_steps": SAVED},
    "lora": {},
    "frozen tower": {},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "bf16": {"bf16": True},
    "zero2": {},
    "zero3": {},
}
STAGES = {"zero2": 2, "zero3": 3}


def with_pixels(examples):
    """The plain Trainer's collator: rows padded on the right, and the images of all rows."""

    def padded(name, value):
        rows = [torch.tensor(example[name]) for example in examples]
        return pad_sequence(rows, batch_first=True, padding_value=value)

    batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}
    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    batch["attention_mask"] = (torch.arange(lengths.max()) < lengths[:, None]).long()
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    for name in ("pixel_values", "image_grid_thw"):
        tensors = [example[name] for example in examples if name in example]
        if tensors:
            batch[name] = torch.cat(tensors)
    return batch


def model_of(kind):
    model = tiny_vision_model("qwen3_vl")
    if kind == "frozen tower":
        model.model.visual.requires_grad_(False)
    if kind == "lora":
        layers = ["q_proj", "v_proj", "down_proj", "qkv", "linear_fc2"]  # of text, of the tower
        adapter = LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
        model = get_peft_model(model, adapter).double()
    return model.float() if kind == "bf16" or kind in STAGES else model


def make_trainer(kind: str, folder: Any, *, ours: bool) -> Any:
    examples = vision_examples("qwen3_vl", IMAGES * 4)
    options = {"max_tokens_per_rank": 30, "plan_trace": str(folder.parent / "trace.jsonl")}
    model = model_of(kind)  # before DeepSpeed's settings, which make transformers draw others
    settings = dict(SETTINGS[kind])
    if kind in STAGES and ours:
        settings["deepspeed"] = zero(STAGES[kind])
    return trainer_of(
        FlexSeqTrainer if ours else Trainer,
        folder,
        model=model,
        flexseq=options if ours else None,
        batch=2 if ours else 4,
        data_collator=DataCollatorForFlexSeq() if ours else with_pixels,
        train_dataset=examples[HELD_OUT:],
        eval_dataset=examples[:HELD_OUT],
        per_device_eval_batch_size=2 if ours else HELD_OUT,
        train_sampling_strategy="sequential",
        max_steps=STEPS,
        **settings,
    )


def run(rank, world_size, kind, folder):
    """A run; and the weights of one that resumes from its checkpoint, if it saves any."""
    found = trained(make_trainer(kind, folder, ours=True), evaluates=True)
    if kind != "resumed":
        return found, None
    resumed = make_trainer(kind, folder, ours=True)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
    return found, weights_of(resumed.model)


@pytest.mark.parametrize("kind", others_nightly(SETTINGS, tried=["resumed", "zero3"]))
def test_steps_and_an_evaluation_equal_the_plain_trainers(tmp_path, kind):
    by_rank = run_ranks(run, 2, kind, tmp_path / "ours", seconds=120)
    stock = trained(make_trainer(kind, tmp_path / "stock", ours=False), evaluates=True)
    for ours, resumed in by_rank:
        if kind == "bf16":  # rounds otherwise in micro-batches of other sizes
            assert weights_apart(stock, ours) < 2e-2
            assert_logged_alike(stock, ours, ["loss", "eval_loss", "grad_norm"], rel=3e-3)
        elif kind in STAGES:  # float32 parameters, whose gradients are summed in another order
            assert weights_apart(stock, ours) < 5e-6
            assert_logged_alike(stock, ours, ["loss", "eval_loss"], rel=1e-5)
        else:
            assert weights_apart(stock, ours) < 2e-6
            assert_logged_alike(stock, ours, ["loss", "eval_loss", "grad_norm"], rel=1e-6)
        assert max(logged(ours.log, "flexseq/micro_batches")) > 1
        if resumed is not None:
            assert distance(ours.weights, resumed) == 0
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").open()]
    images = {line["step"]: line.get("tower", {"images": 0})["images"] for line in lines}
    counts = (IMAGES * 4)[HELD_OUT:]
    assert images == {step: sum(counts[4 * step : 4 * step + 4]) for step in range(STEPS)}


def test_a_text_model_with_options_of_its_own_makes_no_cache(tmp_path):
    """Recurrent layers would be asked for their last state; the Trainer's option does not reach
    them."""
    found = []
    for flexseq in (None, {"max_tokens_per_rank": 30}):
        trainer = trainer_of(
            Trainer,
            tmp_path,
            model=tiny_vision_model("qwen3_5"),
            flexseq=flexseq,
            data_collator=with_pixels if flexseq is None else DataCollatorForFlexSeq(),
            train_dataset=vision_examples("qwen3_5", IMAGES),
            train_sampling_strategy="sequential",
            max_steps=2,
        )
        assert trainer.model.config.get_text_config().use_cache
        found.append(trained(trainer))
    assert weights_apart(*found) < 2e-6


# ---- predictions


def best_of_logits(given, labels):
    """From transformers 5.24 on the plain Trainer gives the outputs of the tower as well."""
    return best(given[0] if isinstance(given, tuple) else given, labels)


def predictions(rank, world_size, folder, collator, *, flexseq=True):
    """What metrics are given of examples with images, and without, and the loss."""
    given = []

    def metrics(evaluated):
        given.append((evaluated.predictions, evaluated.label_ids))
        return {}

    examples = vision_examples("qwen3_vl", IMAGES[:7])
    trainer = trainer_of(
        FlexSeqTrainer if flexseq else Trainer,
        folder,
        model=tiny_vision_model("qwen3_vl"),
        flexseq={"max_tokens_per_rank": 30} if flexseq else None,
        data_collator=collator,
        eval_dataset=examples,
        per_device_eval_batch_size=8 // world_size,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=best_of_logits,
        prediction_loss_only=False,
    )
    loss = trainer.evaluate()["eval_loss"]
    ((predicted, labels),) = given
    lengths = [len(example["input_ids"]) for example in examples]
    return loss, at_tokens(predicted, lengths), at_tokens(labels, lengths)


@pytest.mark.parametrize("collator", [with_pixels, DataCollatorForFlexSeq()])
def test_metrics_get_the_arrays_of_the_plain_trainer_for_images(tmp_path, collator):
    """Seven examples on two ranks, one of which draws an example again."""
    wanted_loss, *wanted = predictions(0, 1, tmp_path, with_pixels, flexseq=False)
    for loss, *found in run_ranks(predictions, 2, tmp_path, collator, seconds=100):
        assert all(np.array_equal(*arrays) for arrays in zip(found, wanted, strict=True))
        assert loss == pytest.approx(wanted_loss, rel=1e-6)  # the plain one in float32
