"""Evaluations with predictions of tokens that hf_flexseq refuses: whole vocabularies above all."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_flexseq.base.refusals import Refusal, refuse
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.adapters import virtual_tokens_of
from hf_flexseq.hf.model.facts import base_model, compute_dtype, is_classifier
from hf_flexseq.hf.model.loss import ChunkedLoss
from hf_flexseq.hf.model.loss_kinds import has_fused_head, has_own_loss
from hf_flexseq.hf.model.router import asks_for_router_loss


def wants_predictions(trainer: Any, *, predicts: bool) -> bool:
    """Tell if an evaluation, or `predict()` where `predicts`, needs predictions per token."""
    if trainer.args.prediction_loss_only:
        return False
    return predicts or trainer.compute_metrics is not None


def check_predictions(trainer: Any, stages: int) -> None:
    """Raise NotImplementedError or ValueError if predictions of a causal language model are
    unavailable or whole vocabularies. stages: of the pipeline."""
    model = base_model(trainer.model)
    if is_classifier(model):
        return
    refuse(PREDICTIONS, Predicting(trainer, model, stages), where=_WITH)
    _check_function(trainer, model)


# ---- what an evaluation asks for


class Predicting(NamedTuple):
    """A trainer whose evaluation returns predictions of tokens."""

    trainer: Any
    """The trainer."""
    model: PreTrainedModel
    """The model of the trainer, without adapters."""
    stages: int
    """Number of stages of the pipeline."""


_WITH = " with compute_metrics or predict()"
_LOSS_ONLY = "set prediction_loss_only=True"


def _states(case: Predicting) -> str | None:
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(case.model.config, name, False):
            return f"{name}=True"
    return None


def _loss_of_samples(case: Predicting) -> str | None:
    """Find losses of samples that are not a sum of the head's figures for their tokens."""
    trainer, model = case.trainer, case.model
    if "loss" not in trainer.args.include_for_metrics or has_own_loss(trainer):
        return None
    own_function = getattr(model, "loss_function", None)
    is_attached = isinstance(getattr(own_function, "__self__", None), ChunkedLoss)
    is_plain = is_attached or own_function is ForCausalLMLoss
    if is_plain and not asks_for_router_loss(model):
        return None
    return f"include_for_metrics=['loss'] and the loss of {type(model).__name__}"


PREDICTIONS: tuple[Refusal[Predicting], ...] = (
    Refusal(
        setting="predict_with_generate=True",
        found=lambda case: getattr(case.trainer.args, "predict_with_generate", False),
        why="predictions are made of logits of the given tokens, and none are generated",
        instead=f"set it to False and generate in the callback event on_evaluate, or {_LOSS_ONLY}",
    ),
    Refusal(
        setting="trainers of TRL that predict tokens",
        found=lambda case: has_fused_head(case.trainer) and type(case.trainer).__name__,
        why="its head returns no logits",
        instead=f"use FlexSeqTrainer, or {_LOSS_ONLY}",
    ),
    Refusal(
        setting="prompt tuning and P-tuning",
        found=lambda case: (
            (count := virtual_tokens_of(case.trainer.model)) and f"{count} virtual tokens of PEFT"
        ),
        why="PEFT has logits of these, too, so that predictions are longer than labels",
        instead=_LOSS_ONLY,
    ),
    Refusal(
        setting="pipeline_parallel_size above 1",
        found=lambda case: case.stages > 1 and f"pipeline_parallel_size={case.stages}",
        why="only the last stage has logits",
        instead=f"set it to 1, or {_LOSS_ONLY}",
    ),
    Refusal(
        setting="even_batches=False",
        found=lambda case: not case.trainer.accelerator.even_batches,
        why="ranks would gather different numbers of batches",
        instead="leave it at True",
    ),
    Refusal(
        setting="output_hidden_states=True, output_attentions=True",
        found=_states,
        why="hidden states and attention weights are not gathered",
        instead="set it to False",
    ),
    Refusal(
        setting="include_for_metrics=['loss'] with a model's own loss_function or router loss",
        found=_loss_of_samples,
        why="such a loss is known only for a whole evaluation",
        instead="leave 'loss' out",
    ),
)


# ---- what a function makes of logits


def _check_function(trainer: Any, model: PreTrainedModel) -> None:
    """Raise unless the function makes few values per token, which is tried on two tokens."""
    vocab = model.config.get_text_config().vocab_size
    dtype = compute_dtype(model, trainer.accelerator)
    if trainer.accelerator.mixed_precision != "no":
        dtype = torch.float32  # to which accelerate casts what a model returns
    size = f"{vocab:,} numbers or {vocab * dtype.itemsize:,} bytes for every token"
    advice = (
        "give preprocess_logits_for_metrics, which makes a few values of them, such as "
        "logits.argmax(dim=-1), or set prediction_loss_only=True"
    )
    function = trainer.preprocess_logits_for_metrics
    if function is None:
        raise NotImplementedError(
            f"hf_flexseq does not gather whole logits for compute_metrics or predict(), {size}: "
            f"{advice}"
        )
    logits = torch.zeros(1, 2, vocab, dtype=dtype, device=trainer.args.device)
    label = torch.tensor([[IGNORE_INDEX, 0]], device=trainer.args.device)
    labels = as_given([label for _ in trainer.label_names])
    with torch.no_grad():
        parts, _ = value_parts(function(logits, labels), tokens=2)
    if max(part.shape[2:].numel() for part in parts) >= vocab:
        raise NotImplementedError(
            f"preprocess_logits_for_metrics returns whole logits, {size}: {advice}"
        )


def value_parts(result: Any, *, tokens: int) -> tuple[list[torch.Tensor], bool]:
    """Return the tensors [1, tokens, ...] of a function's result, and True for several of them."""
    is_several = isinstance(result, tuple | list)
    parts = list(result) if is_several else [result]
    for part in parts:
        shape = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
        if not isinstance(part, torch.Tensor) or part.shape[:2] != (1, tokens):
            raise ValueError(
                f"preprocess_logits_for_metrics makes {shape} of logits (1, {tokens}, "
                "vocabulary): it runs on chunks of tokens, so give values for each of them, "
                f"(1, {tokens}) or (1, {tokens}, few), and shift or average in compute_metrics"
            )
    return parts, is_several


def as_given(labels: Sequence[torch.Tensor]) -> Any:
    """Return labels as the Trainer hands them on: alone where there is one, else as a tuple."""
    if not labels:
        return None
    return labels[0] if len(labels) == 1 else tuple(labels)
