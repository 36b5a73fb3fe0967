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
from tests.ranks import run_ranks

SEQUENCES = 6  # of a step
STEPS = 3
CAPS = (60, 100, 400)  # tokens of a rank in a micro-batch
TRAINED = ("loss", "mean_token_accuracy", "entropy", "num_tokens")
EVALUATED = ("eval_loss", "eval_mean_token_accuracy", "eval_entropy", "eval_num_tokens")


def log_of(cls, folder, *, batch, accumulation=1, evaluated, **options):
    """What is logged of a training that ends in an evaluation."""
    data = Dataset.from_list(dataset(SEQUENCES * STEPS))
    settings = {"max_steps": STEPS, "per_device_eval_batch_size": evaluated}
    trainer = sft_trainer(
        cls,
        folder,
        batch,
        accumulation=accumulation,
        settings=settings,
        train_dataset=data,
        eval_dataset=data.select(range(7)),
        **options,
    )
    trainer.train()
    trainer.evaluate()
    return trainer.state.log_history


def logs_by_cap(rank, world_size, folder):
    found = []
    for number, cap in enumerate(CAPS):
        options = {**OPTIONS, "max_tokens_per_rank": cap, "lookahead": 0}
        batch = 1 if cap == CAPS[0] else SEQUENCES // world_size
        found.append(
            log_of(
                FlexSeqSFTTrainer,
                folder,
                batch=batch,
                accumulation=SEQUENCES // world_size // batch,
                evaluated=1 + number,
                flexseq_args=FlexSeqArguments(**options),
            )
        )
    return found


@pytest.mark.processes
def test_figures_of_the_sft_trainer_do_not_depend_on_plan_or_ranks(tmp_path):
    wanted = log_of(SFTTrainer, tmp_path, batch=SEQUENCES, evaluated=7)
    for world_size in (1, 2, 3):
        micro_batches = set()
        for logs in run_ranks(logs_by_cap, world_size, tmp_path):
            for log in logs:
                micro_batches.add(max(logged(log, "flexseq/micro_batches")))
                for key in (*TRAINED, *EVALUATED):
                    assert logged(log, key) == pytest.approx(logged(wanted, key), rel=1e-6), key
        assert len(micro_batches) > 1


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
