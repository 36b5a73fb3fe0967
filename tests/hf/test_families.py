"""Families with layers of several kinds: steps of the Trainer on two ranks against those of the
plain Trainer in one process. With `-m nightly` ten families, and all with recurrent
layers, take ten steps in every way to train them.

transformers computes recurrent scans in float32, whatever the dtype of the model. Where ten of its
own steps with scans in float64 are further from those than the bound, three times that distance is
allowed."""

from functools import partial

import pytest
from transformers import Trainer
from trl import SFTTrainer

from tests import budget
from tests.differential.case import sft_trainer
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_reach import make_model
from tests.hf.test_trainer import logged, make_trainer, plain_run, update_error
from tests.hf.tiny import noting_figures, weights
from tests.hf.trainers import trained
from tests.ranks import run_ranks

WAYS = ("subclass", "callback", "sft", "zero3")
# SFTTrainer asks models of experts for their router loss, unless it is weighed with 0.
sft_of = partial(sft_trainer, SFTTrainer, settings={"router_aux_loss_coef": 0.0})


def model_of(way, family):
    """A model of this family. SFTTrainer looks for the decoder by the model's prefix, which in
    Llama 4's is that of another part."""
    model = make_hybrid(family) if family in HYBRIDS else make_model(family)
    if way == "zero3":  # takes no float64 parameters
        model = model.float()
    if way == "sft" and not hasattr(model, model.base_model_prefix):
        model.base_model_prefix = "model"
    return model


def plain_family(folder, way, family):
    """Weights before and after, and losses, of one process.

    It takes one document at a time: a window that shows padding alone makes NaN in some families.
    """
    model = model_of(way, family)
    model.set_attn_implementation("eager")
    if way != "sft":
        options = {"learning_rate": 0.1} if way == "zero3" else {}  # that of `zero_run`
        before, after, history = plain_run(folder, batch=1, accumulation=4, model=model, **options)
        return before, after, logged(history, "loss")
    run = trained(sft_of(folder, 1, accumulation=4, model=model))
    return run.start, run.weights, logged(run.log, "loss")


def family_run(rank, world_size, folder, way, family):
    """Weights after the run, its losses, and how often two ranks shared sequences."""
    if way == "zero3":
        from tests.hf.test_sharding import zero_run  # DeepSpeed need not be installed elsewhere

        make = partial(model_of, way, family)
        after, history, _ = zero_run(rank, world_size, folder, 3, 1, True, make)
        return after, logged(history, "loss"), max(logged(history, "groups_of_2"))
    model = model_of(way, family)
    if way == "sft":
        trainer: Trainer = sft_of(folder, 2, model=model, flexseq={})
    else:
        trainer = make_trainer(way, model, folder, 2, 1, "sgd")
    steps = noting_figures(trainer)
    trainer.train()
    losses = logged(trainer.state.log_history, "loss")
    return weights(model), losses, max(logged(steps, "groups_of_2"))


def errors_of_family(folder, way, family, plain=None):
    """The error of the update on each rank, which is small beside the loss's float32.

    plain: what `plain_family` returned, if that has run.
    """
    before, wanted, losses = plain or plain_family(folder, way, family)
    errors = []
    for found, found_losses, shared in run_ranks(family_run, 2, folder, way, family, seconds=300):
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert shared >= 1, "no step ever split a sequence"
        errors.append(update_error(before, wanted, found))
    return errors


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "family"),
    [
        ("subclass", "Gemma3"),
        ("callback", "GptOss"),
        ("sft", "DeepseekV3"),
        pytest.param("zero3", "GptOss", marks=pytest.mark.nightly),
    ],
)
def test_steps_of_a_family_equal_the_plain_trainer(tmp_path, way, family):
    assert max(errors_of_family(tmp_path, way, family)) < 2e-6


# ---- ten steps

TRAINED = ("Gemma2", "Gemma3", "Gemma4", "GptOss", "Mistral with a window", "Olmo3", "Cohere2")
TRAINED += ("Exaone4", "Llama4", "DeepseekV3")


@pytest.fixture
def ten_steps(monkeypatch):
    monkeypatch.setattr(budget, "trainer_steps", 10)


def bound_of(way):
    """With ZeRO-3 weights are float32: the plain Trainer is as far from its float64 ones."""
    return 1e-5 if way == "zero3" else 2e-6


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", TRAINED)
def test_ten_steps_of_a_family_equal_the_plain_trainer(tmp_path, ten_steps, way, family):
    assert max(errors_of_family(tmp_path, way, family)) < bound_of(way)
