"""Ten steps of the FlexSeq trainer on several ranks against ten steps of the plain Trainer in one
process."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from hf_flexseq import (
    DataCollatorForFlexSeq,
    FlexSeqArguments,
    FlexSeqCallback,
    FlexSeqConfig,
    FlexSeqTrainer,
)
from tests.hf.tiny import VOCAB, documents, noting_figures, tiny_llama
from tests.ranks import run_cases, run_ranks

STEPS = 10
OPTIONS = {"max_tokens_per_rank": 40, "lookahead": 2, "cost_model": "estimate"}


def training_arguments(cls, folder, *, batch, accumulation, **options):
    return cls(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        lr_scheduler_type="linear",
        max_grad_norm=0.5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{
            "learning_rate": 1e-2,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_strategy": "no",
            **options,
        },
    )


def padded(examples):
    """The collator of the plain run: right padding and a mask."""
    width = max(len(e["input_ids"]) for e in examples)

    def pad(name, value):
        return torch.tensor([e[name] + [value] * (width - len(e[name])) for e in examples])

    mask = torch.tensor(
        [[1] * len(e["input_ids"]) + [0] * (width - len(e["input_ids"])) for e in examples]
    )
    return {
        "input_ids": pad("input_ids", 0),
        "labels": pad("labels", -100),
        "attention_mask": mask,
    }


def float64_loss(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """transformers' causal loss without its cast to float32."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        / num_items_in_batch
    )


def dataset(size=72):
    """72 is a whole number of steps in every case below; repeats that fill the last batch depend
    on the world size."""
    return documents([1 + (i * i * 7) % 60 for i in range(size)])


def plain_run(
    folder,
    *,
    batch,
    accumulation=1,
    optim="sgd",
    loss=None,
    size=72,
    dtype=torch.float64,
    model=None,
    **options,
):
    """Weights before and after, and the log, of the plain Trainer in this process."""
    model = model or tiny_llama(dtype)
    if loss is not None:
        model.loss_function = loss
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    args = training_arguments(
        TrainingArguments, folder, batch=batch, accumulation=accumulation, optim=optim, **options
    )
    trainer = Trainer(model=model, args=args, train_dataset=dataset(size), data_collator=padded)
    trainer.train()
    return before, {n: p.detach() for n, p in model.named_parameters()}, trainer.state.log_history


def make_trainer(how, model, folder, batch, accumulation, optim, size):
    common = {"batch": batch, "accumulation": accumulation, "optim": optim}
    if how == "subclass":
        args = training_arguments(FlexSeqConfig, folder, **common, **OPTIONS)
        return FlexSeqTrainer(model=model, args=args, train_dataset=dataset(size))
    args = training_arguments(TrainingArguments, folder, **common)
    trainer = Trainer(
        model=model, args=args, train_dataset=dataset(size), data_collator=DataCollatorForFlexSeq()
    )
    trainer.add_callback(FlexSeqCallback(trainer, FlexSeqArguments(**OPTIONS)))
    return trainer


def flexseq_run(rank, world_size, how, folder, batch, accumulation, optim, size=72):
    model = tiny_llama()
    trainer = make_trainer(how, model, folder, batch, accumulation, optim, size)
    steps = noting_figures(trainer)
    trainer.train()
    assert max(logged(steps, "groups_of_2"), default=0) >= 1, "no step ever split a sequence"
    assert model.config._attn_implementation == "sdpa"
    return {n: p.detach().numpy() for n, p in model.named_parameters()}, trainer.state.log_history


def update_error(before, wanted, found):
    """||found - wanted|| over ||wanted - before||, all parameters together."""
    difference = math.sqrt(
        sum(float((torch.as_tensor(found[n]) - wanted[n]).norm()) ** 2 for n in wanted)
    )
    update = math.sqrt(sum(float((before[n] - wanted[n]).norm()) ** 2 for n in wanted))
    return difference / update


def logged(history, key):
    return [entry[key] for entry in history if key in entry]


# By number of ranks: how, accumulation, optimizer.
RUNS = {
    2: [("subclass", 1, "sgd"), ("subclass", 3, "adamw_torch"), ("callback", 3, "sgd")],
    3: [("subclass", 3, "sgd")],
    4: [("callback", 1, "adamw_torch")],
}


@pytest.mark.processes
@pytest.mark.parametrize("world_size", RUNS)
def test_ten_steps_equal_the_plain_trainer(tmp_path, world_size):
    runs = RUNS[world_size]
    cases = [(how, tmp_path, 2, accumulation, optim) for how, accumulation, optim in runs]
    by_case = run_cases(flexseq_run, world_size, cases, seconds=150)
    for (_, accumulation, optim), results in zip(runs, by_case, strict=True):
        before, wanted, history = plain_run(
            tmp_path, batch=2 * world_size * accumulation, optim=optim, loss=float64_loss
        )
        for found, log in results:
            assert update_error(before, wanted, found) < 1e-8
            for key, rel in (("loss", 1e-6), ("grad_norm", 1e-8)):
                assert logged(log, key) == pytest.approx(logged(history, key), rel=rel), key


def plain_run_of_a_rank(rank, world_size, folder, size):
    before, after, history = plain_run(
        folder, batch=2, accumulation=3, loss=float64_loss, size=size
    )
    return (
        {n: p.numpy() for n, p in before.items()},
        {n: p.numpy() for n, p in after.items()},
        history,
    )


@pytest.mark.processes
def test_the_last_partial_step_holds_the_plain_trainers_samples(tmp_path):
    """On as many ranks as the plain run: 49 documents end in a batch that is filled up with
    repeats, in a step of fewer batches than the others."""
    before, wanted, history = run_ranks(plain_run_of_a_rank, 2, tmp_path, 49)[0]
    before, wanted = ({n: torch.as_tensor(p) for n, p in x.items()} for x in (before, wanted))
    cases = [("subclass", tmp_path, 2, 3, "sgd", 49), ("subclass", tmp_path, 2, 1, "sgd")]
    of_part, of_whole_steps = run_cases(flexseq_run, 2, cases)
    for found, log in of_part:
        assert update_error(before, wanted, found) < 1e-8
        assert logged(log, "epoch") == logged(history, "epoch")
    # the stock loss in float32 differs by its rounding only
    before, wanted, _ = plain_run(tmp_path, batch=4)
    for found, _ in of_whole_steps:
        assert update_error(before, wanted, found) < 2e-6


def test_vocabulary_matches_the_documents():
    assert max(max(e["input_ids"]) for e in dataset()) < VOCAB
