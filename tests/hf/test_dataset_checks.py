"""What is wrong with a dataset is said when a trainer is made, or at the first step."""

import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqEngine
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.engine.dataset_checks import _example, dealt_otherwise
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.steps.collator import PADDING_TARGETS
from tests.hf import plain
from tests.hf.objectives import classifier
from tests.hf.plain import dataset, logged
from tests.hf.test_checks import DATA, make_trainer
from tests.hf.tiny import refused
from tests.hf.trainers import loss_of_squares, trainer_of, word_tokenizer
from tests.ranks import run_ranks

# ---- labels


def unlabelled(examples):
    return [{"input_ids": e["input_ids"], "text": "abc"} for e in examples]


class Stream(IterableDataset):
    column_names = None

    def __iter__(self):
        raise AssertionError("a stream was read before training")


def with_names(names):
    stream = Stream()
    stream.column_names = names
    return stream


@pytest.mark.parametrize(
    "data",
    [
        unlabelled(DATA),
        with_names(["input_ids", "text"]),
        Dataset.from_list(unlabelled(DATA)),
        Dataset.from_list(unlabelled(DATA)).to_iterable_dataset(),
    ],
)
def test_missing_labels(tmp_path, data):
    message = r"train_dataset has the columns \['input_ids', 'text'\] but no labels"
    with refused(message, ValueError):
        make_trainer(tmp_path, data=data, max_steps=1)
    with pytest.raises(ValueError, match=r"eval_dataset\['b'\] has the columns .* no labels"):
        make_trainer(tmp_path, trainer={"eval_dataset": {"a": DATA, "b": data}})


# ---- examples


def example(tokens):
    ids = list(range(1, tokens + 1))
    return {"input_ids": ids, "labels": ids, "attention_mask": [1] * tokens}


def as_list(examples):
    return examples


def make(folder, data, **settings):
    """A trainer of examples as they are."""
    defaults = {"max_steps": 1, "per_device_train_batch_size": 8, "lookahead": 0}
    return make_trainer(folder, data=data, cost_model="estimate", **defaults | settings)


@pytest.mark.slow
@pytest.mark.parametrize("made", [as_list, Dataset.from_list])
def test_examples_that_cannot_be_trained_on_are_named_before_training(tmp_path, made, monkeypatch):
    def drawn(*args):
        raise AssertionError("a step was drawn")

    data = made([example(n) for n in (5, 9, 3)])
    with monkeypatch.context() as patched:
        patched.setattr(FlexSeqEngine, "next_step", drawn)
        with refused(r"train_dataset is empty \(0 examples\)", ValueError):
            make(tmp_path, made([])).train()
        with refused(r"train_dataset\[1\] has no tokens \(2 of 4 examples", ValueError):
            make(tmp_path, made([example(n) for n in (5, 0, 3, 0)])).train()
        said = r"train_dataset\[1\] has 9 tokens, .* raise max_tokens_per_rank to 9,"
        with refused(said, PlanInfeasible):
            make(tmp_path, data, max_tokens_per_rank=8).train()
    make(tmp_path, data, max_tokens_per_rank=9).train()


