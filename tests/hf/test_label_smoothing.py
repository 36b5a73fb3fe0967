"""Smoothed labels on two ranks against the plain Trainer, and where they are refused."""

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithPadding, LlamaForSequenceClassification, Trainer

from tests.hf.test_trainer import dataset, logged, padded
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import trained, trainer_of, weights_apart, word_tokenizer
from tests.ranks import run_cases

SMOOTHING = 0.2


class HandsOn(Trainer):
    """A user's loss, on its own batches."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def run(rank, world_size, folder, batch, flexseq, smoothing, classifies, base=Trainer):
    """A run of three steps in float64."""
    model = tiny_llama(torch.float64)
    data = dataset(16)
    collator = padded
    if classifies:
        torch.manual_seed(0)
        model.config.update({"num_labels": 3, "pad_token_id": 0})
        model = LlamaForSequenceClassification(model.config).double()
        data = [{"input_ids": one["input_ids"], "labels": i % 3} for i, one in enumerate(data)]
        collator = DataCollatorWithPadding(word_tokenizer())
    trainer = trainer_of(
        base,
        folder,
        flexseq=flexseq,
        batch=batch,
        model=model,
        train_dataset=data,
        data_collator=collator,
        label_smoothing_factor=smoothing,
        learning_rate=0.1,
    )
    return trained(trainer)


@pytest.mark.processes
def test_steps_are_those_of_the_plain_trainer(tmp_path):
    both = (False, True)  # whether the model classifies
    cases = [(tmp_path, 2, {}, SMOOTHING, one) for one in both]
    *ours, of_own = run_cases(run, 2, [*cases, (tmp_path, 2, {}, SMOOTHING, False, HandsOn)])
    for classifies, of_ranks in zip((*both, False), (*ours, of_own), strict=True):
        stock = run(0, 1, tmp_path, 4, None, SMOOTHING, classifies)
        hard = run(0, 1, tmp_path, 4, None, 0.0, classifies)
        assert weights_apart(stock, hard) > 1e-3, "smoothing makes a difference"
        for found in of_ranks:
            # the plain Trainer adds up smoothed losses in float32
            assert weights_apart(stock, found) < 1e-6
            assert logged(found.log, "loss") == pytest.approx(logged(stock.log, "loss"), rel=1e-5)


def test_a_model_that_keeps_its_own_loss_is_refused(tmp_path):
    model = tiny_llama()
    model.loss_function = lambda logits, labels, **others: logits.sum()
    message = "label_smoothing_factor=0.2 with LlamaForCausalLM: labels are smoothed where"
    with pytest.raises(NotImplementedError, match=message):
        trainer_of(Trainer, tmp_path, flexseq={}, model=model, label_smoothing_factor=SMOOTHING)


def test_sft_trainer_is_refused(tmp_path):
    trl = pytest.importorskip("trl")
    with pytest.raises(NotImplementedError, match="label_smoothing_factor=0.2 of FlexSFTTrainer"):
        trainer_of(
            trl.SFTTrainer,
            tmp_path,
            config=trl.SFTConfig,
            flexseq={},
            train_dataset=Dataset.from_list(dataset(16)),
            data_collator=None,
            processing_class=word_tokenizer(),
            label_smoothing_factor=SMOOTHING,
        )
