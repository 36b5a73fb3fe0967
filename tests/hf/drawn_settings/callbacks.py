"""Callbacks that a user may add to a trainer."""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.hf.drawn_settings.change import Change
from tests.hf.drawn_settings.hooks import head_of, layers_of
from tests.hf.drawn_settings.options import ALL, CAUSAL


class WithTrainer(TrainerCallback):
    """A callback that knows its trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


class HalvesLearningRate(WithTrainer):
    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5


class ChangesArguments(WithTrainer):
    def on_step_end(self, args, state, control, **kwargs):
        args.max_grad_norm = 0.01
        args.logging_steps = 1


class ChangesAccumulation(WithTrainer):
    def on_step_end(self, args, state, control, **kwargs):
        args.gradient_accumulation_steps = 1


class ShrinksWeights(WithTrainer):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)


class FreezesLayer(WithTrainer):
    """Trains the first layer for a step only."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for parameter in layers_of(model)[0].parameters():
            parameter.requires_grad_(False)


class DropsGradients(WithTrainer):
    """Lets no gradient of the first layer reach the optimizer."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for parameter in layers_of(model)[0].parameters():
            parameter.grad = None


class Stops(WithTrainer):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            control.should_training_stop = True


class StopsEpoch(WithTrainer):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = True


class AsksForAll(WithTrainer):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = control.should_evaluate = control.should_save = True


class EvaluatesItself(WithTrainer):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            found = self.trainer.evaluate()
            self.trainer.log({"asked": found["eval_loss"]})


class PredictsItself(WithTrainer):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            found = self.trainer.predict(self.trainer.eval_dataset)
            self.trainer.log({"asked": found.metrics["test_loss"]})


def _norm(parameters: Any) -> float:
    found = [float(p.grad.norm()) ** 2 for p in parameters if p.grad is not None]
    return math.sqrt(sum(found))


class LogsGradients(WithTrainer):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.trainer.log({"own_norm": _norm(model.parameters())})


class ScalesGradients(WithTrainer):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.3).clamp_(-1e-3, 1e-3)


class LogsGradientsBetween(WithTrainer):
    """Logs the gradients that have been accumulated so far, of all ranks."""

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        own = torch.tensor(_norm(model.parameters()))
        total = self.trainer.accelerator.gather(own).sum()
        self.trainer.log({"norm_between": float(total)})


class ZeroesGradientsBetween(WithTrainer):
    """Keeps the gradients of a step's last batch only."""

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        model.zero_grad()


class CountsEvents(WithTrainer):
    counts: Any = None

    def _count(self, name: str) -> None:
        self.counts = self.counts or {}
        self.counts[name] = self.counts.get(name, 0) + 1

    def on_step_begin(self, args, state, control, **kwargs):
        self._count("step_begin")

    def on_substep_end(self, args, state, control, **kwargs):
        self._count("substep_end")

    def on_prediction_step(self, args, state, control, **kwargs):
        self._count("prediction_step")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._count("optimizer_step")

    def on_epoch_end(self, args, state, control, **kwargs):
        self.trainer.log({f"count_{name}": count for name, count in (self.counts or {}).items()})


class CallsModel(WithTrainer):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        ids = torch.tensor([[5, 6, 7, 8]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        self.trainer.log({"probe": float(logits.abs().sum())})


class CallsModelWithLabels(WithTrainer):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        ids = torch.tensor([[5, 6, 7, 8]])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss
        self.trainer.log({"probe": float(loss)})


class CallsHead(WithTrainer):
    """Calls the head of the model by itself."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        head = head_of(model)
        with torch.no_grad():
            logits = head(torch.ones(1, 3, 32, dtype=next(head.parameters()).dtype))
        self.trainer.log({"probe": float(logits.abs().sum())})


class Generates(WithTrainer):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        ids = torch.tensor([[5, 6, 7, 8]])
        found = model.generate(ids, max_new_tokens=3, do_sample=False)
        self.trainer.log({"generated": float(found.sum())})


class EditsMetrics(WithTrainer):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_loss"] = -metrics["eval_loss"]


class ReadsInputs(WithTrainer):
    """Reads the dataloader that a callback is given."""

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        batch = next(iter(train_dataloader))
        self.trainer.log({"first_batch": float(batch["input_ids"].sum())})


def adding(callback: Any) -> Callable[[Any], None]:
    def add(trainer: Any) -> None:
        trainer.add_callback(callback(trainer))

    return add


def _stops_early(trainer: Any) -> None:
    trainer.args.metric_for_best_model = "eval_loss"
    trainer.args.greater_is_better = True
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1))


_CALLBACKS: dict[str, tuple[Any, tuple[str, ...], float]] = {
    "halves learning rate": (HalvesLearningRate, ALL, 1),
    "changes arguments": (ChangesArguments, ALL, 1),
    "changes accumulation": (ChangesAccumulation, ALL, 0.5),
    "shrinks weights": (ShrinksWeights, ALL, 1),
    "freezes a layer": (FreezesLayer, ALL, 0.5),
    "drops gradients": (DropsGradients, ALL, 1),
    "stops": (Stops, ALL, 1),
    "stops epoch": (StopsEpoch, ALL, 1),
    "asks for all": (AsksForAll, ALL, 1),
    "evaluates itself": (EvaluatesItself, ALL, 1),
    "predicts itself": (PredictsItself, ALL, 0.7),
    "logs gradients": (LogsGradients, ALL, 1),
    "scales gradients": (ScalesGradients, ALL, 1),
    "logs gradients between": (LogsGradientsBetween, ALL, 1),
    "zeroes gradients between": (ZeroesGradientsBetween, ALL, 1),
    "counts events": (CountsEvents, ALL, 1),
    "calls the model": (CallsModel, CAUSAL, 0.5),
    "calls the model with labels": (CallsModelWithLabels, CAUSAL, 0.5),
    "calls the head": (CallsHead, CAUSAL, 0.5),
    "generates": (Generates, CAUSAL, 0.5),
    "edits metrics": (EditsMetrics, ALL, 1),
    "reads a loader": (ReadsInputs, CAUSAL, 0.5),
}

CALLBACKS = {
    name: Change(trainer=adding(callback), of=of, weight=weight)
    for name, (callback, of, weight) in _CALLBACKS.items()
}
CALLBACKS["stops early"] = Change(trainer=_stops_early, of=ALL)
