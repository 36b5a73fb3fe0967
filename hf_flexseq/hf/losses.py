"""Trainers whose loss is not a sum over tokens, by the names of their classes: TRL need not be
installed.

Their loss is computed on the source ranks, which drew the samples, from figures of their tokens
(`objectives/`); all others compute the model's own next-token loss, in one pass.

A trainer of the user's own, of a causal language model, takes one of both ways:

* One pass, if the loss is a sum over tokens, divided by `num_items_in_batch`: `Trainer` itself,
  TRL's SFTTrainer, and every class whose own `compute_loss` calls theirs. It runs on the
  micro-batches of a plan, wherever their tokens are. It must call the model with its labels: those
  of a micro-batch are shifted already.
* On whole samples, in two passes, with `compute_loss_func`, or if the class sets
  `flexseq_loss_on_whole_samples = True`: its `compute_loss` runs once for each batch of the plain
  Trainer, and reads `loss`, `log_probs` and `entropy` of the model's outputs
  (`objectives/outputs.py`).

Rejected: giving whole samples to every class with its own `compute_loss`, at the price of a second
pass.
"""

from typing import Any

from transformers import Trainer

from hf_flexseq.base.versions import FUSED_HEAD_FROM, is_older, needs
from hf_flexseq.hf.model.facts import is_classifier

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


def has_planned_loss(trainer: Trainer) -> bool:
    """Tell if a trainer computes its loss on source ranks, from log-probabilities or scores."""
    if _is_one_of(trainer, _ON_SAMPLES) or reads_figures(trainer):
        return True
    return is_classifier(_plain_model(trainer))


def reads_figures(trainer: Trainer) -> bool:
    """Tell if the user's own loss reads log-probabilities of a causal language model: by
    `compute_loss_func`, or a class with `flexseq_loss_on_whole_samples = True`."""
    if has_fused_head(trainer) or is_classifier(_plain_model(trainer)):
        return False
    is_func = getattr(trainer, "compute_loss_func", None) is not None
    return is_func or says_on_samples(trainer)


def says_on_samples(trainer: Trainer) -> bool:
    """Tell if the class of a trainer says `flexseq_loss_on_whole_samples = True`."""
    return bool(getattr(trainer, "flexseq_loss_on_whole_samples", False))


def has_fused_head(trainer: Trainer) -> bool:
    """Tell if a trainer of TRL's reads a head of TRL's own, which gives no logits."""
    return _is_one_of(trainer, (*_ON_SAMPLES, "SFTTrainer"))


def reads_fused_head(trainer: Trainer) -> bool:
    """Tell if a micro-batch runs the `compute_loss` of TRL's SFTTrainer, which reads nothing but
    the outputs of TRL's head."""
    own = type(trainer).compute_loss
    return any(
        cls.__name__ == "SFTTrainer" and vars(cls).get("compute_loss") is own
        for cls in type(trainer).__mro__
    )


def reads_sums(trainer: Trainer) -> bool:
    """Tell if a micro-batch runs the `compute_loss` of an SFTTrainer whose head gives sums over
    tokens, as in older versions of TRL, and no value of each token."""
    return reads_fused_head(trainer) and is_older("trl", FUSED_HEAD_FROM)


def _plain_model(trainer: Trainer) -> Any:
    model = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_one_of(trainer: Trainer, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in type(trainer).__mro__)
