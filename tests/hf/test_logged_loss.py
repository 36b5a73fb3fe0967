"""The loss that is logged is that of all ranks and whole steps, also of steps after the last log
line and where losses of batches are NaN."""

import dataclasses

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForTokenClassification, Trainer, TrainingArguments

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqMixin, FlexSeqTrainer
from tests.hf.objectives import (
    OPTIONS,
    Case,
    classified,
    classifier,
    difference,
    make_trainer,
    run_case,
)
from tests.hf.objectives import Run as CaseRun
from tests.hf.test_trainer import (
    dataset,
    float64_loss,
    logged,
    padded,
    training_arguments,
    update_error,
)
from tests.hf.tiny import VOCAB, tiny_llama
from tests.ranks import run_ranks

STEPS = 5  # with a log line after every second one
SEQUENCES = 6  # of a step
MARK = VOCAB - 1  # a token of one sequence, whose loss is NaN
TOGETHER = 2e-6  # float32, in which the Trainer adds losses up


class NanTrainer(Trainer):
    """Its gradients are finite, whatever its loss is."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        is_marked = (inputs["input_ids"] == MARK).any()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + torch.nan if is_marked else loss


class FlexSeqNanTrainer(FlexSeqMixin, NanTrainer):
    pass


def marked_dataset(is_marked):
    """Documents, of which the longest in the second step has the mark, if `is_marked`."""
    examples = dataset(SEQUENCES * STEPS)
    for example in examples:
        for name in ("input_ids", "labels"):
            example[name] = [MARK - 1 if token == MARK else token for token in example[name]]
    if is_marked:
        second = examples[SEQUENCES : 2 * SEQUENCES]
        longest = max(second, key=lambda example: len(example["input_ids"]))
        longest["input_ids"][0] = MARK
    return examples


def run(cls, folder, *, batch, is_marked=False, model=None, **options):
    model = model or tiny_llama()
    settings = {"optim": "sgd", "max_steps": STEPS, "logging_steps": 2}
    settings["train_sampling_strategy"] = "sequential"
    args = training_arguments(TrainingArguments, folder, batch=batch, accumulation=1, **settings)
    given = {"data_collator": padded}
    if issubclass(cls, FlexSeqMixin):
        given = {"data_collator": DataCollatorForFlexSeq()}
        given["flexseq_args"] = FlexSeqArguments(**{**OPTIONS, **options})
    trainer = cls(model=model, args=args, train_dataset=marked_dataset(is_marked), **given)
    trainer.train()
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return weights, trainer.state.log_history


def runs_of_ranks(rank, world_size, folder):
    batch = SEQUENCES // world_size
    with_nan = run(FlexSeqNanTrainer, folder, batch=batch, is_marked=True, on_nonfinite="warn")
    raised = None
    try:
        run(FlexSeqNanTrainer, folder, batch=batch, is_marked=True)
    except FloatingPointError as error:
        raised = str(error)
    without = run(FlexSeqTrainer, folder, batch=batch)
    stages = run(FlexSeqTrainer, folder, batch=batch, pipeline_parallel_size=2)
    return with_nan, without, stages, raised


@pytest.mark.processes
def test_losses_of_all_ranks_and_steps_are_those_of_one_process(tmp_path):
    model = tiny_llama()
    model.loss_function = float64_loss
    _, without_nan = run(Trainer, tmp_path, batch=SEQUENCES, model=model)
    model = tiny_llama()
    model.loss_function = float64_loss
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    wanted, history = run(NanTrainer, tmp_path, batch=SEQUENCES, model=model, is_marked=True)
    wanted = {name: torch.as_tensor(value) for name, value in wanted.items()}
    assert logged(history, "loss") != logged(without_nan, "loss")
    for with_nan, without, stages, raised in run_ranks(runs_of_ranks, 2, tmp_path, seconds=120):
        assert update_error(before, wanted, with_nan[0]) < TOGETHER
        for own, expected in (
            (with_nan[1], history),
            (without[1], without_nan),
            (stages[1], without_nan),
        ):
            for key in ("loss", "train_loss"):
                assert logged(own, key) == pytest.approx(logged(expected, key), rel=TOGETHER), key
        assert "NaN or infinity in the loss and in no gradient; look for" in raised


# ---- losses of the trainer's own batches

HOME_STEPS = 3
SETTINGS = {"train_sampling_strategy": "sequential", "logging_steps": HOME_STEPS}


def without_labels(kind, which):
    """Data in the order in which it is drawn; some batches of two examples have no label."""
    rows = classified(8 * HOME_STEPS, tokens=kind == "tokens").to_list()
    for batch in which:
        for row in rows[2 * batch : 2 * batch + 2]:
            row["labels"] = [-100] * len(row["labels"]) if kind == "tokens" else -100
    return Dataset.from_list(rows)


# batches: of ranks 0 and 1 in turns, four to a step
UNLABELLED = {"tokens": [1, 5, 6, 8], "sequences": [0, 1, 7]}


def home_runs(rank, world_size, folder):
    """Runs of the plain trainer and of ours; then both with a step after the last log line."""
    found = []
    for kind, which in UNLABELLED.items():
        case = Case(kind=kind, steps=HOME_STEPS, accumulation=2, settings=SETTINGS)
        data = without_labels(kind, which)
        found.append([run_case(case, is_ours, folder, train_dataset=data) for is_ours in (0, 1)])
    left = dataclasses.replace(case, settings={"logging_steps": 2})
    found.append([run_case(left, is_ours, folder) for is_ours in (0, 1)])
    return found


@pytest.mark.processes
def test_batches_without_labels_are_left_out_as_by_the_plain_trainer(tmp_path):
    results = run_ranks(home_runs, 2, tmp_path)
    for *with_gaps, left in results:
        for stock, ours in with_gaps:
            apart = difference(stock, ours)
            assert apart.weights < 1e-7
            assert apart.metrics < 1e-6, apart.metric
            assert logged(ours.log, "loss")[0] > 0
        assert logged(left[1].log, "loss") == pytest.approx(logged(left[0].log, "loss"))
    of_ranks = [train_loss(left[0]) for *_, left in results]
    assert of_ranks[0] != pytest.approx(of_ranks[1], rel=1e-3), "each rank has a share of its own"
    for *_, left in results:
        assert train_loss(left[1]) == pytest.approx(sum(of_ranks) / 2, rel=1e-6)


def train_loss(run: CaseRun):
    return logged(run.log, "train_loss")[0]


class NanOfLabels(FlexSeqMixin, Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) + torch.nan


def test_a_nan_of_a_batch_with_labels_ends_training(tmp_path):
    case = Case(kind="tokens", steps=2)
    model = classifier(LlamaForTokenClassification, 3, torch.float64)
    options = FlexSeqArguments(**OPTIONS, lookahead=0)
    trainer = make_trainer(case, NanOfLabels, tmp_path, model=model, flexseq_args=options)
    with pytest.raises(
        FloatingPointError, match="step 0, .* in the loss and in no gradient; look"
    ):
        trainer.train()
