"""Trials of `hyperparameter_search`, each of which has an accelerator and options of its own."""

from types import SimpleNamespace

import pytest
from accelerate.utils import release_memory
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


@pytest.fixture(autouse=True)
def without_optuna(monkeypatch):
    """Let trials of optuna be described where it is not installed."""
    monkeypatch.setattr("transformers.integrations.hp_params", vars)


def searching(base, folder, **settings):
    """A trainer that makes its model for each trial, amid a search."""
    settings |= {"model": None, "model_init": lambda trial: tiny_llama()}
    trainer = trainer_of(base, folder, **settings)
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = vars
    return trainer


def searched(rank, world_size, folder):
    """Losses and numbers of micro-batches of two trials on a stream, and of the first one's
    settings without a trial."""
    options = {"max_tokens_per_rank": 61, "cost_model": "estimate", "lookahead": 0}
    settings = {"config": FlexSeqConfig, "train_dataset": Stream(dataset(16)), **options}
    alone = searching(FlexSeqTrainer, folder, learning_rate=RATES[0], **settings)
    alone.train()
    trainer = searching(FlexSeqTrainer, folder, **settings)
    histories = [alone.state.log_history]
    for values in ({"learning_rate": RATES[0]}, {"max_tokens_per_rank": 30}):
        trainer.train(trial=Trial(**values))
        assert trainer.flexseq.accelerator is trainer.accelerator
        histories.append(trainer.state.log_history)
    names = ("loss", "flexseq/micro_batches")
    return [[logged(history, name) for name in names] for history in histories]


@pytest.mark.processes
def test_a_trial_on_a_stream_trains_as_without_one_and_may_set_options(tmp_path):
    for alone, first, second in run_ranks(searched, 2, tmp_path):
        assert first == alone
        assert second[0] == pytest.approx(first[0], rel=1e-6)
        assert sum(second[1]) > sum(first[1])


def test_a_trial_with_stages_is_refused(tmp_path):
    trainer = searching(FlexSeqTrainer, tmp_path, config=FlexSeqConfig)
    with refused("pipeline_parallel_size=2"):
        trainer.train(trial=Trial(pipeline_parallel_size=2))


def objectives(trainer):
    """What two trials reach, each begun as a search begins it."""
    found = []
    for rate in RATES:
        trainer.train(trial=Trial(learning_rate=rate, gradient_accumulation_steps=2))
        found.append(trainer.evaluate()["eval_loss"])
        trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
        trainer.accelerator.clear()
    return found


def test_trials_reach_what_those_of_the_plain_trainer_reach(tmp_path):
    data = {"eval_dataset": dataset(4), "per_device_eval_batch_size": 4}
    options = {"max_tokens_per_rank": 61}
    stock, ours = (
        objectives(searching(Trainer, tmp_path, flexseq=flexseq, **data))
        for flexseq in (None, options)
    )
    assert stock[0] != stock[1]
    assert ours == pytest.approx(stock, rel=1e-6)
