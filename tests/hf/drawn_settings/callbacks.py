"""Callbacks that a user may add to a trainer."""

import math
from collections import Counter

import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.hf.drawn_settings.change import Change, recorder, with_callback
from tests.hf.drawn_settings.hooks import head_of, layers_of
from tests.hf.drawn_settings.options import ALL

CALLBACKS: dict[str, Change] = {}
on = recorder(CALLBACKS, "trainer", with_callback)
on_trainer = recorder(CALLBACKS, "trainer")
IDS = torch.tensor([[5, 6, 7, 8]])


@on("on_step_begin", of=ALL)
def halves_learning_rate(trainer, optimizer, **given):
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


@on("on_step_end", of=ALL)
def changes_arguments(trainer, **given):
    trainer.args.max_grad_norm = 0.01
    trainer.args.logging_steps = 1


@on("on_step_end", of=ALL, weight=0.5)
def changes_accumulation(trainer, **given):
    trainer.args.gradient_accumulation_steps = 1


@on("on_step_end", of=ALL)
@torch.no_grad()
def shrinks_weights(trainer, model, **given):
    for parameter in model.parameters():
        parameter.mul_(0.9)


@on("on_step_end", of=ALL, weight=0.5)
def freezes_a_layer(trainer, model, **given):
    """Trains the first layer for a step only."""
    layers_of(model)[0].requires_grad_(False)


@on("on_pre_optimizer_step", of=ALL)
def drops_gradients(trainer, model, **given):
    """Lets no gradient of the first layer reach the optimizer."""
    for parameter in layers_of(model)[0].parameters():
        parameter.grad = None


@on("on_step_end", of=ALL)
def stops(trainer, **given):
    if trainer.state.global_step == 2:
        trainer.control.should_training_stop = True


@on("on_step_end", of=ALL)
def stops_epoch(trainer, **given):
    trainer.control.should_epoch_stop = True


@on("on_step_end", of=ALL)
def asks_for_all(trainer, **given):
    control = trainer.control
    control.should_log = control.should_evaluate = control.should_save = True


@on("on_step_end", of=ALL)
def evaluates_itself(trainer, **given):
    if trainer.state.global_step == 1:
        trainer.log({"asked": trainer.evaluate()["eval_loss"]})


@on("on_step_end", of=ALL, weight=0.7)
def predicts_itself(trainer, **given):
    if trainer.state.global_step == 1:
        found = trainer.predict(trainer.eval_dataset)
        trainer.log({"asked": found.metrics["test_loss"]})


def _norm(parameters):
    found = [float(p.grad.norm()) ** 2 for p in parameters if p.grad is not None]
    return math.sqrt(sum(found))


@on("on_pre_optimizer_step", of=ALL)
def logs_gradients(trainer, model, **given):
    trainer.log({"own_norm": _norm(model.parameters())})


@on("on_pre_optimizer_step", of=ALL)
def scales_gradients(trainer, model, **given):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.3).clamp_(-1e-3, 1e-3)


@on("on_substep_end", of=ALL)
def logs_gradients_between(trainer, model, **given):
    """Logs the gradients that have been accumulated so far, of all ranks."""
    own = torch.tensor(_norm(model.parameters()))
    trainer.log({"norm_between": float(trainer.accelerator.gather(own).sum())})


@on("on_substep_end", of=ALL)
def zeroes_gradients_between(trainer, model, **given):
    """Keeps the gradients of a step's last batch only."""
    model.zero_grad()


@on_trainer(of=ALL)
def counts_events(trainer):
    counts = Counter()

    class CountsEvents(TrainerCallback):
        def on_step_begin(self, *args, **given):
            counts["step_begin"] += 1

        def on_substep_end(self, *args, **given):
            counts["substep_end"] += 1

        def on_prediction_step(self, *args, **given):
            counts["prediction_step"] += 1

        def on_optimizer_step(self, *args, **given):
            counts["optimizer_step"] += 1

        def on_epoch_end(self, *args, **given):
            trainer.log({f"count_{name}": count for name, count in counts.items()})

    trainer.add_callback(CountsEvents())


@on("on_step_end", weight=0.5)
@torch.no_grad()
def calls_the_model(trainer, model, **given):
    trainer.log({"probe": float(model(input_ids=IDS).logits.abs().sum())})


@on("on_step_end", weight=0.5)
@torch.no_grad()
def calls_the_model_with_labels(trainer, model, **given):
    trainer.log({"probe": float(model(input_ids=IDS, labels=IDS).loss)})


@on("on_step_end", weight=0.5)
@torch.no_grad()
def calls_the_head(trainer, model, **given):
    """Calls the head of the model by itself."""
    head = head_of(model)
    logits = head(torch.ones(1, 3, 32, dtype=next(head.parameters()).dtype))
    trainer.log({"probe": float(logits.abs().sum())})


@on("on_step_end", weight=0.5)
def generates(trainer, model, **given):
    found = model.generate(IDS, max_new_tokens=3, do_sample=False)
    trainer.log({"generated": float(found.sum())})


@on("on_evaluate", of=ALL)
def edits_metrics(trainer, metrics, **given):
    metrics["eval_loss"] = -metrics["eval_loss"]


@on("on_train_begin", weight=0.5)
def reads_a_loader(trainer, train_dataloader, **given):
    """Reads the dataloader that a callback is given."""
    batch = next(iter(train_dataloader))
    trainer.log({"first_batch": float(batch["input_ids"].sum())})


@on_trainer(of=ALL)
def stops_early(trainer):
    trainer.args.metric_for_best_model = "eval_loss"
    trainer.args.greater_is_better = True
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
