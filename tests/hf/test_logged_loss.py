"""The loss that is logged is that of all ranks and whole steps, also of steps after the last log
line and where losses of batches are NaN."""

import dataclasses

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForTokenClassification, Trainer

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqMixin
from tests.hf.objectives import (
    FLOAT64_BOUND,
    Case,
    assert_alike,
    classified,
    classifier,
    make_trainer,
    run_case,
)
from tests.hf.plain import dataset, float64_loss, logged
from tests.hf.tiny import VOCAB, tiny_llama
from tests.hf.trainers import assert_logged_alike, difference, trained, trainer_of, weights_apart
from tests.ranks import run_ranks

STEPS = 3  # with a log line after the second one
SEQUENCES = 6  # of a step
MARK = VOCAB - 1  # a token of one sequence, whose loss is NaN
TOGETHER = 2e-6  # float32, in which the Trainer adds losses up


def loss_with_nan(logits, labels, vocab_size, num_items_in_batch=None, **given):
    """NaN beside a marked label. Its gradients are finite."""
    loss = float64_loss(logits, labels, vocab_size, num_items_in_batch, **given)
    return loss + torch.nan if (labels == MARK).any() else loss


def marked_dataset(is_marked):
    """Documents, of which the longest in the second step has the mark, if `is_marked`."""
    examples = dataset(SEQUENCES * STEPS)
    for example in examples:
        for name in ("input_ids", "labels"):
            example[name] = [MARK - 1 if token == MARK else token for token in example[name]]
    if is_marked:
        second = examples[SEQUENCES : 2 * SEQUENCES]
        longest = max(second, key=lambda example: len(example["input_ids"]))
        longest["labels"][-1] = MARK
    return examples


def make(folder, *, flexseq=None, batch=SEQUENCES, is_marked=False):
    model = tiny_llama()
    given = {"model": model, "train_dataset": marked_dataset(is_marked)}
    if is_marked:
        model.loss_function = loss_with_nan
    elif flexseq is None:
        model.loss_function = float64_loss
    if flexseq is not None:
        given["data_collator"] = DataCollatorForFlexSeq()
    settings = {"max_steps": STEPS, "logging_steps": 2, "train_sampling_strategy": "sequential"}
    return trainer_of(Trainer, folder, flexseq=flexseq, batch=batch, **settings, **given)


def runs_of_ranks(rank, world_size, folder):
    own = {"batch": SEQUENCES // world_size}
    warning = {"on_nonfinite": "warn"}
    with_nan = trained(make(folder, flexseq=warning, is_marked=True, **own))
    with pytest.raises(FloatingPointError, match="NaN or infinity in the loss and in no gradient"):
        make(folder, flexseq={}, is_marked=True, **own).train()
    without = trained(make(folder, flexseq={}, **own))
    stages = trained(make(folder, flexseq={"pipeline_parallel_size": 2}, **own))
    return with_nan, without, stages


@pytest.mark.processes
def test_losses_of_all_ranks_and_steps_are_those_of_one_process(tmp_path):
    without_nan = trained(make(tmp_path))
    with_nan = trained(make(tmp_path, is_marked=True))
    keys = ("loss", "train_loss")
    assert logged(with_nan.log, "loss") != logged(without_nan.log, "loss")
    for marked, *others in run_ranks(runs_of_ranks, 2, tmp_path, seconds=120):
        assert weights_apart(with_nan, marked) < TOGETHER
        assert_logged_alike(with_nan, marked, keys, rel=TOGETHER)
        for ours in others:
            assert_logged_alike(without_nan, ours, keys, rel=TOGETHER)


# ---- losses of the trainer's own batches

OWN_STEPS = 3
SETTINGS = {"train_sampling_strategy": "sequential", "logging_steps": OWN_STEPS}


def without_labels(kind, which):
    """Data in the order in which it is drawn; some batches of two examples have no label."""
    rows = classified(8 * OWN_STEPS, tokens=kind == "tokens").to_list()
    for batch in which:
        for row in rows[2 * batch : 2 * batch + 2]:
            row["labels"] = [-100] * len(row["labels"]) if kind == "tokens" else -100
    return Dataset.from_list(rows)


# batches, which ranks 0 and 1 draw alternately, four to a step
UNLABELLED = {"tokens": [1, 5, 6, 8], "sequences": [0, 1, 7]}


def own_runs(rank, world_size, folder):
    """Runs of the plain trainer and of ours; then both with a step after the last log line."""
    found = []
    for kind, which in UNLABELLED.items():
        case = Case(kind=kind, steps=OWN_STEPS, accumulation=2, settings=SETTINGS)
        data = without_labels(kind, which)
        found.append([run_case(case, is_ours, folder, train_dataset=data) for is_ours in (0, 1)])
    left = dataclasses.replace(case, settings={"logging_steps": 2})
    found.append([run_case(left, is_ours, folder) for is_ours in (0, 1)])
    return found


@pytest.mark.processes
def test_batches_without_labels_are_left_out_as_by_the_plain_trainer(tmp_path):
    results = run_ranks(own_runs, 2, tmp_path)
    for *with_gaps, left in results:
        for stock, ours in with_gaps:
            assert_alike(difference(stock, ours), weights=FLOAT64_BOUND)
            assert logged(ours.log, "loss")[0] > 0
        assert logged(left[1].log, "loss") == pytest.approx(logged(left[0].log, "loss"))
    of_ranks = [train_loss(left[0]) for *_, left in results]
    assert of_ranks[0] != pytest.approx(of_ranks[1], rel=1e-3), "each rank has a share of its own"
    for *_, left in results:
        assert train_loss(left[1]) == pytest.approx(sum(of_ranks) / 2, rel=1e-6)


def train_loss(run):
    return logged(run.log, "train_loss")[0]


class NanOfLabels(FlexSeqMixin, Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) + torch.nan


@pytest.mark.slow
def test_a_nan_of_a_batch_with_labels_ends_training(tmp_path):
    case = Case(kind="tokens", steps=2)
    model = classifier(LlamaForTokenClassification, 3, torch.float64)
    trainer = make_trainer(case, NanOfLabels, tmp_path, model=model)
    with pytest.raises(FloatingPointError, match="step 0, .* the loss and in no gradient; look"):
        trainer.train()
