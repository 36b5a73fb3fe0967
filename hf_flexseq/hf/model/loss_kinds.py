"""Where the loss of a trainer's step is computed, by the trainer's class and by its user's changes
to the trainer and to the model. TRL need not be installed.

    in place      next-token loss as `Trainer` and TRL's SFTTrainer have it, on the micro-batches
                  of a plan, wherever their tokens are (`next_token.py`)
    on samples    every other loss: by the trainer's own code, on its own batches, on the rank that
                  drew them, from figures of their tokens (`hf/losses/`). TRL's DPO and its like,
                  classifiers, and every trainer whose loss runs code of the user's

A model on which the user has set a loss function, `model.loss_function = own`, keeps it, and gets
it computed on parts of sequences whose labels are shifted already. This is exact for a sum over
tokens that reads `shift_labels`, and the source does not say whether a function is one. So it is
called on a few random logits, once as the plain Trainer calls it and once on two parts, and both
must agree.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_flexseq.base.versions import FUSED_HEAD_FROM, is_older, needs
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.model.facts import is_classifier, without_adapters
from hf_flexseq.hf.model.loss import ChunkedLoss
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
    return _is_one_of(trainer, _ON_SAMPLES) or is_classifier(without_adapters(trainer.model))


def has_own_loss(trainer: Trainer) -> bool:
    """Tell if code of the user's takes part in the loss of a trainer of next-token loss."""
    return _runs_users_code(trainer) and not is_objective(trainer)


def _runs_users_code(trainer: Trainer) -> bool:
    if getattr(trainer, "compute_loss_func", None) is not None:
        return True
    return bool(users_methods(trainer, (*METHODS_OF_LOSS, FIGURES)))


def has_other_compute_loss(trainer: Trainer) -> bool:
    """Tell if a trainer has another `compute_loss` than `Trainer`."""
    return type(trainer).compute_loss is not Trainer.compute_loss


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


def _is_one_of(trainer: Trainer, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in type(trainer).__mro__)


# ---- loss functions of the user's on a model


Loss = Callable[..., torch.Tensor]

TOKENS = 8
TOLERANCE = 1e-3  # relative: functions may round to 16 bits


def own_loss_of(model: nn.Module) -> Loss | None:
    """Return the loss function that the user has set on a model; None for transformers' own."""
    own: Loss | None = getattr(model, "_loss_function", None)
    if own is ForCausalLMLoss or isinstance(getattr(own, "__self__", None), ChunkedLoss):
        return None
    return own


def check_own_loss(model: Any) -> None:
    """Raise NotImplementedError for a model, not an adapter, with a loss function of the user's
    that is not known to be exact on parts of sequences."""
    own = own_loss_of(model)
    if own is None:
        return
    name = f"{type(model).__name__}: its loss_function {getattr(own, '__name__', own)}"
    with ErrorCapture() as trying, torch.random.fork_rng(devices=[]):
        whole, parts = _tried(own, model)
    if trying.error is not None:
        raise NotImplementedError(
            f"{name} could not be called on a part of a sequence ({trying.error}): take "
            "shift_labels, num_items_in_batch and **kwargs"
        ) from trying.error
    if not abs(whole - parts) <= TOLERANCE * abs(whole):  # also for NaN
        raise NotImplementedError(
            f"{name} gives {whole:.4g} on a sequence and {parts:.4g} on two parts of it: use "
            "shift_labels where they are given, and divide the sum over tokens by "
            "num_items_in_batch"
        )


def _tried(own: Loss, model: Any) -> tuple[float, float]:
    """Return the loss of a random sequence as a whole, and the sum of the losses of its parts."""
    device = next(model.parameters()).device
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, TOKENS, vocab, generator=generator).to(device)  # [1, T, V]
    labels = torch.randint(vocab, (1, TOKENS), generator=generator).to(device)  # [1, T]
    labels[0, 2] = IGNORE_INDEX
    targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]  # [1, T]
    items = (targets != IGNORE_INDEX).sum()
    whole = own(logits, labels, vocab_size=vocab, num_items_in_batch=items)
    parts = torch.zeros((), device=device)
    for part in (slice(0, 3), slice(3, TOKENS)):
        parts = parts + own(
            logits[:, part],
            targets[:, part],
            vocab_size=vocab,
            shift_labels=targets[:, part],
            num_items_in_batch=items,
            seq_ctx=None,
        )
    return float(whole), float(parts)
