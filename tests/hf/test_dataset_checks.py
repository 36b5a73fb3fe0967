"""What is wrong with a dataset is said when a trainer is made, or at the first step."""

import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from hf_flexseq import FlexSeqEngine
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.dataset_checks import _example, _token_counts
from hf_flexseq.plan import PlanInfeasible
from tests.hf.test_checks import DATA, make_trainer, one_line
from tests.hf.test_trainer import padded
from tests.hf.tiny import VOCAB
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
    with pytest.raises(ValueError, match=message) as raised:
        make_trainer(tmp_path, data=data, max_steps=1)
    one_line(raised)
    with pytest.raises(ValueError, match=r"eval_dataset\['b'\] has the columns .* no labels"):
        make_trainer(tmp_path, trainer={"eval_dataset": {"a": DATA, "b": data}})


@pytest.mark.parametrize("data", [DATA, with_names(None), with_names(["input_ids", "labels"])])
def test_labels_that_are_there_or_may_be(tmp_path, data):
    make_trainer(tmp_path, data=data, max_steps=1)


def test_labels_that_a_collator_makes(tmp_path):
    make_trainer(tmp_path, data=unlabelled(DATA), collator=padded)


def test_looking_at_an_example_leaves_the_run_as_it_was(tmp_path):
    class Random:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            tokens = torch.randint(VOCAB, (5,))
            return {"input_ids": tokens, "labels": tokens}

    make_trainer(tmp_path, data=Random())
    after = torch.get_rng_state()
    torch.manual_seed(TrainingArguments.seed)
    assert torch.equal(after, torch.get_rng_state())


# ---- examples


def example(tokens):
    ids = list(range(1, tokens + 1))
    return {"input_ids": ids, "labels": ids, "attention_mask": [1] * tokens}


def as_list(examples):
    return examples


ONE_STEP = {"max_steps": 1, "per_device_train_batch_size": 8}


def train(folder, data, **settings):
    """Train on examples as they are."""
    trainer = make_trainer(folder, data=data, cost_model="estimate", **ONE_STEP | settings)
    trainer.train()


@pytest.mark.processes
@pytest.mark.parametrize("made", [as_list, Dataset.from_list])
def test_examples_that_cannot_be_trained_on_are_named_before_training(tmp_path, made, monkeypatch):
    def drawn(*args):
        raise AssertionError("a step was drawn")

    with monkeypatch.context() as patched:
        patched.setattr(FlexSeqEngine, "next_step", drawn)
        with pytest.raises(ValueError, match=r"train_dataset is empty \(0 examples\)"):
            train(tmp_path, made([]))
        message = r"train_dataset\[1\] has no tokens \(2 of 4 examples"
        with pytest.raises(ValueError, match=message) as raised:
            train(tmp_path, made([example(n) for n in (5, 0, 3, 0)]))
        one_line(raised)
        data = made([example(n) for n in (5, 9, 3)])
        message = r"train_dataset\[1\] has 9 tokens, .* raise max_tokens_per_rank to 9,"
        with pytest.raises(PlanInfeasible, match=message) as raised:
            train(tmp_path, data, max_tokens_per_rank=8)
        one_line(raised)
    train(tmp_path, data, max_tokens_per_rank=9)


@pytest.mark.processes
def test_padding_needs_no_room(tmp_path):
    row = example(20) | {"attention_mask": [1] * 8 + [0] * 12, "name": "a text"}
    train(tmp_path, Dataset.from_list([row] * 4), max_tokens_per_rank=8)


@pytest.mark.processes
def test_examples_that_were_filtered_out_do_not_count(tmp_path):
    whole = Dataset.from_list([example(n) for n in (5, 0, 3)])
    train(tmp_path, whole.select([0, 2]))


@pytest.mark.processes
def test_examples_that_a_run_does_not_draw_are_left_alone(tmp_path):
    data = [example(5), example(9)]
    order = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 1}
    train(tmp_path, data, max_tokens_per_rank=8, **order)
    trainer = make_trainer(
        tmp_path,
        data=data[:1],
        trainer={"eval_dataset": data},
        cost_model="estimate",
        max_tokens_per_rank=8,
        **ONE_STEP,
    )
    trainer.train()
    trainer.args.eval_strategy = "epoch"
    with pytest.raises(PlanInfeasible, match=r"eval_dataset\[1\] has 9 tokens"):
        trainer.train()


def drawing(rank, world_size, folder, examples):
    class Given(IterableDataset):
        def __iter__(self):
            return iter(examples)

    trainer = make_trainer(folder, data=Given(), max_steps=2, cost_model="estimate")
    with pytest.raises(ValueError) as raised:
        trainer.train()
    one_line(raised)
    return str(raised.value)


@pytest.mark.processes
def test_a_stream_without_examples_ends_all_ranks(tmp_path):
    for said in run_ranks(drawing, 2, tmp_path, []):
        assert "no rank drew an example" in said


@pytest.mark.processes
def test_a_first_step_without_anything_to_learn_is_named(tmp_path, caplog):
    masked = example(5) | {"labels": [3] + [IGNORE_INDEX] * 4}
    train(tmp_path, [masked] * 4)
    assert "labels of its 4 sequences are -100" in caplog.text
    caplog.clear()
    train(tmp_path, [example(5)] * 4)
    assert "nothing to learn" not in caplog.text


@pytest.mark.processes
def test_a_later_step_without_anything_to_learn_is_run(tmp_path):
    masked = example(5) | {"labels": [IGNORE_INDEX] * 5}
    settings = {"per_device_train_batch_size": 1, "cost_model": "estimate"}
    order = {"train_sampling_strategy": "sequential"}
    data = [example(5), masked, example(4)]
    trainer = make_trainer(tmp_path, data=data, num_train_epochs=1, **settings, **order)
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    "column",
    [["text", "more"], [1, 2], [[1, 2], None]],
    ids=["text", "numbers", "missing"],
)
def test_columns_that_a_collator_makes_rows_of_are_left_alone(column):
    assert _token_counts(Dataset.from_dict({"input_ids": column})) is None
    assert _token_counts([{"input_ids": 5}]) is None


class AtRandom(list):
    """Examples that are changed at random when they are read."""

    def __getitem__(self, index):
        random.random()
        np.random.rand()
        torch.rand(1)
        return super().__getitem__(index)


def test_looking_at_examples_draws_no_random_numbers_of_the_run():
    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()

    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(0)
    wanted = drawn()
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(0)
    _example(AtRandom([example(5)]), 0)
    assert drawn() == wanted
