"""Data that depend on how far training has come are drawn when the plain Trainer draws them."""

import logging
import re
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.utils.data import random_split
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from hf_flexseq.hf.shared_state import shared_with_training
from tests.hf.test_mixin import FlexSeqSFTTrainer, sft_trainer, tokenizer
from tests.hf.test_trainer import (
    OPTIONS,
    float64_loss,
    padded,
    training_arguments,
    update_error,
)
from tests.hf.tiny import documents, tiny_llama
from tests.ranks import run_ranks

STEPS = 5
LENGTHS = [5 + (i * i * 7) % 30 for i in range(24)]


class Levels(torch.utils.data.Dataset):
    """Documents of which the first `level` quarters are seen."""

    def __init__(self):
        self.examples = documents(LENGTHS)
        self.settings = {"level": 1}

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        seen = max(2, len(self.examples[index]["input_ids"]) * self.settings["level"] // 4)
        return {name: values[:seen] for name, values in self.examples[index].items()}


class Raise(TrainerCallback):
    """Raises the level of what it is given after every step."""

    def __init__(self, data):
        self.data = data

    def on_step_end(self, args, state, control, **kwargs):
        self.data.settings["level"] += 1


class RaiseInLoader(TrainerCallback):
    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        train_dataloader.dataset.settings["level"] += 1


class RaiseOfTrainer(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.train_dataset.settings["level"] += 1


class ByState:
    """A collator that cuts examples by the trainer's state."""

    def __init__(self, state_of):
        self.state_of = state_of

    def __call__(self, examples):
        seen = 2 + 3 * self.state_of().global_step
        return padded([{name: e[name][:seen] for name in e} for e in examples])


class ByCallback(torch.utils.data.Sampler):
    """Gives one sample more often the more steps have been taken."""

    def __init__(self, counter, size):
        self.counter, self.size = counter, size

    def __len__(self):
        return self.size

    def __iter__(self):
        for index in range(self.size):
            yield (index * (1 + self.counter.steps)) % self.size


class Counter(TrainerCallback):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


class Sampling(Trainer):
    """Draws as its callback says."""

    def _get_train_sampler(self, *args):
        counter = next(c for c in self.callback_handler.callbacks if isinstance(c, Counter))
        return ByCallback(counter, len(self.train_dataset))


class Keeps(Trainer):
    """Keeps the settings of its dataset in an attribute of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.curriculum = partial(self.train_dataset.settings.update)

    def training_step(self, *args, **options):
        self.curriculum(level=1 + self.state.global_step)
        return super().training_step(*args, **options)


def trainer_of(flex, folder, base=Trainer, data=None, callbacks=(), **options):
    extra = {}
    if flex:
        base = type(f"Flex{base.__name__}", (FlexSeqMixin, base), {})
        extra = {"flexseq_args": FlexSeqArguments(**{**OPTIONS, "max_tokens_per_rank": 90})}
    args = training_arguments(
        TrainingArguments, folder, batch=2, accumulation=1, optim="sgd", max_steps=STEPS
    )
    model = tiny_llama()
    if not flex:
        model.loss_function = float64_loss
    return base(
        model=model,
        args=args,
        train_dataset=Levels() if data is None else data,
        **{"data_collator": padded, "callbacks": list(callbacks), **options},
        **extra,
    )


def with_collator(trainer, collator):
    if hasattr(trainer.data_collator, "example_collator"):
        trainer.data_collator.example_collator = collator
    else:
        trainer.data_collator = collator
    return trainer


def by_dataset(flex, folder):
    data = Levels()
    return trainer_of(flex, folder, data=data, callbacks=[Raise(data)])


def by_shared_settings(flex, folder):
    data = Levels()
    raises = Raise(SimpleNamespace(settings=data.settings))
    return trainer_of(flex, folder, data=data, callbacks=[raises])


def by_loader(flex, folder):
    return trainer_of(flex, folder, callbacks=[RaiseInLoader()])


def by_trainer(flex, folder):
    trainer = trainer_of(flex, folder)
    trainer.add_callback(RaiseOfTrainer(trainer))
    return trainer


def by_collator(flex, folder):
    trainer = trainer_of(flex, folder)
    trainer.train_dataset.settings["level"] = 4
    return with_collator(trainer, ByState(lambda: trainer.state))


def by_sampler(flex, folder):
    return trainer_of(flex, folder, base=Sampling, callbacks=[Counter()])


def by_attribute(flex, folder):
    return trainer_of(flex, folder, base=Keeps)


class Random(Levels):
    """Documents of which a random part is seen."""

    def __getitem__(self, index):
        self.settings = {"level": 1 + int(4 * torch.rand(()))}
        return super().__getitem__(index)


class Draws(TrainerCallback):
    """Draws from torch's random numbers after every step, as dropout would."""

    def on_step_end(self, args, state, control, **kwargs):
        torch.rand(3)


def by_random_numbers(flex, folder):
    torch.manual_seed(0)
    return trainer_of(flex, folder, data=Random(), callbacks=[Draws()])


CASES = {
    by_dataset: r"Raise.data is train_dataset\)",
    by_shared_settings: r"Raise.data.settings is train_dataset.settings\)",
    by_loader: r"RaiseInLoader.on_step_end asks for train_dataloader\)",
    by_trainer: r"RaiseOfTrainer.on_step_end asks for train_dataset\)",
    by_collator: r"data_collator.example_collator.state_of.trainer is a FlexTrainer\)",
    by_sampler: r"sampler.sampler.counter is a Counter\)|ampler.counter is a Counter\)",
    by_random_numbers: r"train_dataset draws from torch's random numbers",
    by_attribute: r"FlexKeeps.curriculum.func is train_dataset.settings\)",
}


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_data_that_follow_training_are_those_of_the_plain_trainer(tmp_path, caplog, make):
    plain = make(False, tmp_path)
    before = {name: value.detach().clone() for name, value in plain.model.named_parameters()}
    plain.train()
    wanted = {name: value.detach() for name, value in plain.model.named_parameters()}
    ours = make(True, tmp_path)
    with caplog.at_level(logging.WARNING, "hf_flexseq"):
        ours.train()
    found = {name: value.detach() for name, value in ours.model.named_parameters()}
    assert update_error(before, wanted, found) < 1e-9
    lines = [r.getMessage() for r in caplog.records if "how far training" in r.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert re.search(CASES[make], lines[0]), lines[0]


# ---- what means nothing


class Holds(TrainerCallback):
    """Keeps what it was given, and reads how much there is to draw when training begins."""

    def __init__(self, *things):
        self.things = things

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self.batches = len(train_dataloader)


def found_in(trainer):
    return shared_with_training(trainer, trainer.get_train_dataloader())


def test_ordinary_trainers_share_nothing(tmp_path):
    words = tokenizer()
    rows = Dataset.from_list(documents(LENGTHS))
    parts = rows.train_test_split(test_size=4)
    whole = Levels()
    cut, rest = random_split(whole, [20, 4])
    sft = sft_trainer(FlexSeqSFTTrainer, tmp_path, 2, flexseq_args=FlexSeqArguments(**OPTIONS))
    sft.add_callback(Holds(sft.processing_class, sft))
    model = tiny_llama()
    trainers = [
        sft,
        trainer_of(True, tmp_path),
        trainer_of(True, tmp_path, data=rows, processing_class=words, data_collator=None),
        trainer_of(
            True,
            tmp_path,
            data=rows,
            data_collator=DataCollatorForSeq2Seq(words, model=model),
            callbacks=[Holds(words, model)],
        ),
        trainer_of(True, tmp_path, data=parts["train"], callbacks=[Holds(parts["test"])]),
        trainer_of(True, tmp_path, data=cut, eval_dataset=rest, callbacks=[Holds(rest)]),
        trainer_of(True, tmp_path, data=rows.to_iterable_dataset(), callbacks=[Holds(words)]),
    ]
    assert [found_in(trainer) for trainer in trainers] == [None] * len(trainers)


class Careful:
    """Notes who looks into it."""

    __slots__ = ("state",)
    looked = ()

    def __init__(self, state):
        self.state = state

    @property
    def level(self):
        raise AssertionError("a property was asked")

    def __getattr__(self, name):
        raise AssertionError(f"asked for {name}")


@pytest.mark.parametrize(
    "hide",
    [
        lambda trainer: Careful(trainer.state),
        lambda trainer: [{"a": (weakref.ref(trainer.control),)}],
        lambda trainer: partial(print, file=trainer),
        lambda trainer: trainer.model.lm_head.weight,
        lambda trainer: Careful(trainer).__init__,
        lambda trainer: {"rows": [[0] * 5000 for _ in range(999)], "deep": [[[[Raise(None)]]]]},
    ],
)
def test_state_is_found_wherever_it_is_kept(tmp_path, hide):
    trainer = trainer_of(True, tmp_path)
    trainer.train_dataset.hidden = hide(trainer)
    assert "train_dataset.hidden" in found_in(trainer)


def test_a_transform_of_rows_is_looked_into(tmp_path):
    trainer = trainer_of(True, tmp_path, data=Dataset.from_list(documents(LENGTHS)))
    trainer.args.remove_unused_columns = False
    state = trainer.state
    trainer.train_dataset.set_transform(lambda rows: rows if state.global_step else dict(rows))
    assert found_in(trainer) == "train_dataset._format_kwargs['transform'].state is a TrainerState"


def lookaheads(trainer):
    """How far ahead the steps of a run are drawn."""
    seen = set()
    next_step = trainer.flexseq.next_step

    def noting(*args, **options):
        step = next_step(*args, **options)
        seen.add(trainer.flexseq._training._lookahead)
        return step

    trainer.flexseq.next_step = noting
    trainer.train()
    trainer.flexseq.next_step = next_step
    return seen


def follow_on_one_rank(rank, world_size, folder):
    """Only the callback of rank 1 changes the data; in a second run none does."""
    data = Levels()
    trainer = trainer_of(True, folder, data=data, callbacks=[Raise(data)] if rank == 1 else [])
    first = lookaheads(trainer)
    trainer.remove_callback(Raise)
    return first, lookaheads(trainer)


@pytest.mark.processes
def test_all_ranks_draw_in_place_where_one_must(tmp_path):
    for first, second in run_ranks(follow_on_one_rank, 2, tmp_path, seconds=120):
        assert first == {0}
        assert second == {OPTIONS["lookahead"]}
