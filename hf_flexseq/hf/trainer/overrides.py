"""Methods that a user may override on a trainer: overrides that would not be called, or whose
result would be ignored, are refused by name.

All other methods of `Trainer` and of TRL's SFT, DPO and GRPO trainers are called at the same
places, with the same arguments, and their result is used, or with a difference that a table of
docs/migrating.md names (`scripts/pages/overrides.yaml`). A test compares the table with the
classes. A method of the loss sees the trainer's own batches, as under the plain Trainer.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from transformers import DataCollatorWithFlattening, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_flexseq.base.refusals import raise_all
from hf_flexseq.base.values import listed
from hf_flexseq.base.versions import is_sharded_at_load
from hf_flexseq.hf.model.facts import without_adapters
from hf_flexseq.hf.model.loss_kinds import is_objective
from hf_flexseq.hf.model.mlp_trial import small_like
from hf_flexseq.hf.model.probe import lively_copy
from hf_flexseq.hf.model.rehearsal import once_for_equal_models
from hf_flexseq.steps.users_code import (
    is_known,
    users_backward_hooks,
    users_method,
    users_method_behind,
    users_methods,
)

# Methods that are replaced for a model that `DistributedConfig` has sharded: an override
# behind FlexSeqMixin is not called.
OF_SHARDED_CHECKPOINTS = (
    "_load_from_checkpoint",
    "_load_best_model",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)


def check_overrides(trainer: Any) -> None:
    """Raise NotImplementedError for overrides of the user's that would be ignored."""
    ignored = []
    for where in users_methods(trainer, ("get_batch_samples",)):
        ignored.append(
            f"{where} would be ignored, since batches are drawn, planned and dispatched before it "
            "would be called: change samples in the dataset, the sampler or the data_collator"
        )
    if "training_step" in vars(trainer):
        ignored.append(
            f"training_step of this {type(trainer).__name__} would run instead of planned steps: "
            "define it in a class"
        )
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
    """Yield a line for each piece of users' code that gets other inputs and is not refused, and
    for each argument that the plain Trainer treats otherwise."""
    yield from _other_arguments(trainer)
    where = users_method(trainer, "training_step")
    if where is not None:
        yield (
            f"{where} sees no gradients: they are computed when the losses of all batches of a "
            "step are known; change them in the callback event on_pre_optimizer_step"
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


def _other_arguments(trainer: Any) -> Iterator[str]:
    if is_objective(trainer):
        return
    args, plain = trainer.args, without_adapters(trainer.model)
    factor, model = args.label_smoothing_factor, type(plain).__name__
    counts_items = getattr(plain, "accepts_loss_kwargs", True)
    if not counts_items and args.world_size * args.gradient_accumulation_steps > 1:
        yield (
            f"{model}.accepts_loss_kwargs=False: the plain Trainer averages the mean losses of a "
            "step's batches; hf_flexseq divides by the target tokens of the step. With "
            "accepts_loss_kwargs=True the plain Trainer does so, too"
        )
    if factor and model not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        yield (
            f"label_smoothing_factor={factor}: the plain Trainer compares the prediction of each "
            f"token with that token itself, since transformers does not list {model} among causal "
            "language models; hf_flexseq compares it with the next token"
        )
    if getattr(args, "use_cache", False):
        yield (
            "use_cache=True: under the plain Trainer documents of a packed row see each other "
            "with it, unless attn_implementation is a FlashAttention; with hf_flexseq they do "
            "not. Training needs no cache: leave it out"
        )
    elif _packs(trainer) and _joins_documents(plain):
        yield (
            f"under the plain Trainer documents of a packed row see each other in {model}, unless "
            "a FlashAttention or a kernel of recurrent layers keeps them apart; with hf_flexseq "
            "they do not"
        )


def _packs(trainer: Any) -> bool:
    """Tell if the user's collator makes one row of several documents."""
    given = trainer.data_collator
    collator = getattr(given, "example_collator", given)
    is_free = getattr(collator, "padding_free", False)  # of TRL
    return isinstance(collator, DataCollatorWithFlattening) or bool(is_free)


@once_for_equal_models  # remarks are looked for twice, when a trainer is made and when it trains
def _joins_documents(model: PreTrainedModel) -> bool:
    """Tell if a small model of the same kind, by transformers' own forward, has other results for
    a document behind another one. False where none can be made."""
    with suppress(Exception), torch.no_grad():
        small = lively_copy(small_like(model), torch.float32)
        ids = torch.arange(3, 14)[None]
        positions = torch.cat([torch.arange(6), torch.arange(5)])[None]
        alone = small(ids[:, 6:], use_cache=False).logits
        packed = small(ids, position_ids=positions, use_cache=False).logits[:, 6:]
        return bool((packed - alone).norm() > 1e-4 * alone.norm())
    return False
