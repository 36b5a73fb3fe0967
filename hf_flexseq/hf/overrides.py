"""Methods that a user may override on a trainer, and their treatment on planned steps.

Every method of `Trainer` and of TRL's SFT, DPO and GRPO trainers has a rule here, or is called as
the plain trainer calls it (`CALLED`); a test compares the lists with the classes. A rule has a
standing for each of the two ways in which a step's loss is computed (`step_loss.py`):

    CALLED      at the same places, with the same arguments, and its result is used
    CHANGED     it is called, with a difference from the plain Trainer that the page names
    IN_PARTS    it is called for each micro-batch of the plan instead of each batch. That has no
                effect if its loss is a sum over tokens, which `sum_trial.py` tests
    REFUSED     it would not be called, or its result would be ignored: an error names it

A table of docs/migrating.md is made of these rules (`scripts/pages/render.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import Trainer

from hf_flexseq.base.refusals import raise_all
from hf_flexseq.base.values import listed
from hf_flexseq.base.versions import is_sharded_at_load
from hf_flexseq.hf.losses import has_planned_loss
from hf_flexseq.steps.users_code import (
    is_known,
    users_backward_hooks,
    users_method,
    users_method_behind,
    users_methods,
)

WHOLE_SAMPLES = "flexseq_loss_on_whole_samples = True"

# what makes up for the mean of gradients over ranks; `Trainer.compute_loss` ends with it
RANKS_FACTOR = "* self.accelerator.num_processes"


class Standing(Enum):
    """Treatment of an override."""

    CALLED = "honoured"
    CHANGED = "honoured, with a difference"
    IN_PARTS = "honoured, for each micro-batch"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Treatment of an override of some methods."""

    names: tuple[str, ...]
    """The methods."""

    in_one_pass: Standing
    """Treatment if the loss is a sum over tokens."""

    on_samples: Standing
    """Treatment if the trainer computes its loss on its own batches, between two passes."""

    why: str
    """Difference, or reason of the refusal."""

    instead: str = ""
    """Advice: what the user can do instead."""


RULES = (
    Rule(
        names=("get_batch_samples",),
        in_one_pass=Standing.REFUSED,
        on_samples=Standing.REFUSED,
        why="batches are drawn, planned and dispatched before it would be called",
        instead="change samples in the dataset, the sampler or the data_collator",
    ),
    Rule(
        names=("_get_num_items_in_batch",),
        in_one_pass=Standing.REFUSED,
        on_samples=Standing.CALLED,
        why="the loss is divided by the target tokens of the whole step, which the plan counts",
        instead=f"scale the loss in compute_loss, or set {WHOLE_SAMPLES} in the class",
    ),
    Rule(
        names=("prediction_step",),
        in_one_pass=Standing.REFUSED,
        on_samples=Standing.CALLED,
        why="an evaluation runs planned micro-batches, whose logits are not gathered",
        instead="override compute_loss or evaluation_loop, give compute_metrics with "
        f"preprocess_logits_for_metrics, or set {WHOLE_SAMPLES} in the class",
    ),
    Rule(
        names=("compute_loss",),
        in_one_pass=Standing.IN_PARTS,
        on_samples=Standing.CALLED,
        why="its loss must be a sum over tokens that is divided by num_items_in_batch; "
        "super().compute_loss also multiplies it by the ranks, of whose gradients the mean is "
        f"taken, so a loss of the model's own needs {RANKS_FACTOR}",
    ),
    Rule(
        names=(
            "_prepare_input",
            "_prepare_inputs",
            "_prepare_context_parallel_inputs",
            "autocast_smart_context_manager",
            "compute_loss_context_manager",
        ),
        in_one_pass=Standing.IN_PARTS,
        on_samples=Standing.CALLED,
        why="the inputs are those of a micro-batch; changed labels are refused",
    ),
    Rule(
        names=("training_step",),
        in_one_pass=Standing.IN_PARTS,
        on_samples=Standing.CHANGED,
        why="gradients are complete after the last micro-batch: changes of gradients inside it "
        "are refused in one pass, and on samples it sees no gradients",
        instead="change gradients in the callback event on_pre_optimizer_step",
    ),
    Rule(
        names=("floating_point_ops", "_track_num_input_tokens"),
        in_one_pass=Standing.CHANGED,
        on_samples=Standing.CALLED,
        why="the last batch of a step has all tokens that the rank has drawn for the step, "
        "without padding, and the previous batches are empty",
    ),
    Rule(
        names=("evaluation_loop",),
        in_one_pass=Standing.CHANGED,
        on_samples=Standing.CALLED,
        why="its batches are planned steps, which only prediction_step can run; the loss in its "
        "metrics is replaced by the mean over all target tokens",
    ),
    Rule(
        names=("_get_per_token_logps_and_entropies",),
        in_one_pass=Standing.CALLED,
        on_samples=Standing.CHANGED,
        why="it gets a whole batch of samples instead of batch_size at a time",
    ),
)

