"""Steps of the FlexSeq trainer on several ranks against those of the plain Trainer in one
process."""

import functools
import inspect
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
from tests import budget
from tests.hf.ordered_gloo import ordered_gloo
from tests.hf.tiny import documents, noting_figures, tiny_llama, weights
from tests.ranks import run_cases, run_ranks

OPTIONS = {"max_tokens_per_rank": 40, "lookahead": 2, "cost_model": "estimate"}
OF_TRAINER = frozenset(inspect.signature(Trainer.__init__).parameters)


def training_arguments(cls, folder, *, batch, accumulation, **options):
    defaults = {
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 1e-2,
        "max_steps": budget.trainer_steps,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return cls(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **{**defaults, **options},
    )


def flexseq_trainer(folder, *, kind=FlexSeqTrainer, batch=2, accumulation=1, **settings):
    """A trainer of planned steps. settings: arguments of the trainer, and of its configuration, by
    their names."""
    given = {name: settings.pop(name) for name in OF_TRAINER & settings.keys()}
    defaults = {"batch": batch, "accumulation": accumulation, **OPTIONS}
    args = training_arguments(FlexSeqConfig, folder, **{**defaults, **settings})
    model = given.pop("model", None) or tiny_llama()
    return kind(model=model, args=args, **{"train_dataset": dataset(), **given})


def padded(examples, multiple=1):
    """The collator of the plain run: right padding, to a multiple, and a mask."""
    width = max(len(e["input_ids"]) for e in examples)
    width += -width % multiple

    def pad(name, value):
        return torch.tensor([e[name] + [value] * (width - len(e[name])) for e in examples])

    lengths = torch.tensor([len(e["input_ids"]) for e in examples])
    values = {"input_ids": 0, "labels": -100, "shift_labels": -100}
    batch = {name: pad(name, value) for name, value in values.items() if name in examples[0]}
    return {**batch, "attention_mask": (torch.arange(width) < lengths[:, None]).long()}


def float64_loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **given):
    """transformers' causal loss without its cast to float32; a mean without a count of items."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:] if shift_labels is None else shift_labels
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def dataset(size=72):
    """72 is a whole number of steps in every case below; repeats that fill the last batch depend
    on the world size."""
    return documents([1 + (i * i * 7) % 60 for i in range(size)])


def plain_run(folder, *, batch, loss=None, size=72, dtype=torch.float64, model=None, **options):
    """Weights before and after, and the log, of the plain Trainer in this process."""
    model = model or tiny_llama(dtype)
    if loss is not None:
        model.loss_function = loss
    before = weights(model)
    common = {"batch": batch, "accumulation": 1, "optim": "sgd", **options}
    args = training_arguments(TrainingArguments, folder, **common)
    trainer = Trainer(model=model, args=args, train_dataset=dataset(size), data_collator=padded)
    trainer.train()
    return before, weights(model), trainer.state.log_history


def make_trainer(how, model, folder, batch, accumulation, optim, size=72, steps=None):
    common = {"batch": batch, "accumulation": accumulation, "optim": optim}
    common["max_steps"] = steps or budget.trainer_steps
    data = dataset(size)
    if how == "subclass":
        return flexseq_trainer(folder, model=model, train_dataset=data, **common)
    args = training_arguments(TrainingArguments, folder, **common)
    trainer = Trainer(
        model=model, args=args, train_dataset=data, data_collator=DataCollatorForFlexSeq()
    )
    trainer.add_callback(FlexSeqCallback(trainer, FlexSeqArguments(**OPTIONS)))
    return trainer


def flexseq_run(rank, world_size, is_ordered, how, folder, *settings):
    """Weights and log. is_ordered: whether the transport is said to be."""
    model = tiny_llama()
    with ordered_gloo(is_ordered):
        trainer = make_trainer(how, model, folder, *settings)
        steps = noting_figures(trainer)
        trainer.train()
    assert max(logged(steps, "groups_of_2"), default=0) >= 1, "no step ever split a sequence"
    assert model.config._attn_implementation == "sdpa"
    return weights(model), trainer.state.log_history


def update_error(before, wanted, found):
    """||found - wanted|| over ||wanted - before||, all parameters together."""

    def distance(first, second):
        norms = [
            float((torch.as_tensor(first[n]) - torch.as_tensor(second[n])).norm()) for n in wanted
        ]
        return math.hypot(*norms)

    return distance(found, wanted) / distance(before, wanted)


def logged(history, key):
    return [entry[key] for entry in history if key in entry]


# By number of ranks: whether the transport is ordered, how, accumulation, optimizer.
RUNS = {
    2: [
        (False, "subclass", 3, "adamw_torch"),
        (False, "callback", 3, "sgd"),
        (True, "subclass", 3, "sgd"),
    ],
    3: [(False, "subclass", 2, "sgd")],
    4: [(False, "callback", 1, "adamw_torch")],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What `plain_run` returns, by samples of a step and optimizer."""
    folder = tmp_path_factory.mktemp("plain")

    @functools.cache
    def plain(samples, optim):
        return plain_run(folder, batch=samples, optim=optim, loss=float64_loss)

    return plain


@pytest.mark.processes
@pytest.mark.parametrize("world_size", RUNS)
def test_steps_equal_the_plain_trainer(tmp_path, plain, world_size):
    cases = [
        (is_ordered, how, tmp_path, 1, accumulation, optim)
        for is_ordered, how, accumulation, optim in RUNS[world_size]
    ]
    by_case = run_cases(flexseq_run, world_size, cases, seconds=150)
    for (*_, accumulation, optim), results in zip(cases, by_case, strict=True):
        before, wanted, history = plain(world_size * accumulation, optim)
        for found, log in results:
            assert update_error(before, wanted, found) < 1e-8
            for key, rel in (("loss", 1e-6), ("grad_norm", 1e-8)):
                assert logged(log, key) == pytest.approx(logged(history, key), rel=rel), key


PARTIAL = {"size": 13, "max_steps": 5}


def plain_run_of_a_rank(rank, world_size, folder):
    return plain_run(folder, batch=1, accumulation=3, loss=float64_loss, **PARTIAL)


@pytest.mark.processes
def test_the_last_partial_step_holds_the_plain_trainers_samples(tmp_path):
    """On as many ranks as the plain run: 13 documents end in a batch that is filled up with
    a repeat, in a step of fewer batches than the others."""
    before, wanted, history = run_ranks(plain_run_of_a_rank, 2, tmp_path)[0]
    settings = (False, "subclass", tmp_path, 1, 3, "sgd", *PARTIAL.values())
    for found, log in run_ranks(flexseq_run, 2, *settings):
        assert update_error(before, wanted, found) < 1e-8
        assert logged(log, "epoch") == logged(history, "epoch")
