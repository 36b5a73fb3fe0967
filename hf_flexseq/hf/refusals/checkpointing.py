"""What a trainer asks of activation checkpointing."""

from transformers import Trainer

from hf_flexseq.base.versions import (
    OFFLOAD_FROM,
    checkpointing_name,
    checkpointing_options,
    is_older,
    needs,
)


def offloads(trainer: Trainer) -> bool:
    """Tell whether activation checkpointing is on, and brings layers' inputs to the host."""
    is_on = getattr(trainer.args, checkpointing_name(trainer.args))
    return bool(is_on and checkpointing_options(trainer.args).get("offload"))


def offloading_twice(trainer: Trainer) -> str | None:
    """Find layers' inputs that TRL and activation checkpointing would both bring to the host."""
    if not getattr(trainer.args, "activation_offloading", False):
        return None
    if not offloads(trainer):
        return None
    name = checkpointing_name(trainer.args)
    return f"activation_offloading=True and offload=True in {name}_kwargs"


def unknown_offloading(trainer: Trainer) -> str | None:
    """Find offloading that this version of transformers would hand on to torch."""
    if not is_older("transformers", OFFLOAD_FROM):
        return None
    if "offload" not in checkpointing_options(trainer.args):
        return None
    name = checkpointing_name(trainer.args)
    return f"offload in {name}_kwargs ({needs('transformers', OFFLOAD_FROM)})"
