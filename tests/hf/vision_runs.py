"""Runs of vision-language models on ranks under random plans, against one process that calls the
model with pixels, one example at a time."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from hf_flexseq.hf.model.probe import lively_copy
from tests.hf.tiny import attached, errors, own_batches, random_steps, taken_gradients, worst_of
from tests.hf.vision import called_with, keep_all_float64, tiny_vision_model, vision_examples
from tests.no_graph import without_graphs

# Images of each example, by the order in which ranks draw them.
COUNTS = [1, 0, 2, 1, 0, 3, 1, 1, 0, 1]
VIDEOS = (1, 2, 6)


def lively_model(name):
    """A tiny model of a family whose outputs depend on whatever they can."""
    return lively_copy(tiny_vision_model(name), torch.float64).train()


def logits_of(model, example):
    """Logits of one process for one example, with its pixels, [tokens, vocabulary]."""
    takes = inspect.signature(model.forward).parameters
    given = {name: value for name, value in called_with(example).items() if name in takes}
    return model(**given, use_cache=False).logits[0].double()


def vision_reference(model, examples):
    """Loss and gradients of one process: one example at a time, with its pixels."""
    total, targets = 0.0, 0
    for example in examples:
        logits = logits_of(model, example)
        labels = torch.tensor([*example["labels"][1:], -100])
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        targets += int((labels != -100).sum())
    (total / targets).backward()
    return float(total.detach()) / targets, taken_gradients(model)


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
    for module in reversed(list(model.modules())):  # those inside of others first
        if type(module).__name__.endswith(
            ("DecoderLayer", "EncoderLayer", "Block", "AttentionLayer")
        ):
            fully_shard(module)
    return fully_shard(model)


def worst_errors(
    rank, world_size, name, sharding, checkpointing, freeze, counts, plans, keeps_graph=True
):
    """The largest relative errors of loss and gradients, and the runs of the tower per step."""
    graphs = nullcontext() if keeps_graph else without_graphs()
    with pytest.MonkeyPatch.context() as patch, graphs:
        keep_all_float64(patch)
        examples = vision_examples(name, counts, videos=VIDEOS)
        reference = frozen(lively_model(name), freeze)
        wanted = vision_reference(reference, examples)
        model = frozen(lively_model(name), freeze)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if sharding == "fsdp2":
            sharded(model)
        engine = attached(
            model.train(),
            7 * world_size,
            accepts=lambda plan: plans > 1 or len(plan.micro_batches) > 1,
            max_tokens_per_rank=5000,
        )
        # The last norm of CLIP's tower is not used.
        ddp = {"find_unused_parameters": True} if sharding == "ddp" and world_size > 1 else None
        batches = own_batches(examples, rank, world_size)
        found, runs, micro_batches = [], set(), set()
        for item, loss, gradients in random_steps(engine, model, batches, ddp=ddp, plans=plans):
            runs.add(item.step.images.runs)
            micro_batches.add(len(item.plan.micro_batches))
            found.append(errors(loss, gradients, wanted))
        return {**worst_of(found), "runs": runs, "micro_batches": micro_batches}
