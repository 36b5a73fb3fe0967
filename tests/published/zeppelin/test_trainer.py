"""`planner="zeppelin"` under the Trainer: its passes run, and results are those of one process."""

from dataclasses import replace
from unittest import mock

import pytest

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.published.zeppelin import remap, routes
from tests.differential.case import Case
from tests.differential.runs import stock_run
from tests.hf.plain import dataset, float64_loss, logged, training_arguments
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import update_error
from tests.published.zeppelin.gainful_passes import SLOW
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

# Even tokens take less time than uneven ones, and moving them takes next to none.
COST = replace(SLOW, linear_s=1e3, bandwidths=((2, 1e12), (16, 1e5)))


def counted(cls, name):
    """A patch that counts the calls of a method."""
    return mock.patch.object(cls, name, autospec=True, side_effect=getattr(cls, name))


def train(rank, world_size, folder):
    """Weights and log of three steps of the trainer, and whether each pass has run."""
    options = {"planner": "zeppelin", "sync": "lockstep", "lookahead": 0}
    options |= {"cost_model": str(folder / "cost.json"), "max_tokens_per_rank": 30}
    options |= {"batch": 2, "accumulation": 1, "optim": "sgd", "max_steps": 3}
    args = training_arguments(FlexSeqConfig, folder, **options)
    model = tiny_llama()
    with (
        counted(routes._Legs, "begin") as routed,
        counted(remap.RemapPass, "_move") as moved,
    ):
        trainer = FlexSeqTrainer(model=model, args=args, train_dataset=dataset())
        trainer.train()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return weights, trainer.state.log_history, routed.called, moved.called


def test_a_trainer_with_passes_equals_the_plain_one(tmp_path):
    COST.save(tmp_path / "cost.json")
    case = Case(settings={"train_dataset": dataset()}, batch=8, stock_loss=float64_loss)
    plain = stock_run(case, tmp_path)
    by_rank = run_ranks(train, 4, tmp_path, ranks_per_node=2, seconds=120)
    for found, log, routed, _ in by_rank:
        assert update_error(plain.start, plain.weights, found) < 1e-8
        assert logged(log, "loss") == pytest.approx(logged(plain.log, "loss"), rel=1e-6)
        assert logged(log, "grad_norm") == pytest.approx(logged(plain.log, "grad_norm"), rel=1e-8)
        assert routed
    assert any(moved for *_, moved in by_rank)
