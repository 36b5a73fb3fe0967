"""Other methods of a trainer that a user may override, and metrics."""

import numpy as np
import torch
from torch.utils.data import DataLoader, SequentialSampler

from tests.hf.drawn_settings.change import Change, other_labels, shifted_ids
from tests.hf.drawn_settings.options import ALL

# ---- training_step and preparation


class OwnStep:
    """Does all that a training step must."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class StepEditsLabels:
    def training_step(self, model, inputs, *args, **kwargs):
        inputs["labels"] = other_labels(inputs["labels"])
        return super().training_step(model, inputs, *args, **kwargs)


class StepClampsGradients:
    """Clamps the gradients after each backward."""

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 1e-3)
        return loss


class StepReportsMore:
    """Reports another loss than it trains on."""

    def training_step(self, model, inputs, *args, **kwargs):
        return super().training_step(model, inputs, *args, **kwargs) * 2


class StepSkips:
    """Leaves a step without gradients."""

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.state.global_step == 1:
            model.zero_grad()
        return loss


class PreparesLabels:
    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        if "labels" in inputs:
            inputs["labels"] = other_labels(inputs["labels"])
        return inputs


class PreparesIds:
    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        if "input_ids" in inputs:
            inputs["input_ids"] = shifted_ids(inputs["input_ids"])
        return inputs


class BatchesReversed:
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches[::-1], items


class ItemsDoubled:
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, items * 2


class OwnItems:
    def _get_num_items_in_batch(self, batch_samples, device):
        return torch.tensor(100, device=device)


# ---- optimizer, schedule, norm


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


class OwnScheduler:
    def create_scheduler(self, num_training_steps, optimizer=None):
        optimizer = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 / (1 + step * num_training_steps)
        )
        return self.lr_scheduler


class OwnDecay:
    def get_decay_parameter_names(self, model):
        return [name for name, _ in model.named_parameters() if "q_proj" in name]


class OwnClipping:
    def _clip_grad_norm(self, model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 1e-3)
        return super()._clip_grad_norm(model)


# ---- loaders


class OwnLoader:
    def get_train_dataloader(self):
        loader = DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            sampler=SequentialSampler(self.train_dataset),
            collate_fn=self.data_collator,
        )
        return self.accelerator.prepare(loader)


class UnpreparedLoader:
    """A loader that accelerate does not know: each rank takes every second batch."""

    def get_train_dataloader(self):
        rows = list(self.train_dataset)[self.args.process_index :: 2]
        return DataLoader(rows, batch_size=self._train_batch_size, collate_fn=self.data_collator)


class OwnSampler:
    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return list(range(len(dataset)))[::-1]


class OwnEvalLoader:
    def get_eval_dataloader(self, eval_dataset=None):
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.accelerator.prepare(
            DataLoader(dataset, batch_size=2, collate_fn=self.data_collator)
        )


# ---- logs, evaluation, checkpoints


class OwnLog:
    def log(self, logs, *args, **kwargs):
        logs["log_of_step"] = self.state.global_step * 1.5
        if "loss" in logs:
            logs["perplexity"] = float(np.exp(logs["loss"]))
        return super().log(logs, *args, **kwargs)


class OwnEvaluate:
    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        metrics["eval_twice"] = 2 * metrics.get("eval_loss", 0.0)
        self.log({"eval_twice": metrics["eval_twice"]})
        return metrics


class PredictionDoubled:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys=ignore_keys
        )
        return loss * 2, logits, labels


class OwnPrediction:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs.loss.detach() * 3, None, None


class OwnEvaluationLoop:
    def evaluation_loop(self, dataloader, description, *args, **kwargs):
        output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        output.metrics["eval_batches"] = len(dataloader)
        output.metrics["eval_samples_seen"] = output.num_samples
        return output


class OwnFlops:
    """Counts the tokens of its batches, without padding."""

    def floating_point_ops(self, inputs):
        tokens = int(inputs.get("attention_mask", inputs["input_ids"] > -1).sum())
        self.state.seen = getattr(self.state, "seen", 0) + tokens
        return 0


class OwnCheckpoint:
    def _save_checkpoint(self, model, trial, *args, **kwargs):
        super()._save_checkpoint(model, trial, *args, **kwargs)
        self.log({"saved": self.state.global_step})


class OwnSave:
    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        self.log({"saved_model": self.state.global_step})


class LogsLossParts:
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
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.argmax(-1)


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
    values = values if isinstance(values, list) else [values]
    return [np.asarray(value) for value in values]


def whole_logits_metrics(given, compute_result=True):
    logits = given.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"size": float(np.abs(np.asarray(logits)).mean())}


METHODS: dict[str, Change] = {
    "own training_step": Change(methods=OwnStep, of=("trainer",)),
    "training_step edits labels": Change(methods=StepEditsLabels, slot="labels"),
    "training_step clamps gradients": Change(methods=StepClampsGradients, of=ALL),
    "training_step reports more": Change(methods=StepReportsMore, of=ALL),
    "training_step drops a step": Change(methods=StepSkips, of=ALL),
    "prepares labels": Change(methods=PreparesLabels, slot="labels"),
    "prepares ids": Change(methods=PreparesIds),
    "batches reversed": Change(methods=BatchesReversed, of=ALL, weight=0.5),
    "items doubled": Change(methods=ItemsDoubled),
    "own items": Change(methods=OwnItems, weight=0.5),
    "own optimizer": Change(methods=OwnOptimizer, of=ALL),
    "own scheduler": Change(methods=OwnScheduler, of=ALL),
    "own decay": Change(methods=OwnDecay, of=ALL),
    "own clipping": Change(methods=OwnClipping, of=ALL),
    "own loader": Change(methods=OwnLoader, slot="data"),
    "unprepared loader": Change(methods=UnpreparedLoader, slot="data"),
    "own sampler": Change(methods=OwnSampler, slot="data", of=ALL),
    "own evaluation loader": Change(methods=OwnEvalLoader),
    "own log": Change(methods=OwnLog, of=ALL),
    "own evaluate": Change(methods=OwnEvaluate, of=ALL),
    "prediction doubled": Change(methods=PredictionDoubled, slot="prediction", of=ALL),
    "own prediction": Change(methods=OwnPrediction, slot="prediction"),
    "own evaluation loop": Change(methods=OwnEvaluationLoop, of=ALL),
    "own flops": Change(methods=OwnFlops, of=("trainer",)),
    "own checkpoint": Change(methods=OwnCheckpoint, of=ALL),
    "own save": Change(methods=OwnSave, of=ALL),
    "counts rows": Change(methods=LogsLossParts),
    "token metrics": Change(
        arguments={
            "compute_metrics": token_metrics,
            "preprocess_logits_for_metrics": best_tokens,
        },
        slot="metrics",
        weight=2,
    ),
    "whole logits metrics": Change(
        arguments={"compute_metrics": whole_logits_metrics}, slot="metrics", weight=0.5
    ),
}