# Methods that are replaced for a model that `DistributedConfig` has sharded: an override
# behind FlexSeqMixin is not called.
OF_SHARDED_CHECKPOINTS = (
    "_load_from_checkpoint",
    "_load_best_model",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)

# Methods that run for every micro-batch of a loss in one pass.
IN_PARTS = tuple(
    name for rule in RULES if rule.in_one_pass is Standing.IN_PARTS for name in rule.names
)


def runs_other_code(trainer: Any) -> bool:
    """Return True if a micro-batch runs a subclass's `compute_loss` or any code of the user's."""
    is_stock = type(trainer).compute_loss is Trainer.compute_loss
    return not is_stock or bool(users_methods(trainer, IN_PARTS))


def check_overrides(trainer: Any) -> None:
    """Raise NotImplementedError for overrides of the user's that would be ignored."""
    ignored = []
    on_samples = has_planned_loss(trainer)
    for rule in RULES:
        standing = rule.on_samples if on_samples else rule.in_one_pass
        if standing is Standing.REFUSED:
            for where in users_methods(trainer, rule.names):
                ignored.append(f"{where} would be ignored, since {rule.why}: {rule.instead}")
    if is_sharded_at_load(trainer):
        for name in OF_SHARDED_CHECKPOINTS:
            behind = users_method_behind(trainer, name)
            if behind is not None:
                ignored.append(
                    f"{behind} would not be called for a model that DistributedConfig has "
                    "sharded, whose checkpoints hf_flexseq writes and reads: remove it, or "
                    "override the method in a subclass of FlexSeqTrainer or FlexSeqMixin"
                )
    raise_all([NotImplementedError(reason) for reason in ignored])


def remarks(trainer: Any) -> Iterator[str]:
    """Yield a line for each piece of users' code that gets other inputs and is not refused."""
    where = users_method(trainer, "training_step")
    if where is not None and has_planned_loss(trainer):
        yield (
            f"{where} sees no gradients: they are computed when the losses of all batches of a "
            "step are known; change them in the callback event on_pre_optimizer_step"
        )
    in_parts = users_methods(trainer, IN_PARTS)
    if in_parts and not has_planned_loss(trainer):
        yield (
            f"{listed(in_parts)}: called for each micro-batch of the plan and not for each batch, "
            "on parts of samples; what it counts or logs by itself is of those"
        )
    hooks = list(users_backward_hooks(trainer.model))
    if hooks:
        yield (
            f"{listed(hooks)}: a hook on the backward of a module sees the gradients of each "
            "micro-batch of the plan, in which tokens of several samples share a row"
        )
    for callback in trainer.callback_handler.callbacks:
        if not is_known(type(callback).on_substep_end):
            yield (
                f"{type(callback).__name__}.on_substep_end is called before the work of a step, "
                "whose batches are planned together, and sees no gradients"
            )
