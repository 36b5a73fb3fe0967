"""Rows that TRL's SFTTrainer has packed, on two ranks against the same trainer without
hf_flexseq."""

from dataclasses import replace

import pytest
from datasets import Dataset
from transformers import DataCollatorWithFlattening
from trl import SFTTrainer

from tests.differential.case import Case, make_trainer
from tests.differential.runs import both, run, stock_run
from tests.hf.plain import dataset
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


def test_documents_stay_apart_with_a_cache_and_the_log_says_so(tmp_path, caplog):
    """Unlike those of the plain Trainer, which it lets see each other in its own attention."""
    case = Case(
        settings={"data_collator": DataCollatorWithFlattening(), "use_cache": True},
        flexseq={"max_tokens_per_rank": 64},
    )
    without = replace(case, settings={**case.settings, "use_cache": False})
    stock, apart = (stock_run(each, tmp_path) for each in (case, without))
    assert weights_apart(apart, run(0, 1, case, tmp_path)) < 1e-6
    assert weights_apart(apart, stock) > 1e-3
    assert "documents of a packed row see each other" in caplog.text
