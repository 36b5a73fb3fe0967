"""Steps are drawn ahead of training where libraries alone make the samples; where code of the
user's takes part, samples are drawn when the plain Trainer draws them, unless the user chooses."""

import functools
import logging
import re
from functools import partial

import pytest
import torch
from datasets import Dataset, interleave_datasets
from torch.utils.data import DataLoader, Subset
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback
from trl import SFTTrainer

from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.config import LOOKAHEAD
from hf_flexseq.hf.engine.lookahead import own_code_of_data
from tests.budget import others_slow
from tests.differential.case import sft_trainer
from tests.hf.plain import float64_loss, padded
from tests.hf.tiny import documents
from tests.hf.trainers import trained, trainer_of, weights_apart
from tests.hf.trainers import word_tokenizer as tokenizer
from tests.ranks import run_ranks

STEPS = 4
LENGTHS = [5 + (i * i * 7) % 30 for i in range(24)]
ROWS = documents(LENGTHS)
LEVELS = {"level": 1}


class Levels(torch.utils.data.Dataset):
    """Documents of which the first `level` quarters are seen."""

    settings = LEVELS  # state that no object of a trainer refers to

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        seen = max(2, len(ROWS[index]["input_ids"]) * self.settings["level"] // 4)
        return {name: values[:seen] for name, values in ROWS[index].items()}


class Raise(TrainerCallback):
    """Raises the level after every step."""

    def on_step_end(self, args, state, control, **kwargs):
        LEVELS["level"] += 1


class Grows(TrainerCallback):
    """Lengthens what is left of the rows of a list after every step."""

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        lengthen(train_dataloader.dataset)


def by_level(examples):
    return padded([{name: e[name][: 2 + 3 * LEVELS["level"]] for name in e} for e in examples])


def lengthen(rows):
    for row in rows:
        for values in row.values():
            values.append(values[-1])


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
    "dataset": r"\(Levels of yours is in the dataset\)",
    "random numbers": "since train_dataset draws from torch's random numbers",
    "collator": r"\(by_level of yours is in the data_collator\)",
    "callback": r"\(the callback Grows is yours\)",
}


def make(flex, folder, base=Trainer, **given):
    """A trainer of padded batches, as a library's collator makes them."""
    words = tokenizer()
    given = {"data_collator": DataCollatorForSeq2Seq(words), "train_dataset": ROWS, **given}
    flexseq = {"max_tokens_per_rank": 90, "lookahead": None} if flex else None
    trainer = trainer_of(base, folder, flexseq=flexseq, max_steps=STEPS, **given)
    if not flex:
        trainer.model.loss_function = float64_loss
    return trainer


def made(case, flex, folder):
    """A trainer whose data follow its training in the way of a case."""
    LEVELS["level"] = 1
    torch.manual_seed(0)
    given = {
        "dataset": {"train_dataset": Levels(), "callbacks": [Raise()]},
        "random numbers": {"train_dataset": Random(), "callbacks": [Draws()]},
        "collator": {"data_collator": by_level, "callbacks": [Raise()]},
        "callback": {"train_dataset": documents(LENGTHS), "callbacks": [Grows()]},
    }[case]
    return make(flex, folder, **given)


@functools.cache
def plain_run(case, folder):
    return trained(made(case, False, folder))


@pytest.mark.parametrize("case", others_slow(CASES, tried=("dataset", "callback")))
def test_data_that_follow_training_are_those_of_the_plain_trainer(tmp_path_factory, caplog, case):
    folder = tmp_path_factory.getbasetemp()
    plain = plain_run(case, folder)
    with caplog.at_level(logging.WARNING, "hf_flexseq"):
        ours = trained(made(case, True, folder))
    assert weights_apart(plain, ours) < 1e-9
    (line,) = [message for message in caplog.messages if "drawn when they run" in message]
    assert "\n" not in line
    assert re.search(CASES[case], line), line


# ---- whose code makes samples


def doubled(row):
    return {name: 2 * values for name, values in row.items()}


def test_code_of_libraries_makes_the_samples_of_ordinary_trainers(tmp_path):
    rows = Dataset.from_list(ROWS)
    words = tokenizer()
    sft = sft_trainer(SFTTrainer, tmp_path, 2, flexseq={})
    datasets = [
        ROWS,
        rows,
        rows.map(doubled),  # eagerly
        rows.train_test_split(test_size=4)["train"],
        Subset(rows, range(9)),
        rows.to_iterable_dataset(),
        rows.to_iterable_dataset().shuffle(seed=1, buffer_size=4),
        interleave_datasets([rows.to_iterable_dataset(), rows.to_iterable_dataset()]),
    ]
    trainers = [sft, make(True, tmp_path, processing_class=words, data_collator=None)]
    trainers += [make(True, tmp_path, train_dataset=dataset) for dataset in datasets]
    found = [own_code_of_data(trainer.get_train_dataloader()) for trainer in trainers]
    assert found == [None] * len(trainers)


@pytest.mark.parametrize(
    "dataset, said",
    [
        (Subset(Levels(), range(9)), "Levels of yours is in the dataset"),
        (torch.utils.data.ConcatDataset([ROWS, Levels()]), "Levels of yours is in the dataset"),
        (Dataset.from_list(ROWS).to_iterable_dataset().map(doubled), "doubled of yours"),
        (Dataset.from_list(ROWS).to_iterable_dataset().filter(partial(bool)), None),
    ],
)
def test_code_of_the_users_is_found_inside_of_libraries_datasets(dataset, said):
    found = own_code_of_data(DataLoader(dataset, collate_fn=DataCollatorForFlexSeq()))
    assert (found is None) if said is None else f"({said}" in found


# ---- how far ahead


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
    """Only rank 1 has a callback of its own; in a second run none has, in a third the user has
    chosen."""
    trainer = make(True, folder, callbacks=[Raise()] if rank == 1 else [])
    found = [lookaheads(trainer)]
    trainer.remove_callback(Raise)
    found.append(lookaheads(trainer))
    trainer.add_callback(Raise())
    trainer.flexseq.args.lookahead = 2
    return [*found, lookaheads(trainer)]


@pytest.mark.processes
def test_all_ranks_draw_in_place_where_one_must(tmp_path):
    for found in run_ranks(follow_on_one_rank, 2, tmp_path, seconds=120):
        assert found == [{0}, {LOOKAHEAD}, {2}]
