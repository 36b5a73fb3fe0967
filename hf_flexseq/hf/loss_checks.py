"""Which loss a trainer's model computes, looked at when the trainer is made.

transformers chooses the loss of a model, and the Trainer what to divide it by, by the name of the
model's class: `loss_type` is the part of the name that transformers knows, such as ForCausalLM,
and None for GPT2LMHeadModel or a class MyLlama. With None the loss is that of the next token, but
the plain Trainer counts all labels for it. Which other losses are refused is in
`model/checks.py`.
"""

import logging
from typing import Any

from transformers import PreTrainedModel

from hf_flexseq.hf.losses import has_planned_loss, reads_figures
from hf_flexseq.hf.model.own_loss import check_own_loss, own_loss_of

logger = logging.getLogger(__name__)


def check_loss_function(trainer: Any, model: PreTrainedModel) -> None:
    """Raise NotImplementedError for a loss function that the user has set on a model, where it
    would not be what trains; warn where the plain Trainer divides the loss otherwise.

    model: the trainer's, without adapters.
    """
    if reads_figures(trainer) and own_loss_of(model) is not None:
        raise NotImplementedError(
            f"{type(model).__name__}: its own loss_function with a loss of "
            f"{type(trainer).__name__}'s own, for which outputs.loss is next-token loss: leave "
            "model.loss_function as it is"
        )
    if has_planned_loss(trainer):
        return  # which does not call it, and counts as the plain Trainer does
    check_own_loss(model)
    if getattr(trainer, "_loss_shifts_labels", True) or not trainer.is_world_process_zero():
        return
    path = "model" if trainer.model is model else "model.get_base_model()"
    logger.warning(
        "loss_type=%s of %s: the plain Trainer divides the loss by all labels, also those of the "
        "first tokens, which are not predicted, and hf_flexseq by the tokens that are; set "
        '%s.loss_type = "ForCausalLM" before the trainer is made, and the plain Trainer does so '
        "as well",
        getattr(model, "loss_type", None),
        type(model).__name__,
        path,
    )
