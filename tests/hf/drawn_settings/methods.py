"""Other methods of a trainer that a user may override, and metrics."""

import numpy as np
import torch
from torch.utils.data import DataLoader, SequentialSampler

from tests.hf.drawn_settings.change import (
    Change,
    clamp_gradients,
    other_labels,
    recorder,
    shifted_ids,
    with_inputs,
    with_result,
)
from tests.hf.drawn_settings.options import ALL

METHODS: dict[str, Change] = {}
override = recorder(METHODS, "methods")
on_inputs = recorder(METHODS, "methods", with_inputs)
on_result = recorder(METHODS, "methods", with_result)

# ---- training_step and preparation


@override(of=("trainer",))
class OwnTrainingStep:
    """Does all that a training step must."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


@on_inputs("training_step", slot="labels")
def training_step_edits_labels(trainer, model, inputs):
    inputs["labels"] = other_labels(inputs["labels"])


@on_result("training_step", of=ALL)
def training_step_clamps_gradients(trainer, loss, model, *args):
    clamp_gradients(model)
    return loss


@on_result("training_step", of=ALL)
def training_step_reports_more(trainer, loss, *args):
    return loss * 2


@on_result("training_step", of=ALL)
def training_step_drops_a_step(trainer, loss, model, *args):
    if trainer.state.global_step == 1:
        model.zero_grad()
    return loss


@on_result("_prepare_inputs", slot="labels")
def prepares_labels(trainer, inputs, given):
    if "labels" in inputs:
        inputs["labels"] = other_labels(inputs["labels"])
    return inputs


@on_result("_prepare_inputs")
def prepares_ids(trainer, inputs, given):
    if "input_ids" in inputs:
        inputs["input_ids"] = shifted_ids(inputs["input_ids"])
    return inputs


@on_result("get_batch_samples", of=ALL, weight=0.5)
def batches_reversed(trainer, samples, *args):
    batches, items = samples
    return batches[::-1], items


@on_result("get_batch_samples")
def items_doubled(trainer, samples, *args):
    batches, items = samples
    return batches, items * 2


@override(weight=0.5)
class OwnItems:
    def _get_num_items_in_batch(self, batch_samples, device):
        return torch.tensor(100, device=device)


# ---- optimizer, schedule, norm


@override(of=ALL)
class OwnOptimizer:
    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.01},
                {"params": [p for p in trained if p.ndim == 1], "lr": 0.02},
            ]
            groups = [group for group in groups if group["params"]]
            self.optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        return self.optimizer


@override(of=ALL)
class OwnScheduler:
    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: 1 / (1 + step * num_training_steps)
        )
        return self.lr_scheduler


@override(of=ALL)
class OwnDecay:
    def get_decay_parameter_names(self, model):
        return [name for name, _ in model.named_parameters() if "q_proj" in name]


@override(of=ALL)
class OwnClipping:
    def _clip_grad_norm(self, model):
        clamp_gradients(model)
        return super()._clip_grad_norm(model)


# ---- loaders


@override(slot="data")
class OwnLoader:
    def get_train_dataloader(self):
        loader = DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            sampler=SequentialSampler(self.train_dataset),
            collate_fn=self.data_collator,
        )
        return self.accelerator.prepare(loader)


@override(slot="data")
class UnpreparedLoader:
    """A loader that accelerate does not know: each rank takes every second batch."""

    def get_train_dataloader(self):
        rows = list(self.train_dataset)[self.args.process_index :: 2]
        return DataLoader(rows, batch_size=self._train_batch_size, collate_fn=self.data_collator)


@override(slot="data", of=ALL)
class OwnSampler:
    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return list(range(len(dataset)))[::-1]


@override()
class OwnEvaluationLoader:
    def get_eval_dataloader(self, eval_dataset=None):
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.accelerator.prepare(
            DataLoader(dataset, batch_size=2, collate_fn=self.data_collator)
        )


# ---- logs, evaluation, checkpoints


@override(of=ALL)
class OwnLog:
    def log(self, logs, *args, **kwargs):
        logs["log_of_step"] = self.state.global_step * 1.5
        if "loss" in logs:
            logs["perplexity"] = float(np.exp(logs["loss"]))
        return super().log(logs, *args, **kwargs)


@on_result("evaluate", of=ALL)
def own_evaluate(trainer, metrics, *args, **kwargs):
    metrics["eval_twice"] = 2 * metrics.get("eval_loss", 0.0)
    trainer.log({"eval_twice": metrics["eval_twice"]})
    return metrics


@on_result("prediction_step", slot="prediction", of=ALL)
def prediction_doubled(trainer, found, *args, **kwargs):
    loss, logits, labels = found
    return loss * 2, logits, labels


@override(slot="prediction")
class OwnPrediction:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            outputs = model(**self._prepare_inputs(inputs))
        return outputs.loss.detach() * 3, None, None


@on_result("evaluation_loop", of=ALL)
def own_evaluation_loop(trainer, output, dataloader, *args, **kwargs):
    output.metrics["eval_batches"] = len(dataloader)
    output.metrics["eval_samples_seen"] = output.num_samples
    return output


@override(of=("trainer",))
class OwnFlops:
    """Counts the tokens of its batches, without padding."""

    def floating_point_ops(self, inputs):
        tokens = int(inputs.get("attention_mask", inputs["input_ids"] > -1).sum())
        self.state.seen = getattr(self.state, "seen", 0) + tokens
        return 0


@on_result("_save_checkpoint", of=ALL)
def own_checkpoint(trainer, nothing, *args, **kwargs):
    trainer.log({"saved": trainer.state.global_step})


@on_result("save_model", of=ALL)
def own_save(trainer, nothing, *args, **kwargs):
    trainer.log({"saved_model": trainer.state.global_step})


@override()
class CountsRows:
    """Counts the rows of its batches, and logs them with the loss."""

    rows = 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            self.rows += len(inputs["input_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs, *args, **kwargs):
        return super().log({**logs, "rows": self.rows}, *args, **kwargs)


# ---- metrics


def best_tokens(logits, labels):
    return first_of(logits).argmax(-1)


def first_of(logits):
    return logits[0] if isinstance(logits, tuple) else logits


_counts = {"right": 0, "all": 0, "sum": 0}  # of the batches of an evaluation so far


def token_metrics(given, compute_result=True):
    """Accuracy of tokens and a sum that every prediction counts in; of batches one by one, too."""
    batches = zip(_arrays(given.predictions), _arrays(given.label_ids), strict=True)
    for found, wanted in batches:
        keep = wanted[:, 1:] != -100
        found, wanted = found[:, :-1][keep], wanted[:, 1:][keep]
        _counts["right"] += int((found == wanted).sum())
        _counts["all"] += len(wanted)
        _counts["sum"] += int(found.sum())
    if not compute_result:
        return {}
    result = {"accuracy": _counts["right"] / _counts["all"], "sum": _counts["sum"]}
    _counts.update(dict.fromkeys(_counts, 0))
    return result


def _arrays(values):
    """What an evaluation gives: one array or several."""
    return [np.asarray(value) for value in (values if isinstance(values, list) else [values])]


def whole_logits_metrics(given, compute_result=True):
    return {"size": float(np.abs(np.asarray(first_of(given.predictions))).mean())}


TOKEN_METRICS = {"compute_metrics": token_metrics, "preprocess_logits_for_metrics": best_tokens}
METHODS["token metrics"] = Change(arguments=TOKEN_METRICS, slot="metrics", weight=2)
METHODS["whole logits metrics"] = Change(
    arguments={"compute_metrics": whole_logits_metrics}, slot="metrics", weight=0.5
)
