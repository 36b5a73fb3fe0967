"""Targets beside padding, which the plain Trainer trains on, are left out and named once."""

import logging

import pytest
import torch
from transformers import DataCollatorForLanguageModeling, Trainer

from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.steps.collator import PADDING_TARGETS
from tests.hf.test_mixin import tokenizer
from tests.hf.trainers import trainer_of


def example(ids, mask, labels):
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
    batch = DataCollatorForFlexSeq()([example(ids, mask, labels)])
    assert batch.get(PADDING_TARGETS, 0) == left_out
    of_plain = int((torch.tensor(labels)[1:] != -100).sum())  # the Trainer's own count
    assert of_plain - int((batch["labels"] != -100).sum()) == left_out


@pytest.mark.parametrize(("side", "left_out"), [("left", 2), ("right", 0)])
def test_padding_on_the_left_is_foreseen_where_the_collator_would_put_it(side, left_out):
    words = tokenizer()
    words.padding_side = side
    pads = DataCollatorForLanguageModeling(words, mlm=False)
    examples = [{"input_ids": list(range(2, 2 + n))} for n in (4, 6, 3)]
    batch = DataCollatorForFlexSeq(pads)(examples)
    assert batch.get(PADDING_TARGETS, 0) == left_out
    of_plain = int((pads(examples)["labels"][:, 1:] != -100).sum())
    assert of_plain - int((batch["labels"] != -100).sum()) == left_out
    assert PADDING_TARGETS not in DataCollatorForFlexSeq(pads)(examples[1:2])


def test_a_run_says_once_what_it_leaves_out(tmp_path, caplog):
    rows = [example([5, 6, 7, 8, 0, 0], [1, 1, 1, 1, 0, 0], [5, 6, 7, 8, 0, 0])] * 8
    settings = {"accumulation": 2, "max_steps": 2, "train_dataset": rows, "data_collator": None}
    plain = trainer_of(Trainer, tmp_path, **settings)
    batches = list(plain.get_train_dataloader())[:2]
    assert int(plain._get_num_items_in_batch(batches, "cpu")) == 4 * 5
    with caplog.at_level(logging.WARNING, "hf_flexseq"):
        trainer_of(Trainer, tmp_path, flexseq={"lookahead": 0}, **settings).train()
    (line,) = (r.getMessage() for r in caplog.records if "padding" in r.getMessage())
    assert "leaves out 8 targets beside padding" in line
    assert "12 targets of tokens stay" in line
