"""Which calls of the model a trainer's loss will make on a batch, so that those of a whole step
are planned together, before the loss is computed.

Nothing but time depends on it: a call without gradients that was not foreseen is planned and run
when it comes, and one with gradients is refused.

A trainer of a causal language model takes one of two ways:

* One pass, where the loss is a sum over tokens, divided by `num_items_in_batch`: `Trainer` itself,
  TRL's SFTTrainer, and every class with a `compute_loss` of its own that hands on to it. Such a
  `compute_loss` runs on the micro-batches of a plan, wherever their tokens are. It must call the
  model with its labels: those of a micro-batch are shifted already, and logits beside them would
  not be those of a sample.
* At home, in two passes, where `compute_loss_func` is given, or the class says
  `flexseq_loss_at_home = True`: its `compute_loss` runs once for each batch that the plain Trainer
  would have, on whole samples, and reads `loss`, `log_probs` and `entropy` of the model's outputs
  (`outputs.PlannedOutput`).

Rejected: taking a class with a `compute_loss` of its own home without being told. It would pay for
a second pass where it only hands on to the Trainer's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.facts import is_classifier
from hf_flexseq.hf.objectives.calls import Call
from hf_flexseq.hf.objectives.heads import Head


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The calls that a loss will make on one batch."""

    policy: Call
    """With gradients."""

    wants_reference: bool = False
    """Whether the same is asked of the reference."""

    others: Call | None = None
    """Asked of the policy without gradients, and of the reference if that is asked at all."""


def foreseen(trainer: Any, batch: Mapping[str, Any], head: Head) -> Foreseen:
    """Return the calls that the loss of `trainer` will make on a batch."""
    if reads_figures(trainer):
        read = ("input_ids", "attention_mask", "labels")
        return Foreseen(head.read({name: batch[name] for name in read if name in batch}))
    for cls in type(trainer).__mro__:
        if cls.__name__ in _OF_TRAINERS:
            return _OF_TRAINERS[cls.__name__](trainer, batch)
    return Foreseen(head.read({**batch}))


def _dpo(trainer: Any, batch: Mapping[str, Any]) -> Foreseen:
    call = _completion_call(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    return Foreseen(call, wants_reference=not trainer.precompute_ref_logps)


def _kto(trainer: Any, batch: Mapping[str, Any]) -> Foreseen:
    call = _completion_call(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    others = None
    if trainer.calculate_KL:
        others = _completion_call(
            batch["KL_input_ids"], batch["KL_attention_mask"], batch["KL_completion_mask"]
        )
    return Foreseen(call, wants_reference=not trainer.precompute_ref_logps, others=others)


def _completion_call(
    ids: torch.Tensor, attention_mask: torch.Tensor, completion_mask: torch.Tensor
) -> Call:
    """Return the call whose labels are the tokens of completions; each [B, S]."""
    return Call(ids, attention_mask, ids.masked_fill(completion_mask == 0, IGNORE_INDEX))


def _rollouts(trainer: Any, batch: Mapping[str, Any]) -> Foreseen:
    """Prompts, padded on the left, and completions, padded on the right."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, : batch["prompt_ids"].shape[1]] = IGNORE_INDEX
    return Foreseen(Call(ids, mask, labels))


def _reward(trainer: Any, batch: Mapping[str, Any]) -> Foreseen:
    return Foreseen(Call(batch["input_ids"], batch.get("attention_mask"), None))


_OF_TRAINERS: dict[str, Callable[[Any, Mapping[str, Any]], Foreseen]] = {
    "DPOTrainer": _dpo,
    "KTOTrainer": _kto,
    "GRPOTrainer": _rollouts,
    "RLOOTrainer": _rollouts,
    "RewardTrainer": _reward,
}

# Trainers that draw prompts, and make of them what they train on.
_ROLLING_OUT = ("GRPOTrainer", "RLOOTrainer")


def rolls_out(trainer: Any) -> bool:
    """Tell if a trainer makes its samples while it trains."""
    return _is_one_of(trainer, _ROLLING_OUT)


def has_planned_loss(trainer: Any) -> bool:
    """Tell if the loss of a trainer is computed at home, from log-probabilities or scores."""
    if _is_one_of(trainer, tuple(_OF_TRAINERS)) or reads_figures(trainer):
        return True
    return is_classifier(_plain_model(trainer))


def reads_figures(trainer: Any) -> bool:
    """Tell if the loss is one of the user's own that reads log-probabilities of a causal language
    model's samples: `compute_loss_func`, or a class that says `flexseq_loss_at_home = True`."""
    if has_fused_head(trainer) or is_classifier(_plain_model(trainer)):
        return False
    is_func = getattr(trainer, "compute_loss_func", None) is not None
    return is_func or says_at_home(trainer)


def says_at_home(trainer: Any) -> bool:
    """Tell if the class of a trainer says `flexseq_loss_at_home = True`."""
    return bool(getattr(trainer, "flexseq_loss_at_home", False))


def has_fused_head(trainer: Any) -> bool:
    """Tell if a trainer of TRL's reads a fused head, which gives no logits."""
    return _is_one_of(trainer, (*_OF_TRAINERS, "SFTTrainer"))


def _plain_model(trainer: Any) -> Any:
    model = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_one_of(trainer: Any, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in type(trainer).__mro__)
