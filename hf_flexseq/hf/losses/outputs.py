"""Outputs that a loss of the user's own gets from a causal language model whose tokens are
elsewhere."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.steps.calls import ModelCall, differ_by_masks

MEANS = "mean_log_probs"
"""Means of all log-probabilities of a token, [batch, tokens - 1], where labels are smoothed."""


@dataclass
class PlannedOutput(ModelOutput):
    """Takes the place of a model's outputs. Fields that it does not have are refused by name.

    Args:
        loss (`torch.Tensor`):
            The sum of `-log_probs`, over `num_items_in_batch`.
        log_probs (`torch.Tensor` of shape `(batch, tokens - 1)`):
            Log-probability of each label in `labels[:, 1:]`, 0 where it is -100.
        entropy (`torch.Tensor` of shape `(batch, tokens - 1)`):
            Entropy of the distribution that predicts it, 0 where the label is -100.
        label_mask (`torch.Tensor` of shape `(batch, tokens - 1)`):
            Whether the label is not -100.

    Besides, it has the figures that the trainer's `flexseq_figures` returns, of shape
    `(batch, tokens)` or `(batch, tokens, ...)`.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None

    @classmethod
    def of(cls, call: ModelCall, **fields: Any) -> "PlannedOutput":
        """Return the output of a call, with these fields."""
        output = cls(**fields)
        output._targets = call.targets[:, :-1]
        return output

    def masked_by(self, labels: torch.Tensor) -> "PlannedOutput":
        """Return the output for labels [batch, tokens] of which some were masked after the model's
        call. Raises NotImplementedError for labels that the call did not have."""
        targets = labels[:, 1:]
        if torch.equal(targets, self._targets):
            return self
        if not differ_by_masks(self._targets, targets):
            raise NotImplementedError(
                "a loss gets labels that its batch does not have: change them in _prepare_inputs, "
                "in the data_collator or in the dataset"
            )
        output = copy.copy(self)
        output["loss"] = None  # as of a call without labels
        for name in ("log_probs", "entropy", MEANS, "label_mask"):
            if name in output:
                output[name] = output[name].masked_fill(targets == IGNORE_INDEX, 0)
        return output

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes that a model's output might have; called for missing ones alone."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise refusal_of(f"outputs.{name}")

    def __getitem__(self, key: Any) -> Any:
        if key == 0:
            return self.loss
        if isinstance(key, str) and key in self.keys():
            return getattr(self, key)
        raise refusal_of(f"outputs[{key!r}]")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field. Raises NotImplementedError for a missing one."""
        return self[key]


def refusal_of(what: str) -> NotImplementedError:
    """Return the refusal of something that a loss has asked for."""
    return NotImplementedError(
        f"a loss asks for {what}, which stays where the plan has put its tokens: read loss, "
        "log_probs, entropy and label_mask [batch, tokens - 1], or give the trainer's class a "
        "method flexseq_figures(self, outputs, inputs) that makes a few values of each token "
        "(docs/objectives.md)"
    )


class PlannedSmoother:
    """Replaces transformers' `LabelSmoother`, which reads logits: the uniform distribution has a
    share `epsilon` in every label."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def __call__(
        self,
        outputs: PlannedOutput,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """Return the loss of outputs of the model, a scalar. labels: as in
        `PlannedOutput.masked_by`; `shift_labels` changes nothing."""
        outputs = outputs.masked_by(labels)
        assert outputs.log_probs is not None, "an answered call has labels"
        assert outputs.label_mask is not None, "an answered call has labels"
        items = num_items_in_batch
        if items is None:
            items = outputs.label_mask.sum().clamp(min=1)
        plain, uniform = outputs.log_probs.sum(), outputs[MEANS].sum()
        return -((1 - self.epsilon) * plain + self.epsilon * uniform) / items
