"""Smoothed labels on two ranks against the plain Trainer, and where they are refused."""

from dataclasses import replace

import pytest
from transformers import (
    DataCollatorWithPadding,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
)
from trl import SFTTrainer

from tests.differential.case import Case, sft_trainer
from tests.differential.runs import both, run, stock_run
from tests.hf.test_trainer import dataset
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


class Renamed(LlamaForCausalLM):
    """A class that transformers does not list among causal language models."""


@pytest.mark.slow
def test_a_class_without_a_list_is_smoothed_as_one_of_it_and_the_log_says_so(tmp_path, caplog):
    case = CASES["tokens"]
    renamed = replace(
        case, model=lambda: tiny_llama(cls=Renamed), flexseq={"max_tokens_per_rank": 64}
    )
    listed, stock = (stock_run(each, tmp_path) for each in (case, renamed))
    ours = run(0, 1, renamed, tmp_path)
    assert weights_apart(listed, ours) < 1e-6
    assert weights_apart(stock, ours) > 1e-3
    assert "does not list Renamed among causal language models" in caplog.text


def test_a_model_that_keeps_its_own_loss_is_refused(tmp_path):
    model = tiny_llama()
    model.loss_function = lambda logits, labels, **others: logits.sum()
    message = "label_smoothing_factor=0.2 with LlamaForCausalLM: labels are smoothed where"
    with pytest.raises(NotImplementedError, match=message):
        trainer_of(Trainer, tmp_path, flexseq={}, model=model, label_smoothing_factor=SMOOTHING)


def test_sft_trainer_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="label_smoothing_factor=0.2 of FlexSFTTrainer"):
        sft_trainer(SFTTrainer, tmp_path, 2, flexseq={}, label_smoothing_factor=SMOOTHING)
