"""Trials of `hyperparameter_search`, each of which has an accelerator and options of its own."""

from types import SimpleNamespace

import pytest
from transformers import Trainer
from transformers.trainer_utils import HPSearchBackend

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from tests.hf.plain import Stream, dataset, logged
from tests.hf.tiny import refused, tiny_llama
from tests.hf.trainers import trainer_of
from tests.ranks import run_ranks

RATES = [0.1, 0.3]


class Trial(SimpleNamespace):
    """A trial with given values, in place of optuna's."""

    number = 0
    params = ()


def searching(base, folder, **settings):
    """A trainer that makes its model for each trial."""
    return trainer_of(base, folder, model=None, model_init=lambda trial: tiny_llama(), **settings)


def searched(rank, world_size, folder):
    """Losses and numbers of micro-batches of two trials on a stream, and of the first one's
    settings without a trial."""
    options = {"max_tokens_per_rank": 61, "cost_model": "estimate", "lookahead": 0}
    settings = {"config": FlexSeqConfig, "train_dataset": Stream(dataset(16)), **options}
    alone = searching(FlexSeqTrainer, folder, learning_rate=RATES[0], **settings)
    alone.train()
    trainer = searching(FlexSeqTrainer, folder, **settings)
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = vars
    histories = [alone.state.log_history]
    for values in ({"learning_rate": RATES[0]}, {"max_tokens_per_rank": 30}):
        trainer.train(trial=Trial(**values))
        assert trainer.flexseq.accelerator is trainer.accelerator
        histories.append(trainer.state.log_history)
    names = ("loss", "flexseq/micro_batches")
    return [[logged(history, name) for name in names] for history in histories]


@pytest.mark.processes
def test_a_trial_on_a_stream_trains_as_without_one_and_may_set_options(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.hp_params", vars)
    for alone, first, second in run_ranks(searched, 2, tmp_path):
        assert first == alone
        assert second[0] == pytest.approx(first[0], rel=1e-6)
        assert sum(second[1]) > sum(first[1])


def test_a_trial_with_stages_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.hp_params", vars)
    trainer = searching(FlexSeqTrainer, tmp_path, config=FlexSeqConfig)
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = vars
    with refused("pipeline_parallel_size=2"):
        trainer.train(trial=Trial(pipeline_parallel_size=2))


def test_a_search_finds_what_that_of_the_plain_trainer_finds(tmp_path):
    optuna = pytest.importorskip("optuna")
    found = []
    data = {"eval_dataset": dataset(4), "per_device_eval_batch_size": 4}
    for flexseq in (None, {"max_tokens_per_rank": 61}):
        trainer = searching(Trainer, tmp_path, flexseq=flexseq, **data)
        best = trainer.hyperparameter_search(
            hp_space=lambda trial: {
                "learning_rate": trial.suggest_categorical("learning_rate", RATES),
                "gradient_accumulation_steps": 2,
            },
            n_trials=len(RATES),
            backend="optuna",
            sampler=optuna.samplers.GridSampler({"learning_rate": RATES}, seed=0),
        )
        found.append((best.hyperparameters, best.objective))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
