"""What a user may override on a trainer: every method is on the list, those that the list says are
called are called as often as by the plain Trainer, and the others are refused by name."""

from collections import Counter
from functools import partial, wraps

import pytest
import torch
import yaml
from transformers import DataCollatorWithFlattening, Trainer
from trl import DPOTrainer, GRPOTrainer, SFTTrainer
from trl.trainer.base_trainer import _BaseTrainer

from hf_flexseq import FlexSeqArguments, FlexSeqCallback, FlexSeqTrainer
from hf_flexseq.hf.model.loss_kinds import METHODS_OF_LOSS
from hf_flexseq.steps.users_code import is_known, users_method
from tests.hf.drawn_settings.methods import OwnTrainingStep
from tests.hf.plain import dataset, padded
from tests.hf.test_own_losses import Focal
from tests.hf.tiny import refused, tiny_llama, tiny_model
from tests.hf.trainers import distance, trained, trainer_of, weights_apart, weights_of
from tests.programs import ROOT

# Methods that answer a question: how often they are asked changes nothing.
QUESTIONS = (
    "_get_output_dir",
    "_set_signature_columns_if_needed",
    "get_cp_size",
    "get_sp_size",
    "get_total_train_batch_size",
    "get_tp_size",
    "is_local_process_zero",
    "is_world_process_zero",
)

RULES = yaml.safe_load((ROOT / "scripts/pages/overrides.yaml").read_text(encoding="utf-8"))

OPTIONS = {"max_tokens_per_rank": 61, "cost_model": "estimate", "lookahead": 0}


def functions_of(*classes):
    """The names of the methods that some classes define."""
    names = set()
    for cls in classes:
        for name, member in vars(cls).items():
            is_special = name.startswith("__") and name != "__init__"
            if callable(member) and not is_special and not isinstance(member, type):
                names.add(name)
    return names


def make(base, folder, *, how="mixin", model=None, collator=padded, callbacks=(), **options):
    """A trainer of the user's class `base`, behind the mixin or switched on by a callback."""
    defaults = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    return trainer_of(
        base,
        folder,
        flexseq=None if how == "stock" else OPTIONS,
        callback=how == "callback",
        batch=4,
        accumulation=options.pop("gradient_accumulation_steps", 2),
        model=model or tiny_llama(),
        eval_dataset=dataset(4),
        data_collator=collator,
        callbacks=list(callbacks),
        **{**defaults, **options},
    )


# ---- the list


@pytest.mark.parametrize("trainer", [Trainer, SFTTrainer, DPOTrainer, GRPOTrainer])
def test_every_rule_names_methods_that_a_trainer_has(trainer):
    methods = functions_of(Trainer, _BaseTrainer, SFTTrainer, DPOTrainer, GRPOTrainer)
    named = [name for rule in RULES for name in rule["names"]]
    assert len(named) == len(set(named)), "a method has one rule"
    assert set(METHODS_OF_LOSS) <= set(named) <= methods
    for name in functions_of(trainer):
        assert is_known(getattr(trainer, name)), name


def counting(base):
    """A subclass that counts the calls of every method of `base`, and a counter of them."""
    calls = Counter()

    def counted(name, method):
        @wraps(method)
        def call(*args, **kwargs):
            calls[name] += 1
            return method(*args, **kwargs)

        vars(call).clear()  # it wraps nothing: it is the user's own function
        call.__module__ = "users"
        return call

    skipped = {name for rule in RULES for name in rule["names"]} | {"__init__"}
    members = {}
    for name in functions_of(base) - skipped:
        if not isinstance(vars(base)[name], staticmethod | classmethod):
            members[name] = counted(name, getattr(base, name))
    return type("Counting", (base,), members), calls


@pytest.mark.slow
def test_what_is_called_is_called_as_often_as_by_the_plain_trainer(tmp_path):
    """Every method without a rule, in training with evaluations, a checkpoint and a prediction."""
    found = {}
    for how in ("stock", "mixin"):
        cls, calls = counting(Trainer)
        trainer = make(cls, tmp_path / how, how=how, save_strategy="steps", save_steps=2)
        assert users_method(trainer, "log") == "Counting.log"
        trainer.train()
        trainer.evaluate()
        trainer.save_model()
        trainer.save_state()
        found[how] = calls
    for name in QUESTIONS:
        for calls in found.values():
            assert calls.pop(name), name
    assert found["mixin"] == found["stock"]
    assert len(found["stock"]) > 40, "most methods take part in a training"


# ---- what is refused


def overriding(*names, base=Trainer):
    def override(name):
        def method(self, *args, **kwargs):
            return getattr(super(cls, self), name)(*args, **kwargs)

        return method

    cls = type("Mine", (base,), {name: override(name) for name in names})
    return cls