class Rows(torch.utils.data.Dataset):
    """Examples that are made one by one, as scripts have them."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        drawn()
        row = self.examples[index]
        return {name: torch.tensor(values) for name, values in row.items()}


def in_a_table(examples):
    return Dataset.from_list(examples).with_transform(lambda rows: rows)


@pytest.mark.parametrize("made", [as_list, Dataset.from_list, Rows, in_a_table])
def test_the_longest_row_of_an_evaluation_is_named_before_training(tmp_path, made, monkeypatch):
    def step(*args):
        raise AssertionError("a step was drawn")

    monkeypatch.setattr(FlexSeqEngine, "next_step", step)
    fits = made([example(n) for n in (5, 8)])
    long = made([example(n) for n in (10, 9, 12, 3)])
    for data, name in ((long, "eval_dataset"), ({"a": fits, "b": long}, r"eval_dataset\['b'\]")):
        given = {"eval_dataset": data}
        trainer = make(tmp_path, [example(5)], trainer=given, max_tokens_per_rank=8)
        assert trainer.args.eval_strategy == "no"  # it may be evaluated afterwards
        state = torch.get_rng_state()
        said = rf"{name}\[2\] has 12 tokens, .* raise max_tokens_per_rank to 12"
        with refused(said, PlanInfeasible):
            trainer.train()
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("classifies", [False, True])
def test_rows_of_losses_on_whole_samples_are_named_before_training(tmp_path, classifies):
    rows = [example(n) | {"name": "a text"} for n in (5, 11)]
    own = {"compute_loss_func": loss_of_squares}
    if classifies:
        rows = [{"input_ids": row["input_ids"], "label": 1} for row in rows]
        own = {"model": classifier(LlamaForSequenceClassification, 2)}
        own["data_collator"] = DataCollatorWithPadding(word_tokenizer())
    options = {"max_tokens_per_rank": 8, "cost_model": "estimate"}
    for data, name in (((rows[:1], rows), "eval_dataset"), ((rows, rows[:1]), "train_dataset")):
        given = dict(zip(("train_dataset", "eval_dataset"), data, strict=True))
        trainer = trainer_of(Trainer, tmp_path, flexseq=options, batch=1, **given, **own)
        said = rf"^{name}\[1\] has 11 tokens, .* raise max_tokens_per_rank to 11"
        with pytest.raises(PlanInfeasible, match=said):
            trainer.train()


def drawing(rank, world_size, folder):
    class Empty(IterableDataset):
        def __iter__(self):
            return iter(())

    with refused("no rank drew an example", ValueError):
        make(folder, Empty()).train()


@pytest.mark.processes
def test_a_stream_without_examples_ends_all_ranks(tmp_path):
    run_ranks(drawing, 2, tmp_path)


@pytest.mark.slow
def test_the_first_step_without_anything_to_learn_is_named(tmp_path, caplog):
    masked = example(5) | {"labels": [3] + [IGNORE_INDEX] * 4}
    make(tmp_path, [masked] * 4).train()
    assert "step 1 has no target token: all labels of its 4 sequences are -100" in caplog.text
    caplog.clear()
    settings = {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
    trainer = make(tmp_path, [example(5), masked, example(4)], max_steps=3, **settings)
    trainer.train()
    assert trainer.state.global_step == 3
    assert caplog.text.count("no target token") == caplog.text.count("step 2 has no target") == 1


class AtRandom(list):
    """Examples that are changed at random when they are read."""

    def __getitem__(self, index):
        drawn()
        return super().__getitem__(index)


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_looking_at_examples_draws_no_random_numbers_of_the_run(tmp_path):
    numbers = []
    for looks in (False, True):
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(0)
        if looks:
            _example(AtRandom([example(5)]), 0)
        numbers.append(drawn())
    assert numbers[0] == numbers[1]
    make_trainer(tmp_path, data=AtRandom([example(5)]))
    after = torch.get_rng_state()
    torch.manual_seed(TrainingArguments.seed)
    assert torch.equal(after, torch.get_rng_state())


class Crops(torch.utils.data.Dataset):
    """Examples cropped at random, by generators of the dataset's own."""

    def __init__(self):
        self.numbers = [random.Random(0), np.random.RandomState(0)]
        self.generator = np.random.default_rng(0)
        self.of_torch = torch.Generator().manual_seed(0)

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        of_python, of_numpy = self.numbers
        draws = [of_python.random(), of_numpy.rand(), self.generator.random()]
        draws.append(torch.rand(1, generator=self.of_torch).item())
        return {name: values[: 2 + int(sum(draws))] for name, values in DATA[index].items()}


def transformed():
    """A table whose rows a function crops, with a generator in its closure."""
    generator = np.random.default_rng(0)

    def crop(rows):
        length = int(generator.integers(2, 9))
        return {name: [one[:length] for one in values] for name, values in rows.items()}

    table = Dataset.from_list(DATA)
    table.set_transform(crop)
    return table


@pytest.mark.parametrize(
    "make",
    [Crops, lambda: ConcatDataset([Subset(Crops(), range(2)), DATA]), transformed],
    ids=["a dataset", "inside others", "a transform"],
)
def test_looking_at_examples_draws_no_random_numbers_of_the_dataset(tmp_path, make):
    found = []
    for flexseq in (None, {"max_tokens_per_rank": 99}):
        data = {"train_dataset": make(), "eval_dataset": make(), "remove_unused_columns": False}
        trainer = trainer_of(Trainer, tmp_path, flexseq=flexseq, max_steps=2, **data)
        trainer.train()
        found.append(logged(trainer.state.log_history, "grad_norm"))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


