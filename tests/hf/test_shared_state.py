"""Data that depend on how far training has come are drawn when the plain Trainer draws them."""

import functools
import logging
import re
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.utils.data import random_split
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback
from trl import SFTTrainer

from hf_flexseq.hf.shared_state import shared_with_training
from tests.budget import others_slow
from tests.hf.test_mixin import sft_trainer, tokenizer
from tests.hf.test_trainer import float64_loss, padded
from tests.hf.tiny import documents
from tests.hf.trainers import trained, trainer_of, weights_apart
from tests.ranks import run_ranks

LOOKAHEAD = 2
STEPS = 4
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


class Sampler(TrainerCallback):
    """Gives one sample more often the more steps have been taken."""

    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def __len__(self):
        return len(LENGTHS)

    def __iter__(self):
        for index in range(len(LENGTHS)):
            yield (index * (1 + self.steps)) % len(LENGTHS)


class Sampling(Trainer):
    """Draws as its callback says."""

    def _get_train_sampler(self, *args):
        return next(c for c in self.callback_handler.callbacks if isinstance(c, Sampler))


class Keeps(Trainer):
    """Keeps the settings of its dataset in an attribute of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.curriculum = partial(self.train_dataset.settings.update)

    def training_step(self, *args, **options):
        self.curriculum(level=1 + self.state.global_step)
        return super().training_step(*args, **options)


def make(flex, folder, base=Trainer, data=None, **given):
    given["train_dataset"] = Levels() if data is None else data
    flexseq = {"max_tokens_per_rank": 90, "lookahead": LOOKAHEAD} if flex else None
    trainer = trainer_of(base, folder, flexseq=flexseq, max_steps=STEPS, **given)
    if not flex:
        trainer.model.loss_function = float64_loss
    return trainer


class Random(Levels):
    """Documents of which a random part is seen."""

    def __getitem__(self, index):
        self.settings = {"level": 1 + int(4 * torch.rand(()))}
        return super().__getitem__(index)


class Draws(TrainerCallback):
    """Draws from torch's random numbers after every step, as dropout would."""

    def on_step_end(self, args, state, control, **kwargs):
        torch.rand(3)


CASES = {
    "dataset": r"Raise.data is train_dataset\)",
    "settings": r"Raise.data.settings is train_dataset.settings\)",
    "loader": r"RaiseInLoader.on_step_end asks for train_dataloader\)",
    "trainer": r"RaiseOfTrainer.on_step_end asks for train_dataset\)",
    "collator": r"data_collator.example_collator.state_of.trainer is a FlexTrainer\)",
    "sampler": r"sampler is a Sampler\)",
    "random numbers": r"train_dataset draws from torch's random numbers",
    "attribute": r"FlexKeeps.curriculum.func is train_dataset.settings\)",
}


def made(case, flex, folder):
    """A trainer whose data follow its training in the way of a case."""
    data = Random() if case == "random numbers" else Levels()
    callbacks = {
        "dataset": Raise(data),
        "settings": Raise(SimpleNamespace(settings=data.settings)),
        "loader": RaiseInLoader(),
        "sampler": Sampler(),
        "random numbers": Draws(),
    }
    base = {"sampler": Sampling, "attribute": Keeps}.get(case, Trainer)
    torch.manual_seed(0)
    own = [callbacks[case]] if case in callbacks else []
    trainer = make(flex, folder, base, data, callbacks=own)
    if case == "trainer":
        trainer.add_callback(RaiseOfTrainer(trainer))
    if case == "collator":
        data.settings["level"] = 4
        holder = trainer.data_collator if flex else trainer
        name = "example_collator" if flex else "data_collator"
        setattr(holder, name, ByState(lambda: trainer.state))
    return trainer


@functools.cache
def plain_run(case, folder):
    return trained(made(case, False, folder))


@pytest.mark.parametrize("case", others_slow(CASES, tried=("dataset",)))
def test_data_that_follow_training_are_those_of_the_plain_trainer(tmp_path_factory, caplog, case):
    folder = tmp_path_factory.getbasetemp()
    is_raised_after_steps = case in ("dataset", "settings", "loader", "trainer")
    plain = plain_run("dataset" if is_raised_after_steps else case, folder)
    with caplog.at_level(logging.WARNING, "hf_flexseq"):
        ours = trained(made(case, True, folder))
    assert weights_apart(plain, ours) < 1e-9
    (line,) = [message for message in caplog.messages if "how far training" in message]
    assert "\n" not in line
    assert re.search(CASES[case], line), line


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
    sft = sft_trainer(SFTTrainer, tmp_path, 2, flexseq={})
    sft.add_callback(Holds(sft.processing_class, sft))
    seq2seq = make(True, tmp_path, data=rows, callbacks=[Holds(words)])
    seq2seq.data_collator.example_collator = DataCollatorForSeq2Seq(words, model=seq2seq.model)
    seq2seq.add_callback(Holds(seq2seq.model))
    trainers = [
        sft,
        seq2seq,
        make(True, tmp_path),
        make(True, tmp_path, data=rows, processing_class=words, data_collator=None),
        make(True, tmp_path, data=parts["train"], callbacks=[Holds(parts["test"])]),
        make(True, tmp_path, data=cut, eval_dataset=rest, callbacks=[Holds(rest)]),
        make(True, tmp_path, data=rows.to_iterable_dataset(), callbacks=[Holds(words)]),
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
    trainer = make(True, tmp_path)
    trainer.train_dataset.hidden = hide(trainer)
    assert "train_dataset.hidden" in found_in(trainer)


def test_a_transform_of_rows_is_looked_into(tmp_path):
    trainer = make(True, tmp_path, data=Dataset.from_list(documents(LENGTHS)))
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
    trainer = make(True, folder, data=data, callbacks=[Raise(data)] if rank == 1 else [])
    first = lookaheads(trainer)
    trainer.remove_callback(Raise)
    return first, lookaheads(trainer)


@pytest.mark.processes
def test_all_ranks_draw_in_place_where_one_must(tmp_path):
    for first, second in run_ranks(follow_on_one_rank, 2, tmp_path, seconds=120):
        assert first == {0}
        assert second == {LOOKAHEAD}
