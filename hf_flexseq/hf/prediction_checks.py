"""Which predictions of tokens can be had, and what a function of the user's may make of logits.

Whole vocabularies of logits are refused, with their size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.executors import base_model
from hf_flexseq.hf.losses import has_fused_head, reads_figures
from hf_flexseq.hf.model.facts import compute_dtype, is_classifier
from hf_flexseq.hf.model.loss import ChunkedLoss
from hf_flexseq.hf.model.router import asks_for_router_loss


def wants_predictions(trainer: Any, *, predicts: bool) -> bool:
    """Tell if an evaluation, or `predict()` where `predicts`, needs what belongs to tokens."""
    if trainer.args.prediction_loss_only:
        return False
    return predicts or trainer.compute_metrics is not None


def check_predictions(trainer: Any, stages: int) -> None:
    """Raise NotImplementedError or ValueError where predictions of a causal language model cannot
    be had, or would be whole vocabularies.

    stages: of a pipeline.
    """
    name = type(trainer).__name__
    model = base_model(trainer.model)
    if is_classifier(model):
        return
    if has_fused_head(trainer):
        raise NotImplementedError(
            f"hf_flexseq does not support compute_metrics or predict() of {name}, whose head "
            "gives no logits: use FlexSeqTrainer, or set prediction_loss_only=True"
        )
    if stages > 1:
        raise NotImplementedError(
            f"hf_flexseq does not support compute_metrics or predict() with "
            f"pipeline_parallel_size={stages}: set it to 1, or prediction_loss_only=True"
        )
    if not trainer.accelerator.even_batches:
        raise NotImplementedError(
            "hf_flexseq does not support compute_metrics or predict() with even_batches=False: "
            "ranks would gather different numbers of batches; leave it at True"
        )
    for option in ("output_hidden_states", "output_attentions"):
        if getattr(model.config, option, False):
            raise NotImplementedError(
                f"hf_flexseq does not support compute_metrics or predict() with {option}=True, "
                "which stays spread over ranks: set it to False"
            )
    if "loss" in trainer.args.include_for_metrics and not reads_figures(trainer):
        _check_loss_of_samples(trainer, model)
    _check_function(trainer, model)


def _check_loss_of_samples(trainer: Any, model: PreTrainedModel) -> None:
    """Raise NotImplementedError where the loss of a batch is no sum over its tokens of what the
    head says."""
    is_own = type(trainer).compute_loss is not Trainer.compute_loss
    own_function = getattr(model, "loss_function", None)
    is_attached = isinstance(getattr(own_function, "__self__", None), ChunkedLoss)
    is_plain = is_attached or own_function is ForCausalLMLoss
    if is_own or not is_plain or asks_for_router_loss(model):
        raise NotImplementedError(
            "hf_flexseq does not support include_for_metrics=['loss'] with a loss of "
            f"{type(trainer).__name__}'s or the model's own, which is known of a whole evaluation "
            "alone: leave 'loss' out"
        )


def _check_function(trainer: Any, model: PreTrainedModel) -> None:
    """Raise NotImplementedError or ValueError unless a function makes a few values of a token's
    logits: it is tried on two tokens."""
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
            f"hf_flexseq does not bring whole logits home for compute_metrics or predict(), "
            f"{size}: {advice}"
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
    """Return the tensors, each [1, tokens, ...], that a user's function has returned, and whether
    they were several. Raises ValueError for anything else."""
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
