"""Smoothed labels on two ranks against the plain Trainer, and where they are refused."""

from dataclasses import replace

import pytest
from transformers import DataCollatorWithPadding, LlamaForSequenceClassification, Trainer
from trl import SFTTrainer

from tests.differential.case import Case, sft_trainer
from tests.differential.runs import both, stock_run
from tests.hf.plain import dataset
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import (
    OwnLoss,
    assert_logged_alike,
    trainer_of,
    weights_apart,
    word_tokenizer,
)

SMOOTHING = 0.2


def classifier():
    return tiny_llama(cls=LlamaForSequenceClassification, num_labels=3, pad_token_id=0)


SETTINGS = {"label_smoothing_factor": SMOOTHING, "learning_rate": 0.1}
CLASSES = [{"input_ids": one["input_ids"], "labels": i % 3} for i, one in enumerate(dataset(16))]
CASES = {
    "tokens": Case(settings=SETTINGS),
    "classes": Case(
        model=classifier,
        settings={
            "train_dataset": CLASSES,
            "data_collator": DataCollatorWithPadding(word_tokenizer()),
            **SETTINGS,
        },
    ),
    "a loss of one's own": Case(base=OwnLoss, settings=SETTINGS),
}


@pytest.mark.processes
def test_steps_are_those_of_the_plain_trainer(tmp_path):
    for name, stock, of_ranks in both(CASES, tmp_path):
        case = CASES[name]
        hard = stock_run(replace(case, stock_settings={"label_smoothing_factor": 0.0}), tmp_path)
        assert weights_apart(stock, hard) > 1e-3, "smoothing makes a difference"
        for found in of_ranks:
            # the plain Trainer adds up smoothed losses in float32
            assert weights_apart(stock, found) < 1e-6, name
            assert_logged_alike(stock, found, ["loss"], rel=1e-5)


def test_a_model_that_keeps_its_own_loss_is_refused(tmp_path):
    model = tiny_llama()
    model.loss_function = lambda logits, labels, **others: logits.sum()
    message = "label_smoothing_factor=0.2 with LlamaForCausalLM: labels are smoothed where"
    with pytest.raises(NotImplementedError, match=message):
        trainer_of(Trainer, tmp_path, flexseq={}, model=model, label_smoothing_factor=SMOOTHING)


def test_sft_trainer_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="label_smoothing_factor=0.2 of FlexSFTTrainer"):
        sft_trainer(SFTTrainer, tmp_path, 2, flexseq={}, label_smoothing_factor=SMOOTHING)
