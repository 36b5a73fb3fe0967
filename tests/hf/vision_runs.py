"""Runs of vision-language models on ranks under random plans, against one process that calls the
model with pixels, one example at a time."""

import copy
import inspect
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from hf_flexseq.hf.model.probe import lively_copy
from tests.hf.tiny import (
    RandomPlanEngine,
    attached,
    errors,
    own_batches,
    random_steps,
    taken_gradients,
    worst_of,
)
from tests.hf.vision import called_with, keep_all_float64, tiny_vision_model, vision_examples
from tests.no_graph import without_graphs

# Images of each example, by the order in which ranks draw them.
COUNTS = [1, 0, 2, 1, 0, 3, 1, 1, 0, 1]
VIDEOS = (1, 2, 6)
CHANGED = 5  # the example of which the probe changes a pixel: it has three images


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


# ---- a pixel changes


def with_change(examples, index, place):
    """The examples with another value in one pixel of one of them. place: among the values."""
    example = dict(examples[index])
    name = next(n for n in ("pixel_values", "pixel_values_videos") if n in example)
    pixels = example[name].clone()
    pixels.view(-1)[place] += 3.0
    return [*examples[:index], {**example, name: pixels}, *examples[index + 1 :]]


def head_of(model):
    """The last layer, which makes logits."""
    head = model.get_output_embeddings()
    if head is not None:
        return head
    return next(one for name, one in model.named_modules() if name.endswith("lm_head"))


def hidden_of_ranks(engine, model, examples, rank, world_size):
    """The inputs of the head for each example, [tokens, hidden] of float64, on every rank."""
    order = []  # of the sequences of a step
    for source in range(world_size):
        order += range(source, len(examples), world_size)
    width = head_of(model).weight.shape[1]
    hidden = []
    for example in examples:
        hidden.append(torch.zeros(len(example["input_ids"]), width, dtype=torch.float64))
    calls, rows = [], []

    def note_call(_, args, kwargs):
        calls.append(kwargs)

    def note_row(_, args):
        rows.append(args[0][0].detach())

    # what is the user's own is tried in the first step
    note_call.__module__ = note_row.__module__ = "torch"
    begin = model.register_forward_pre_hook(note_call, with_kwargs=True)
    noting = head_of(model).register_forward_pre_hook(note_row)
    for item in engine.steps(own_batches(examples, rank, world_size), 2):
        item.backward(model)
    model.zero_grad()
    begin.remove()
    noting.remove()
    for call, of_call in zip(calls, rows, strict=True):
        if call["input_ids"].tolist() == [[0]]:
            continue  # a dummy of a rank that has nothing to do
        slices = [part for zone in call["seq_ctx"].shard.zones for part in zone.slices]
        parts = of_call.split([part.tokens for part in slices])
        for part, own in zip(slices, parts, strict=True):
            hidden[order[part.sequence]][part.start : part.stop] = own
    if world_size > 1:
        for of_example in hidden:
            torch.distributed.all_reduce(of_example)
    return hidden


def hidden_alone(model, example):
    """The input of the head in one process, [tokens, hidden]."""
    seen = []
    noting = head_of(model).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach())
    )
    with torch.no_grad():
        logits_of(model, example)
    noting.remove()
    return seen[0][0]


def probe_pixel(rank, world_size, name):
    """What a change of one pixel changes on the ranks, besides what it changes in one process:
    the largest differences in outputs of its example that one process changes and that it does
    not, and in those of other examples; and how many outputs of its example change and do not."""
    with pytest.MonkeyPatch.context() as patch:
        keep_all_float64(patch)
        examples = vision_examples(name, COUNTS, videos=VIDEOS)
        model = lively_model(name)
        alone = copy.deepcopy(model)
        before = hidden_alone(alone, examples[CHANGED])
        values = examples[CHANGED]["pixel_values"].flatten().nonzero().flatten().tolist()
        # a value of the last images, which the tower does not ignore as padding
        for place in values[:: -max(1, len(values) // 32)]:
            changed = with_change(examples, CHANGED, place)
            wanted = hidden_alone(alone, changed[CHANGED]) - before
            if wanted.any():
                break
        runs = []
        for step in (examples, changed):
            engine = RandomPlanEngine(Accelerator(cpu=True), seed=3, max_tokens_per_rank=5000)
            engine.attach(model)
            runs.append(hidden_of_ranks(engine, model, step, rank, world_size))
            engine.detach()
        apart = [after - rows for rows, after in zip(*runs, strict=True)]
        changes = wanted.abs().amax(dim=1) > 1e-11  # [tokens, hidden] -> [tokens]
        own = (apart[CHANGED] - wanted).abs().amax(dim=1)
        others = [float(rows.abs().max()) for i, rows in enumerate(apart) if i != CHANGED]
        return {
            "changed": int(changes.sum()),
            "unchanged": int((~changes).sum()),
            "off": float((own[changes] / wanted.abs().max()).amax()),
            "leaked": max([*own[~changes].tolist(), *others]),
        }
