"""What a trainer asks of activation checkpointing."""

from typing import Any

from transformers import TrainingArguments

from hf_flexseq.hf.model.facts import is_reentrant


def _checkpointing(training: TrainingArguments) -> str:
    """Return the name of activation checkpointing in this version of transformers."""
    if hasattr(training, "activation_checkpointing"):
        return "activation_checkpointing"
    return "gradient_checkpointing"


def _options(trainer: Any) -> dict[str, Any]:
    """Return the options that the user gives to activation checkpointing, by either name."""
    given = (
        getattr(trainer.args, "activation_checkpointing_kwargs", None)
        or getattr(trainer.args, "gradient_checkpointing_kwargs", None)
        or {}
    )
    return dict(given)


def reentrant_checkpointing(trainer: Any) -> str | None:
    """Find reentrant checkpointing, which is torch's default as soon as options are given."""
    options = _options(trainer)
    for not_for_torch in ("every_n_layers", "offload"):
        options.pop(not_for_torch, None)
    if not options or not is_reentrant(options):
        return None
    return f"use_reentrant=True in {_checkpointing(trainer.args)}_kwargs (torch's default)"


def offloads(trainer: Any) -> bool:
    """Tell whether activation checkpointing is on, and brings layers' inputs to the host."""
    is_on = getattr(trainer.args, _checkpointing(trainer.args))
    return bool(is_on and _options(trainer).get("offload"))


def offloading_twice(trainer: Any) -> str | None:
    """Find layers' inputs that TRL and activation checkpointing would both bring to the host."""
    if not getattr(trainer.args, "activation_offloading", False):
        return None
    if not offloads(trainer):
        return None
    return f"activation_offloading=True and offload=True in {_checkpointing(trainer.args)}_kwargs"
