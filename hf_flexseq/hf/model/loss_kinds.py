"""Where the loss of a trainer's step is computed, by the trainer's class and by what its user has
changed: TRL need not be installed.

    in place      next-token loss as `Trainer` and TRL's SFTTrainer have it, on the micro-batches
                  of a plan, wherever their tokens are (`next_token.py`)
    on samples    every other loss: by the trainer's own code, on its own batches, on the rank that
                  drew them, from figures of their tokens (`hf/losses/`). TRL's DPO and its like,
                  classifiers, and every trainer whose loss runs code of the user's
"""

from typing import Any

from transformers import Trainer

from hf_flexseq.base.versions import FUSED_HEAD_FROM, is_older, needs
from hf_flexseq.hf.model.facts import is_classifier
from hf_flexseq.steps.users_code import is_known, users_methods

# Trainers of TRL whose losses are known to read log-probabilities, scores or divergences.
_ON_SAMPLES = (
    "DPOTrainer",
    "KTOTrainer",
    "GRPOTrainer",
    "RLOOTrainer",
    "RewardTrainer",
    "DistillationTrainer",
)

# Those of them that read log-probabilities of TRL's own head.
_READ_FUSED_HEAD = ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")

# Trainers that draw prompts, and make of them what they train on.
_ROLLING_OUT = ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")

METHODS_OF_LOSS = (
    "compute_loss",
    "training_step",
    "prediction_step",
    "_get_num_items_in_batch",
    "_prepare_input",
    "_prepare_inputs",
    "_prepare_context_parallel_inputs",
    "autocast_smart_context_manager",
    "compute_loss_context_manager",
)
"""Methods of a trainer that its loss runs, and that see the trainer's own batches."""

FIGURES = "flexseq_figures"
"""Name of a method of the user's that finds further figures of tokens."""

_SERVER = "its teacher answers from a server"
_LOGITS = "it compares the logits of two models, whole vocabularies"

# Trainers that compare distributions of two models in other ways than DistillationTrainer.
_OTHER_DISTILLATIONS = {
    "ServerDistillationTrainer": _SERVER,
    "AsyncDistillationTrainer": _SERVER,
    "GKDTrainer": _LOGITS,
    "GOLDTrainer": _LOGITS,
    "IWOPDTrainer": _LOGITS,
    "SDFTTrainer": _LOGITS,
    "SDPOTrainer": _LOGITS,
}


def rolls_out(trainer: Trainer) -> bool:
    """Tell if a trainer makes its samples while it trains."""
    return _is_one_of(trainer, _ROLLING_OUT)


def reads_logits_of_all_tokens(trainer: Trainer) -> str | None:
    """Return the class of a trainer of TRL whose loss reads logits, and the option that asks for
    such a loss, in versions without a head that gives log-probabilities."""
    if not is_older("trl", FUSED_HEAD_FROM):
        return None
    name = type(trainer).__name__
    version = needs("trl", FUSED_HEAD_FROM)
    if _is_one_of(trainer, _READ_FUSED_HEAD):
        return f"{name} ({version})"
    if is_sft(trainer) and _runs_users_code(trainer):
        return f"a loss of your own with {name} ({version})"
    loss_type = getattr(getattr(trainer, "args", None), "loss_type", None)
    if loss_type not in ("nll", "dft") or not reads_fused_head(trainer):
        return None
    if trainer.args.use_liger_kernel:  # which excludes 'chunked_nll'
        return f"use_liger_kernel=True of {name} ({version})"
    return f"loss_type={loss_type!r} of {name} ({version})"


def distills(trainer: Trainer) -> bool:
    """Tell if a trainer's loss is made of divergences from a teacher."""
    return _is_one_of(trainer, ("DistillationTrainer",))


def unsuitable_distillation(trainer: Trainer) -> str | None:
    """Return the class and the reason if a trainer distills without a teacher in this process."""
    for cls in type(trainer).__mro__:
        if cls.__name__ in _OTHER_DISTILLATIONS:
            return f"{cls.__name__} ({_OTHER_DISTILLATIONS[cls.__name__]})"
    if distills(trainer) and trainer.teacher_model is None:
        return f"{type(trainer).__name__} with teacher_model=None"
    return None


def is_on_samples(trainer: Trainer) -> bool:
    """Tell if a trainer computes its loss itself, on its own batches."""
    return is_objective(trainer) or has_own_loss(trainer)


def is_objective(trainer: Trainer) -> bool:
    """Tell if a trainer's loss is known to be no next-token loss: one of TRL's, or of a
    classifier."""
    return _is_one_of(trainer, _ON_SAMPLES) or is_classifier(plain_model(trainer))


def has_own_loss(trainer: Trainer) -> bool:
    """Tell if code of the user's takes part in the loss of a trainer of next-token loss."""
    return _runs_users_code(trainer) and not is_objective(trainer)


def _runs_users_code(trainer: Trainer) -> bool:
    if getattr(trainer, "compute_loss_func", None) is not None:
        return True
    return bool(users_methods(trainer, (*METHODS_OF_LOSS, FIGURES)))


def set_later(trainer: Trainer) -> str | None:
    """Return the name of a method of the loss that the user has put on a trainer; None without
    one."""
    own = vars(trainer)
    for name in METHODS_OF_LOSS:
        if name in own and not is_known(own[name]):
            return name
    return None


def is_sft(trainer: Trainer) -> bool:
    """Tell if a trainer is TRL's SFTTrainer or derived from it."""
    return _is_one_of(trainer, ("SFTTrainer",))


def has_fused_head(trainer: Trainer) -> bool:
    """Tell if a trainer of TRL's reads a head of TRL's own, which gives no logits."""
    return _is_one_of(trainer, (*_ON_SAMPLES, "SFTTrainer"))


def reads_fused_head(trainer: Trainer) -> bool:
    """Tell if a trainer runs the `compute_loss` of TRL's SFTTrainer, which reads nothing but the
    outputs of TRL's head."""
    own = type(trainer).compute_loss
    return any(
        cls.__name__ == "SFTTrainer" and vars(cls).get("compute_loss") is own
        for cls in type(trainer).__mro__
    )


def reads_sums(trainer: Trainer) -> bool:
    """Tell if a micro-batch runs the `compute_loss` of an SFTTrainer whose head gives sums over
    tokens, as in older versions of TRL, and no value of each token."""
    return reads_fused_head(trainer) and is_older("trl", FUSED_HEAD_FROM)


def plain_model(trainer: Trainer) -> Any:
    """Return the model of a trainer, without adapters."""
    model = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_one_of(trainer: Trainer, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in type(trainer).__mro__)
