"""Rows that TRL's SFTTrainer has packed, on two ranks against the same trainer without
hf_flexseq."""

import pytest
import torch
from datasets import Dataset
from trl import SFTTrainer

from tests.hf.test_mixin import sft_trainer
from tests.hf.test_trainer import dataset
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import assert_logged_alike, trained, weights_apart
from tests.ranks import run_cases

FIGURES = ["loss", "grad_norm", "mean_token_accuracy", "entropy", "eval_loss"]
PACKED = {"packing": True, "max_length": 40}
CASES = {  # by name: settings of the SFTConfig
    "bfd": PACKED,
    "wrapped": PACKED | {"packing_strategy": "wrapped"},
    "padding-free rows": {"padding_free": True},
}


def make_trainer(folder, batch, flexseq, name):
    """A trainer of two steps in float64, which evaluates."""
    return sft_trainer(
        SFTTrainer,
        folder,
        batch,
        flexseq=flexseq,
        settings=CASES[name],
        dataset_kwargs=None,
        model=tiny_llama(torch.float64),
        train_dataset=Dataset.from_list(dataset(24)),
        eval_dataset=Dataset.from_list(dataset(9)),
        per_device_eval_batch_size=64,  # all of it: the plain trainer averages means of batches
        max_steps=2,
    )


def run(rank, world_size, folder, name):
    return trained(make_trainer(folder, 2, {}, name), evaluates=True)


@pytest.mark.processes
def test_packed_rows_train_as_under_the_plain_trainer(tmp_path):
    by_case = run_cases(run, 2, [(tmp_path, name) for name in CASES], seconds=120)
    for name, by_rank in zip(CASES, by_case, strict=True):
        stock = trained(make_trainer(tmp_path, 4, None, name), evaluates=True)
        for found in by_rank:
            assert weights_apart(stock, found) < 2e-6, name
            assert_logged_alike(stock, found, FIGURES, rel=1e-5)
            assert_logged_alike(stock, found, ["num_tokens"], rel=0)


def test_sequences_of_a_packed_row_are_planned_one_by_one(tmp_path):
    lengths = {}
    for name in ("bfd", "wrapped"):
        trainer = make_trainer(tmp_path, 4, {}, name)
        rows = list(trainer.train_dataset)
        lengths[name] = trainer.data_collator(rows)["lengths"]
        if name == "bfd":
            assert lengths[name] == [length for row in rows for length in row["seq_lengths"]]
    assert len(lengths["bfd"]) == 24 > len(lengths["wrapped"]) == len(rows)