@pytest.mark.parametrize("base", [Trainer, Focal])
def test_an_override_that_would_be_ignored_is_refused_by_name(tmp_path, base):
    let_through = []
    for rule in RULES:
        for name in filter(partial(hasattr, Trainer), rule["names"]):
            if rule["standing"] != "refused":
                let_through.append(name)
                continue
            for how in ("mixin", "callback"):
                with refused(rf"Mine\.{name} would") as said:
                    make(overriding(name, base=base), tmp_path, how=how)
                assert rule["why"] in str(said.value)
                assert rule["instead"] in str(said.value)
    for how in ("mixin", "callback"):
        assert make(overriding(*let_through, base=base), tmp_path, how=how)


def test_a_function_on_one_trainer_or_in_front_of_the_mixin_is_refused_too(tmp_path):
    with refused(r"Mine\.get_batch_samples would be ignored"):
        make(overriding("get_batch_samples", base=FlexSeqTrainer), tmp_path)
    trainer = make(Trainer, tmp_path, how="stock")
    trainer.get_batch_samples = lambda *args, **kwargs: None
    with refused("get_batch_samples of this .*Trainer would be ignored"):
        trainer.add_callback(FlexSeqCallback(trainer, FlexSeqArguments(**OPTIONS)))


# ---- a step in front of the mixin's


def step_of(cls):
    """A `training_step` that names the class whose step it calls."""

    def training_step(self, *given):
        return cls.training_step(self, *given)

    return training_step


STEPS_IN_FRONT = {
    "whole": OwnTrainingStep.training_step,
    "Trainer's": step_of(Trainer),
    "FlexSeqTrainer's": step_of(FlexSeqTrainer),
}


@pytest.mark.parametrize("step", STEPS_IN_FRONT.values(), ids=STEPS_IN_FRONT)
def test_a_step_that_does_not_call_the_mixins_runs_inside_of_a_planned_one(tmp_path, step):
    stock = make(Trainer, tmp_path / "stock", how="stock")
    stock.train()
    mine = type("Mine", (FlexSeqTrainer,), {"training_step": step})
    trainer = make(mine, tmp_path / "ours")
    assert type(trainer).__name__ == "Mine"
    trainer.train()
    assert "flexseq/micro_batches" in trainer.state.log_history[0]
    assert distance(weights_of(stock.model), weights_of(trainer.model)) < 1e-8


class AdversarialStep:
    """Perturbs the embedding by its gradient, and adds the gradient of this other loss."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        embedding = model.get_input_embeddings().weight
        if embedding.grad is not None:
            embedding.data.add_(0.01 * embedding.grad.sign())
        super().training_step(model, inputs, num_items_in_batch)
        return loss


class AdversarialStepByHand:
    """As `AdversarialStep`, without the step behind."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = self._prepare_inputs(inputs)
        embedding = model.get_input_embeddings().weight
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        embedding.data.add_(0.01 * embedding.grad.sign())
        return loss.detach()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (AdversarialStep, "AdversarialStep.training_step runs a batch again, after perturbing"),
        (AdversarialStepByHand, "AdversarialStepByHand.training_step uses gradients before"),
    ],
)
def test_a_step_that_needs_the_gradients_of_one_batch_is_refused(tmp_path, methods, message):
    trainer = make(type("Mine", (methods, FlexSeqTrainer), {}), tmp_path)
    with refused(message):
        trainer.train()


class RoundsWeights:
    """Computes the loss with rounded weights, as networks of few bits are trained."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        weights = [one.data for one in model.parameters()]
        kept = [one.clone() for one in weights]
        for one in weights:
            one.copy_((one * 64).round() / 64)
        loss = super().training_step(model, inputs, num_items_in_batch)
        for one, former in zip(weights, kept, strict=True):
            one.copy_(former)
        return loss


class ClampsWeights:
    """Keeps weights small after every batch."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        for one in model.parameters():
            one.data.clamp_(-0.05, 0.05)
        return loss


