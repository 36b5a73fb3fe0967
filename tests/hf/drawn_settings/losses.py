"""Losses of a user's own: overrides of compute_loss, and compute_loss_func."""

from torch.nn import functional as F

from tests.hf.drawn_settings.change import Change, other_labels, shifted_ids
from tests.hf.drawn_settings.options import ALL
from tests.hf.test_own_losses import figures_of, focal_loss
from tests.hf.test_trainer import padded


class LossWithoutItems:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class LossWithItems:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        items = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs, **items)
        loss = outputs.loss
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class LossScaled:
    def compute_loss(self, model, inputs, *args, **kwargs):
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if isinstance(found, tuple):
            return found[0] * 0.5, found[1]
        return found * 0.5


class LossByStep:
    """Weights the loss by the progress of training."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            loss = loss / (1 + self.state.global_step)
        return (loss, outputs) if return_outputs else loss


class LossWithPenalty:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        trained = [p for p in model.parameters() if p.requires_grad]
        loss = loss + 1e-3 * sum(p.pow(2).sum() for p in trained)
        return (loss, {"loss": loss}) if return_outputs else loss


class LossFlooded:
    """Keeps the loss of each batch above a level."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss = (loss - 1).abs() + 1
        return (loss, outputs) if return_outputs else loss


class LossByRows:
    """Weights the loss by the number of rows of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            loss = loss * len(inputs["input_ids"])
        return (loss, outputs) if return_outputs else loss


class LabelsInPlace:
    def compute_loss(self, model, inputs, *args, **kwargs):
        labels = inputs["labels"]
        labels[labels == 5] = 6
        return super().compute_loss(model, inputs, *args, **kwargs)


class LabelsByCopy:
    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs = {**inputs, "labels": other_labels(inputs["labels"])}
        return super().compute_loss(model, inputs, *args, **kwargs)


class LabelsMasked:
    """Masks the targets of common tokens."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            labels = inputs["labels"]
            inputs["labels"] = labels.masked_fill(labels < 20, -100)
        return super().compute_loss(model, inputs, *args, **kwargs)


class IdsChanged:
    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["input_ids"] = shifted_ids(inputs["input_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


class FirstTokenReplaced:
    """Replaces the first token of each row."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        ids = inputs["input_ids"].clone()
        ids[:, 0] = 1
        return super().compute_loss(model, {**inputs, "input_ids": ids}, *args, **kwargs)


class ReadsColumn:
    """Replaces the tokens that a column of the batch says."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        keep = inputs.pop("keep", None)
        if keep is not None:
            inputs["input_ids"] = inputs["input_ids"].masked_fill(keep == 0, 2)
        return super().compute_loss(model, inputs, *args, **kwargs)


def with_column(examples):
    """A batch with a further column, of tokens."""
    batch = padded(examples)
    return {**batch, "keep": (batch["input_ids"] % 4 > 0).long()}


class WithoutMask:
    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs.pop("attention_mask", None)
        return super().compute_loss(model, inputs, *args, **kwargs)


class LossOfLogits:
    """Adds a term of the logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss = loss + 1e-3 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class LossWithoutLabels:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class LossOfHiddenStates:
    """Adds a term of the hidden states."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        items = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs, **items, output_hidden_states=True)
        loss = outputs.loss * self.accelerator.num_processes
        loss = loss + 1e-3 * outputs.hidden_states[-1].pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class TwoForwards:
    """Averages the loss of two calls of the model."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        found = super().compute_loss(model, {**inputs}, *args, **kwargs)
        other = super().compute_loss(model, {**inputs}, *args, **kwargs)
        if isinstance(found, tuple):
            return (found[0] + other[0]) / 2, found[1]
        return (found + other) / 2


class LossOnSamples:
    flexseq_loss_on_whole_samples = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        log_probs, entropy = figures_of(outputs, inputs["labels"])
        items = num_items_in_batch
        if items is None:
            items = (inputs["labels"][:, 1:] != -100).sum()
        loss = -(log_probs.sum() + 0.1 * entropy.sum()) / items
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def loss_func(outputs, labels, num_items_in_batch=None):
    """A focal loss, also of an evaluation, which has no count of items."""
    if num_items_in_batch is None:
        num_items_in_batch = (labels[:, 1:] != -100).sum()
    return focal_loss(outputs, labels, num_items_in_batch)


def loss_func_of_logits(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten())


LOSSES: dict[str, Change] = {
    "loss without items": Change(methods=LossWithoutItems, slot="loss"),
    "loss with items": Change(methods=LossWithItems, slot="loss", of=("trainer",)),
    "loss scaled": Change(methods=LossScaled, of=ALL),
    "loss by step": Change(methods=LossByStep, of=ALL),
    "penalty": Change(methods=LossWithPenalty),
    "flooded": Change(methods=LossFlooded, of=ALL),
    "loss by rows": Change(methods=LossByRows),
    "labels in place": Change(methods=LabelsInPlace, slot="labels"),
    "labels by copy": Change(methods=LabelsByCopy, slot="labels"),
    "labels masked": Change(methods=LabelsMasked, slot="labels"),
    "ids changed": Change(methods=IdsChanged),
    "first token replaced": Change(methods=FirstTokenReplaced, weight=0.5),
    "reads a column": Change(
        methods=ReadsColumn, arguments={"data_collator": with_column}, of=("trainer",)
    ),
    "without mask": Change(methods=WithoutMask, of=("trainer",)),
    "loss of logits": Change(methods=LossOfLogits, slot="loss", weight=0.5),
    "loss without labels": Change(methods=LossWithoutLabels, slot="loss", weight=0.5),
    "loss of hidden states": Change(methods=LossOfHiddenStates, slot="loss", weight=0.5),
    "two forwards": Change(methods=TwoForwards, of=("trainer", "sequences")),
    "loss on samples": Change(methods=LossOnSamples, slot="loss", of=("trainer",)),
    "compute_loss_func": Change(
        arguments={"compute_loss_func": loss_func}, slot="loss", of=("trainer",)
    ),
    "compute_loss_func of logits": Change(
        arguments={"compute_loss_func": loss_func_of_logits}, slot="loss", weight=0.5
    ),
}