# ---- streams of which steps have other samples than under the plain Trainer


@pytest.mark.parametrize(
    ("ranks", "shards", "dispatches", "is_named"),
    [(2, 4, None, True), (2, 1, None, False), (1, 4, None, False), (2, 4, False, False)],
)
def test_shards_that_each_rank_reads_for_itself_are_named(ranks, shards, dispatches, is_named):
    stream = Dataset.from_list(DATA * 4).to_iterable_dataset(num_shards=shards)
    config = SimpleNamespace(dispatch_batches=dispatches)
    args = SimpleNamespace(world_size=ranks, accelerator_config=config)
    for data, wanted in ((stream, is_named), (Dataset.from_list(DATA), False), (DATA, False)):
        lines = list(dealt_otherwise(SimpleNamespace(train_dataset=data, args=args)))
        assert bool(lines) == wanted
        assert all(f"a stream of {shards} shards" in line for line in lines)


@pytest.mark.parametrize(("size", "lines"), [(10, 1), (8, 0)])
def test_a_rest_of_a_stream_is_named_once(tmp_path, caplog, size, lines):
    settings = {"accumulation": 2, "max_steps": 5, "train_dataset": plain.Stream(dataset(size))}
    with caplog.at_level(logging.WARNING, "hf_flexseq"):
        trainer_of(Trainer, tmp_path, flexseq={"max_tokens_per_rank": 61}, **settings).train()
    assert caplog.text.count("the last 1 of 2 in a step are a smaller step") == lines


# ---- targets beside padding, which the plain Trainer trains on, are left out and named once


def masked(ids, mask, labels):
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


RIGHT, LEFT = [5, 6, 7, 0, 0], [0, 0, 5, 6, 7]


@pytest.mark.parametrize(
    ("ids", "labels", "left_out"),
    [
        (RIGHT, [5, 6, 7, -100, -100], 0),
        (RIGHT, [5, 6, 7, 0, 0], 2),
        (LEFT, [-100, -100, -100, 6, 7], 0),
        (LEFT, [-100, -100, 5, 6, 7], 1),
        (LEFT, [0, 0, 5, 6, 7], 2),
    ],
)
def test_targets_beside_padding_are_those_that_the_plain_trainer_has_more(ids, labels, left_out):
    mask = [int(token > 0) for token in ids]
    batch = DataCollatorForFlexSeq()([masked(ids, mask, labels)])
    assert batch.get(PADDING_TARGETS, 0) == left_out
    of_plain = int((torch.tensor(labels)[1:] != -100).sum())  # the Trainer's own count
    assert of_plain - int((batch["labels"] != -100).sum()) == left_out


@pytest.mark.parametrize(("side", "left_out"), [("left", 2), ("right", 0)])
def test_padding_on_the_left_is_foreseen_where_the_collator_would_put_it(side, left_out):
    words = word_tokenizer()
    words.padding_side = side
    pads = DataCollatorForLanguageModeling(words, mlm=False)
    examples = [{"input_ids": list(range(2, 2 + n))} for n in (4, 6, 3)]
    batch = DataCollatorForFlexSeq(pads)(examples)
    assert batch.get(PADDING_TARGETS, 0) == left_out
    of_plain = int((pads(examples)["labels"][:, 1:] != -100).sum())
    assert of_plain - int((batch["labels"] != -100).sum()) == left_out
    assert PADDING_TARGETS not in DataCollatorForFlexSeq(pads)(examples[1:2])


@pytest.mark.slow
def test_a_run_says_once_what_it_leaves_out(tmp_path, caplog):
    rows = [masked([5, 6, 7, 8, 0, 0], [1, 1, 1, 1, 0, 0], [5, 6, 7, 8, 0, 0])] * 8
    settings = {"accumulation": 2, "max_steps": 2, "train_dataset": rows, "data_collator": None}
    plain = trainer_of(Trainer, tmp_path, **settings)
    batches = list(plain.get_train_dataloader())[:2]
    assert int(plain._get_num_items_in_batch(batches, "cpu")) == 4 * 5
    with caplog.at_level(logging.WARNING, "hf_flexseq"):
        trainer_of(Trainer, tmp_path, flexseq={"lookahead": 0}, **settings).train()
    (line,) = (r.getMessage() for r in caplog.records if "padding" in r.getMessage())
    assert "leaves out 8 targets beside padding" in line
    assert "12 targets of tokens stay" in line
