"""Figures that SFTTrainer notes with every micro-batch are means over the target tokens of a step,
whatever the plan is, and of a whole evaluation set."""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from trl import SFTTrainer

from hf_flexseq import FlexSeqArguments
from hf_flexseq.hf.token_means import TokenMeans
from tests.hf.test_mixin import FlexSeqSFTTrainer, sft_trainer
from tests.hf.test_trainer import OPTIONS, dataset, logged
from tests.hf.trainers import assert_logged_alike, trained
from tests.ranks import run_ranks

SEQUENCES = 6  # of a step
STEPS = 3
CAPS = (60, 400)  # tokens of a rank in a micro-batch
TRAINED = ("loss", "mean_token_accuracy", "entropy", "num_tokens")


def run(cls, folder, *, evaluated, batch=SEQUENCES, accumulation=1, **given):
    """A training that ends in an evaluation, of so many sequences at a time."""
    data = Dataset.from_list(dataset(SEQUENCES * STEPS))
    given |= {"train_dataset": data, "eval_dataset": data.select(range(7))}
    settings = {"max_steps": STEPS, "per_device_eval_batch_size": evaluated}
    options = {"accumulation": accumulation, "settings": settings}
    return trained(sft_trainer(cls, folder, batch, **options, **given), evaluates=True)


def runs_by_cap(rank, world_size, folder):
    own = SEQUENCES // world_size
    found = []
    for cap, batch in zip(CAPS, (1, own), strict=True):
        options = FlexSeqArguments(**{**OPTIONS, "max_tokens_per_rank": cap, "lookahead": 0})
        given = {"batch": batch, "accumulation": own // batch, "flexseq_args": options}
        found.append(run(FlexSeqSFTTrainer, folder, evaluated=batch, **given))
    return found


@pytest.mark.processes
def test_figures_of_the_sft_trainer_do_not_depend_on_plan_or_ranks(tmp_path):
    by_rank = run_ranks(runs_by_cap, 3, tmp_path)
    stock = run(SFTTrainer, tmp_path, evaluated=7)
    for runs in by_rank:
        for ours in runs:
            keys = (*TRAINED, *(f"eval_{name}" for name in TRAINED))
            assert_logged_alike(stock, ours, keys, rel=1e-6)
        assert len({max(logged(ours.log, "flexseq/micro_batches")) for ours in runs}) > 1


def trainer_with(**lists):
    return SimpleNamespace(_metrics={"train": lists, "eval": {}})


def test_lists_that_did_not_grow_with_each_micro_batch_are_left_alone():
    trainer = trainer_with(each=[9.0], once=[9.0], replaced=[5])
    lists = trainer._metrics["train"]
    means = TokenMeans(trainer)
    means.begin("train")
    lists["each"] += [1.0, float("nan"), 4.0]
    lists["once"] += [2.0]
    lists["replaced"] = [6]
    lists["new"] = [1.0, 2.0, 3.0]
    means.end_training([1, 0, 2], 30)
    assert lists == {"each": [9.0, 3.0], "once": [9.0, 2.0], "replaced": [6], "new": [7 / 3]}

    means.begin("train")
    lists["each"] += [0.0, 0.0]
    means.end_training([0, 0], 30)
    assert lists["each"] == [9.0, 3.0, 0.0], "a step without target tokens"
    TokenMeans(SimpleNamespace()).begin("train")  # a trainer that keeps no lists
