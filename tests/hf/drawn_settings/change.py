"""What a customisation of a trainer is, and decorators that make one of a function or a class.

Each is written as a user would, without a thought of hf_flexseq, and stands in front of the stock
trainer and of ours alike.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from tests.hf.drawn_settings.options import CAUSAL
from tests.hf.tiny import VOCAB


@dataclass(frozen=True, kw_only=True)
class Change:
    """One customisation."""

    methods: type | None = None
    """Goes in front of the trainer's class."""
    model: Callable[[Any], None] | None = None
    """Changes the model before the trainer is made."""
    trainer: Callable[[Any], None] | None = None
    """Changes the trainer before it trains."""
    arguments: Mapping[str, Any] | None = None
    """Further arguments of the trainer."""
    of: tuple[str, ...] = CAUSAL
    """The trainers that it goes with."""
    slot: str = ""
    """Two of one slot are not drawn together; the empty slot takes any number."""
    weight: float = 1.0


def recorder(table, field, make=None):
    """Return a decorator that adds a change to a table, under the decorated name in words.

    field: of Change, which gets the decorated function or class, or what `make` returns for it.
    """

    def recorded(*given, **options):
        def decorated(made):
            words = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", made.__name__).lower()
            value = make(made, *given) if make else made
            table[words] = Change(**{field: value}, **options)
            return made

        return decorated

    return recorded


def with_inputs(function, method):
    """A class whose method changes its inputs, in place or by returning others."""

    class OnInputs:
        pass

    def call(self, model, inputs, *args, **kwargs):
        changed = function(self, model, inputs)
        inputs = inputs if changed is None else changed
        return getattr(super(OnInputs, self), method)(model, inputs, *args, **kwargs)

    setattr(OnInputs, method, call)
    return OnInputs


def with_result(function, method):
    """A class whose method changes the result: function(trainer, result, *args)."""

    class OnResult:
        pass

    def call(self, *args, **kwargs):
        result = getattr(super(OnResult, self), method)(*args, **kwargs)
        return function(self, result, *args, **kwargs)

    setattr(OnResult, method, call)
    return OnResult


def with_loss(function):
    """A class that changes the trainer's loss: function(trainer, model, inputs, loss, outputs)."""

    class OnLoss:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
            loss = function(self, model, inputs, loss, outputs)
            return (loss, outputs) if return_outputs else loss

    return OnLoss


def with_own_loss(function):
    """A class with a loss of its own: function(trainer, model, inputs, items) gives the loss and
    the outputs."""

    class OwnLoss:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = function(self, model, inputs, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


def with_callback(function, event):
    """What adds a callback to a trainer, for an event that calls function(trainer, **given)."""

    def add(trainer):
        def call(self, args, state, control, **given):
            function(trainer, **given)

        trainer.add_callback(type(function.__name__, (TrainerCallback,), {event: call})())

    return add


def shifted_ids(ids):
    return (ids + 1) % VOCAB


def other_labels(labels):
    """Other targets at the same places."""
    return torch.where(labels >= 0, (labels * 3 + 1) % VOCAB, labels)


def clamp_gradients(model, bound=1e-3):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-bound, bound)
