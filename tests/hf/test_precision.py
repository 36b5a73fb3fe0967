"""bfloat16 by autocast: the attention runs in it, and the losses stay close to those of the plain
Trainer in it."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from tests.hf.test_trainer import OPTIONS, dataset, logged, padded, training_arguments
from tests.hf.tiny import tiny_llama
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


def bf16_run(rank, world_size, folder):
    """The log of the plain Trainer on one rank, and of ours on several."""
    common = {"batch": 4 // world_size, "accumulation": 1, "max_steps": 4, "learning_rate": 0.1}
    common |= {"optim": "sgd", "bf16": True}
    model = tiny_llama(torch.float32)
    if world_size == 1:
        args = training_arguments(TrainingArguments, folder, **common)
        trainer = Trainer(model=model, args=args, train_dataset=dataset(), data_collator=padded)
    else:
        args = training_arguments(FlexSeqConfig, folder, **common, **OPTIONS)
        data = {"train_dataset": dataset(), "eval_dataset": dataset(8)}
        trainer = FlexSeqTrainer(model=model, args=args, **data)
        trainer.evaluate()  # wraps the model for autocast, and must leave no trace of it
    trainer.train()
    assert next(model.parameters()).dtype == torch.float32
    return trainer.state.log_history


def test_bf16_follows_the_plain_trainer(tmp_path):
    logs = run_ranks(bf16_run, 2, tmp_path)
    wanted = bf16_run(0, 1, tmp_path)
    for log in logs:
        assert logged(log, "loss") == pytest.approx(logged(wanted, "loss"), rel=3e-3)
        assert logged(log, "grad_norm") == pytest.approx(logged(wanted, "grad_norm"), rel=2e-2)
