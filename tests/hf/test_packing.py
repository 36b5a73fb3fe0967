"""Rows that TRL's SFTTrainer has packed, on two ranks against the same trainer without
hf_flexseq."""

import pytest
from datasets import Dataset
from trl import SFTTrainer

from tests.differential.case import Case, make_trainer
from tests.differential.runs import both
from tests.hf.test_trainer import dataset
from tests.hf.trainers import assert_logged_alike, weights_apart

FIGURES = ["loss", "grad_norm", "mean_token_accuracy", "entropy", "eval_loss"]
PACKED = {"packing": True, "max_length": 40}
ROWS = {  # by name: settings of the SFTConfig
    "bfd": PACKED,
    "wrapped": PACKED | {"packing_strategy": "wrapped"},
    "padding-free rows": {"padding_free": True},
}
SETTINGS = {
    "dataset_kwargs": None,
    "train_dataset": Dataset.from_list(dataset(24)),
    "eval_dataset": Dataset.from_list(dataset(9)),
    "per_device_eval_batch_size": 64,  # all of it: the plain trainer averages means of batches
    "max_steps": 2,
}
CASES = {
    name: Case(base=SFTTrainer, settings=SETTINGS | own, evaluates=True)
    for name, own in ROWS.items()
}


@pytest.mark.processes
def test_packed_rows_train_as_under_the_plain_trainer(tmp_path):
    for name, stock, ours in both(CASES, tmp_path, seconds=120):
        for found in ours:
            assert weights_apart(stock, found) < 2e-6, name
            assert_logged_alike(stock, found, FIGURES, rel=1e-5)
            assert_logged_alike(stock, found, ["num_tokens"], rel=0)


def test_sequences_of_a_packed_row_are_planned_one_by_one(tmp_path):
    lengths = {}
    for name in ("bfd", "wrapped"):
        trainer = make_trainer(CASES[name], tmp_path, is_ours=True)
        rows = list(trainer.train_dataset)
        lengths[name] = trainer.data_collator(rows)["lengths"]
        if name == "bfd":
            assert lengths[name] == [length for row in rows for length in row["seq_lengths"]]
    assert len(lengths["bfd"]) == 24 > len(lengths["wrapped"]) == len(rows)
