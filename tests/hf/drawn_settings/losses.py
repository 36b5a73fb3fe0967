"""Losses of a user's own: overrides of compute_loss, and compute_loss_func."""

from torch.nn import functional as F

from tests.hf.drawn_settings.change import (
    Change,
    other_labels,
    recorder,
    shifted_ids,
    with_inputs,
    with_loss,
    with_own_loss,
)
from tests.hf.drawn_settings.options import ALL
from tests.hf.plain import padded
from tests.hf.test_own_losses import figures_of, focal_loss

LOSSES: dict[str, Change] = {}
override = recorder(LOSSES, "methods")
on_inputs = recorder(LOSSES, "methods", lambda function: with_inputs(function, "compute_loss"))
on_loss = recorder(LOSSES, "methods", with_loss)
own_loss = recorder(LOSSES, "methods", with_own_loss)


def items_given(items):
    return {} if items is None else {"num_items_in_batch": items}


@own_loss(slot="loss")
def loss_without_items(trainer, model, inputs, items):
    outputs = model(**inputs)
    return outputs.loss, outputs


@own_loss(slot="loss", of=("trainer",))
def loss_with_items(trainer, model, inputs, items):
    outputs = model(**inputs, **items_given(items))
    ranks = 1 if items is None else trainer.accelerator.num_processes
    return outputs.loss * ranks, outputs


@override(of=ALL)
class LossScaled:
    def compute_loss(self, model, inputs, *args, **kwargs):
        found = super().compute_loss(model, inputs, *args, **kwargs)
        return (found[0] * 0.5, found[1]) if isinstance(found, tuple) else found * 0.5


@on_loss(of=ALL)
def loss_by_step(trainer, model, inputs, loss, outputs):
    """Weights the loss by the progress of training."""
    return loss / (1 + trainer.state.global_step) if model.training else loss


@on_loss()
def penalty(trainer, model, inputs, loss, outputs):
    return loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters() if p.requires_grad)


@on_loss(of=ALL)
def flooded(trainer, model, inputs, loss, outputs):
    """Keeps the loss of each batch above a level."""
    return (loss - 1).abs() + 1


@on_loss()
def loss_by_rows(trainer, model, inputs, loss, outputs):
    """Weights the loss by the number of rows of the batch."""
    return loss * len(inputs["input_ids"]) if model.training else loss


@on_inputs(slot="labels")
def labels_in_place(trainer, model, inputs):
    inputs["labels"][inputs["labels"] == 5] = 6


@on_inputs(slot="labels")
def labels_by_copy(trainer, model, inputs):
    return {**inputs, "labels": other_labels(inputs["labels"])}


@on_inputs(slot="labels")
def labels_masked(trainer, model, inputs):
    """Masks the targets of common tokens."""
    if model.training:
        inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] < 20, -100)


@on_inputs()
def ids_changed(trainer, model, inputs):
    inputs["input_ids"] = shifted_ids(inputs["input_ids"])


@on_inputs(weight=0.5)
def first_token_replaced(trainer, model, inputs):
    ids = inputs["input_ids"].clone()
    ids[:, 0] = 1
    return {**inputs, "input_ids": ids}


def with_column(examples):
    """A batch with a further column, of tokens."""
    batch = padded(examples)
    return {**batch, "keep": (batch["input_ids"] % 4 > 0).long()}


@on_inputs(of=("trainer",), arguments={"data_collator": with_column})
def reads_a_column(trainer, model, inputs):
    """Replaces the tokens that a column of the batch says."""
    keep = inputs.pop("keep", None)
    if keep is not None:
        inputs["input_ids"] = inputs["input_ids"].masked_fill(keep == 0, 2)


@on_inputs(of=("trainer",))
def without_mask(trainer, model, inputs):
    inputs.pop("attention_mask", None)


@on_loss(slot="loss", weight=0.5)
def loss_of_logits(trainer, model, inputs, loss, outputs):
    return loss + 1e-3 * outputs.logits.pow(2).mean()


@own_loss(slot="loss", weight=0.5)
def loss_without_labels(trainer, model, inputs, items):
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten()), outputs


@own_loss(slot="loss", weight=0.5)
def loss_of_hidden_states(trainer, model, inputs, items):
    outputs = model(**inputs, **items_given(items), output_hidden_states=True)
    loss = outputs.loss * trainer.accelerator.num_processes
    return loss + 1e-3 * outputs.hidden_states[-1].pow(2).mean(), outputs


@override(of=("trainer", "sequences"))
class TwoForwards:
    """Averages the loss of two calls of the model."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        found = super().compute_loss(model, {**inputs}, *args, **kwargs)
        other = super().compute_loss(model, {**inputs}, *args, **kwargs)
        if isinstance(found, tuple):
            return (found[0] + other[0]) / 2, found[1]
        return (found + other) / 2


@own_loss(slot="loss", of=("trainer",))
def loss_on_samples(trainer, model, inputs, items):
    outputs = model(**inputs)
    log_probs, entropy = figures_of(outputs, inputs["labels"])
    ranks = trainer.accelerator.num_processes
    if items is None:
        items, ranks = (inputs["labels"][:, 1:] != -100).sum(), 1
    return -(log_probs.sum() + 0.1 * entropy.sum()) / items * ranks, outputs


def loss_func(outputs, labels, num_items_in_batch=None):
    """A focal loss, also of an evaluation, which has no count of items."""
    if num_items_in_batch is None:
        num_items_in_batch = (labels[:, 1:] != -100).sum()
    return focal_loss(outputs, labels, num_items_in_batch)


def loss_func_of_logits(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


LOSSES["compute_loss_func"] = Change(
    arguments={"compute_loss_func": loss_func}, slot="loss", of=("trainer",)
)
LOSSES["compute_loss_func of logits"] = Change(
    arguments={"compute_loss_func": loss_func_of_logits}, slot="loss", weight=0.5
)
