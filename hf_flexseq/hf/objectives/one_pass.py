"""A `compute_loss` of the user's own on the micro-batches of a plan, where a loss is a sum over
tokens; see `hf/losses.py` for when it takes that way."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer

from hf_flexseq.hf.executors import base_model


@contextmanager
def refusing_calls_without_labels(trainer: Trainer) -> Iterator[None]:
    """Raise NotImplementedError where `compute_loss`, which the block runs, calls the model on a
    micro-batch without labels.

    It would compute a loss itself, from logits of parts of samples and from labels that are
    shifted already.
    """
    name = type(trainer).__name__

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "seq_ctx" in kwargs and kwargs.get("labels") is None:
            raise NotImplementedError(
                f"{name}.compute_loss calls the model without labels, on parts of samples: hand "
                "on to Trainer.compute_loss, or read outputs.log_probs and outputs.entropy of "
                "whole samples, and say so in the class: flexseq_loss_at_home = True"
            )

    hook = base_model(trainer.model).register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