class LooksAround:
    """Scales the loss by that of weights beside the present ones."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        if return_outputs:  # in an evaluation
            return super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = super().compute_loss(model, inputs, **kwargs)
        weight = model.get_input_embeddings().weight.data
        weight.add_(0.1)
        with torch.no_grad():
            beside = model(**inputs).loss
        weight.sub_(0.1)
        return loss * beside


@pytest.mark.parametrize("changes", [RoundsWeights, ClampsWeights, AdversarialStep])
def test_weights_that_change_within_a_step_are_refused(tmp_path, changes):
    behind = type("Mine", (changes, Trainer), {})
    message = rf"{changes.__name__}\.training_step (changes weights while|uses gradients)"
    with refused(message):
        make(behind, tmp_path).train()
    if changes is ClampsWeights:
        with refused(message):
            make(type("Mine", (changes, FlexSeqTrainer), {}), tmp_path).train()


@pytest.mark.parametrize(
    ("changes", "base"),
    [(RoundsWeights, FlexSeqTrainer), (LooksAround, FlexSeqTrainer), (LooksAround, Trainer)],
)
def test_weights_that_are_brought_back_around_a_step_train_alike(tmp_path, changes, base):
    stock = make(type("Mine", (changes, Trainer), {}), tmp_path / "stock", how="stock")
    ours = make(type("Mine", (changes, base), {}), tmp_path / "ours")
    for trainer in (stock, ours):
        trainer.train()
    assert distance(weights_of(stock.model), weights_of(ours.model)) < 1e-8


def test_a_step_on_one_trainer_is_refused_also_after_it_was_made(tmp_path):
    trainer = make(FlexSeqTrainer, tmp_path)
    trainer.training_step = partial(OwnTrainingStep.training_step, trainer)
    with refused("training_step of this FlexSeqTrainer would run instead of planned steps"):
        trainer.train()


def test_outside_of_training_batches_are_padded_and_a_step_is_refused(tmp_path):
    stock, trainer = (make(Trainer, tmp_path, how=how) for how in ("stock", "mixin"))
    wanted, found = (next(iter(one.get_train_dataloader())) for one in (stock, trainer))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    with pytest.raises(RuntimeError, match=r"trainer\.train\(\) has planned: call compute_loss"):
        trainer.training_step(trainer.model, found)
    assert float(trainer.compute_loss(trainer.model, found)) > 0


def masking(collator):
    """Another collator, which leaves out even labels."""

    def collate(examples):
        batch = dict(collator(examples))
        odd = batch["labels"] % 2 == 1
        return {**batch, "labels": torch.where(odd, batch["labels"], -100)}

    return collate


@pytest.mark.parametrize(
    "collator_of",
    [lambda trainer: masking(padded), lambda trainer: masking(trainer.data_collator)],
    ids=["another one", "around the trainer's"],
)
def test_a_collator_that_a_script_sets_on_the_trainer_is_used(tmp_path, collator_of):
    runs = []
    for how in ("stock", "mixin"):
        trainer = make(Trainer, tmp_path / how, how=how)
        trainer.data_collator = collator_of(trainer)
        runs.append(trained(trainer))
    assert "flexseq/micro_batches" in trainer.state.log_history[0]
    assert weights_apart(*runs) < 1e-6


def test_a_function_put_on_the_class_of_a_library_is_noticed(tmp_path, monkeypatch):
    stock = Trainer.get_batch_samples
    monkeypatch.setattr(Trainer, "get_batch_samples", lambda *args: stock(*args))
    with refused(r"Trainer\.get_batch_samples would be"):
        make(Trainer, tmp_path)


def test_a_pipeline_refuses_what_its_stages_do_themselves(tmp_path):
    args = FlexSeqArguments(**OPTIONS, pipeline_parallel_size=2)
    for name in ("_clip_grad_norm", "_save"):
        trainer = make(overriding(name), tmp_path, how="stock")
        with refused(rf"Mine\.{name} would not be called"):
            FlexSeqCallback(trainer, args)
    for name in ("training_step", "compute_loss", "_prepare_inputs"):
        trainer = make(overriding(name), tmp_path, how="stock")
        with refused(rf"not support Mine\.{name} with pipeline_parallel_size=2"):
            FlexSeqCallback(trainer, args)
    trainer = make(Trainer, tmp_path, how="stock")
    trainer.model.lm_head.register_forward_hook(lambda *args: None)
    with refused("lambda> on lm_head with pipeline_parallel_size=2"):
        FlexSeqCallback(trainer, args)


# ---- what is said


def test_documents_that_see_each_other_under_the_plain_trainer_are_named_in_the_log(
    tmp_path, caplog
):
    convolution = {"layer_types": ["conv", "full_attention"]}
    # transformers masks the last one's documents by their positions
    for name, options in (("GptOss", {}), ("Lfm2", convolution), ("Llama", {})):
        caplog.clear()
        model = tiny_model(name, vocab_size=64, **options)
        make(Trainer, tmp_path, model=model, collator=DataCollatorWithFlattening())
        said = [r.message for r in caplog.records if "documents of a packed row" in r.message]
        assert len(said) == (name != "Llama"), said


@pytest.mark.parametrize(("counts_items", "accumulation"), [(False, 2), (False, 1), (True, 2)])
def test_a_mean_of_batch_means_under_the_plain_trainer_is_named_in_the_log(
    tmp_path, caplog, counts_items, accumulation
):
    model = tiny_llama()
    model.accepts_loss_kwargs = counts_items  # as a class of images may say
    make(Trainer, tmp_path, model=model, gradient_accumulation_steps=accumulation)
    said = [r.message for r in caplog.records if "averages the mean losses" in r.message]
    assert len(said) == (not counts_items and accumulation > 1), said
