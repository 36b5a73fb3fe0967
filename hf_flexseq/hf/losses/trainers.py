"""Which calls of the model a trainer's loss will make on a batch. The calls of a whole step are
therefore planned together, before the loss is computed.

Nothing but time depends on it: a call without gradients that was not foreseen is planned and run
when it comes, and one with gradients is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.losses.heads import Head
from hf_flexseq.steps.calls import READ, ModelCall, images_in, types_in


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The calls that a loss will make on one batch."""

    policy: ModelCall
    """With gradients."""
    wants_reference: bool = False
    """True if the same is asked of the reference."""
    others: ModelCall | None = None
    """Asked of the policy without gradients, and of the reference if that is asked at all."""


def foreseen(trainer: Trainer, batch: Mapping[str, Any], head: Head) -> Foreseen:
    """Return the calls that the loss of `trainer` will make on a batch."""
    if head.is_own:
        given = {name: batch[name] for name in READ if name in batch}
        return Foreseen(head.read({**given, **images_in(batch), **types_in(batch)}))
    for cls in type(trainer).__mro__:
        if cls.__name__ in _OF_TRAINERS:
            return _OF_TRAINERS[cls.__name__](trainer, batch)
    return Foreseen(head.read({**batch}))


def _dpo(trainer: Any, batch: Mapping[str, Any]) -> Foreseen:
    call = _completion_call(batch)
    return Foreseen(call, wants_reference=not trainer.precompute_ref_logps)


def _kto(trainer: Any, batch: Mapping[str, Any]) -> Foreseen:
    call = _completion_call(batch)
    others = _completion_call(batch, "KL_") if trainer.calculate_KL else None
    return Foreseen(call, wants_reference=not trainer.precompute_ref_logps, others=others)


def _completion_call(batch: Mapping[str, Any], prefix: str = "") -> ModelCall:
    """Return the call whose labels are the tokens of completions. prefix: of the names of its
    columns, each [B, S]."""
    ids = batch[f"{prefix}input_ids"]
    labels = ids.masked_fill(batch[f"{prefix}completion_mask"] == 0, IGNORE_INDEX)
    return ModelCall(
        ids,
        batch[f"{prefix}attention_mask"],
        labels,
        images=images_in(batch),
        types=types_in(batch, prefix),
    )


def _rollouts(trainer: Any, batch: Mapping[str, Any]) -> Foreseen:
    """Prompts, padded on the left, and completions, padded on the right."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, : batch["prompt_ids"].shape[1]] = IGNORE_INDEX
    return Foreseen(ModelCall(ids, mask, labels, images=images_in(batch), types=types_in(batch)))


def _reward(trainer: Any, batch: Mapping[str, Any]) -> Foreseen:
    return Foreseen(ModelCall(batch["input_ids"], batch.get("attention_mask"), None))


_OF_TRAINERS: dict[str, Callable[[Any, Mapping[str, Any]], Foreseen]] = {
    "DPOTrainer": _dpo,
    "KTOTrainer": _kto,
    "GRPOTrainer": _rollouts,
    "RLOOTrainer": _rollouts,
    "RewardTrainer": _reward,
    "DistillationTrainer": _rollouts,
}
