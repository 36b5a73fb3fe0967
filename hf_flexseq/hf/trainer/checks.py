"""Trainers and training arguments that hf_flexseq refuses.

`TRAINER` holds for every trainer, `NEXT_TOKEN` for trainers of causal language models but for
TRL's objectives, `ON_SAMPLES` for a loss that the trainer computes on its own batches, `MODEL` for
a trainer together with its model. Overridden methods have their rules in `overrides.py`, datasets
in `hf/engine/dataset_checks.py`, models in `hf/model/checks.py`.
"""

import logging
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.utils import is_liger_kernel_available

from hf_flexseq.base.refusals import Refusal, option, refuse, together
from hf_flexseq.base.values import listed
from hf_flexseq.base.versions import FUSED_HEAD_FROM, OFFLOAD_FROM, is_sharded_at_load
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.distributed.connect import capabilities_on
from hf_flexseq.hf.model.adapters import unsuitable_adapter, virtual_tokens_of
from hf_flexseq.hf.model.checkpointing import offloading_twice, unknown_offloading
from hf_flexseq.hf.model.liger import LOSSES
from hf_flexseq.hf.model.loss import has_chunkable_loss
from hf_flexseq.hf.model.loss_kinds import (
    FIGURES,
    check_own_loss,
    has_other_compute_loss,
    has_own_loss,
    is_objective,
    is_on_samples,
    is_sft,
    own_loss_of,
    reads_logits_of_all_tokens,
    unsuitable_distillation,
)
from hf_flexseq.hf.model.quantized_layers import outlier_threshold
from hf_flexseq.hf.model.router import (
    NO_ROUTER_LOSS,
    UnknownRouterLoss,
    asks_for_router_loss,
    router_facts,
)
from hf_flexseq.hf.model.sharding import experts_gathered_apart, is_zero3, resolve_sync
from hf_flexseq.hf.trainer.overrides import check_overrides
from hf_flexseq.steps.users_code import package

logger = logging.getLogger(__name__)


class TrainerOfModel(NamedTuple):
    """A trainer and its model."""

    trainer: Any
    """The trainer."""
    model: PreTrainedModel
    """The model of the trainer, without adapters."""

    @property
    def name(self) -> str:
        """The class of the trainer."""
        return type(self.trainer).__name__


def check_trainer(trainer: Trainer, args: FlexSeqArguments) -> None:
    """Raise ValueError or NotImplementedError for a Trainer that hf_flexseq refuses."""
    on_samples = is_on_samples(trainer)
    table = [*TRAINER]
    if not is_objective(trainer):
        table += NEXT_TOKEN
    if on_samples:
        table += ON_SAMPLES
    together(
        lambda: refuse(table, trainer),
        lambda: check_overrides(trainer),
        lambda: resolve_sync(
            args,
            trainer.model,
            trainer.accelerator,
            lockstep=not on_samples and has_other_compute_loss(trainer),
            is_ordered=capabilities_on(trainer.accelerator.device).ordered,
        ),
    )


def check_loss_of_model(trainer: Any, model: PreTrainedModel) -> None:
    """Raise NotImplementedError for a loss function or router loss that would not be trained; log
    a loss that the plain Trainer divides differently. model: without adapters, accepted by
    `check_model`."""
    refuse(MODEL, TrainerOfModel(trainer, model))
    threshold = outlier_threshold(model.config)
    if threshold and trainer.is_world_process_zero():
        logger.warning(
            "llm_int8_threshold=%s: layers of 8 bits compute a column in 16 bits if any token "
            "beside it has an outlier there, so that up to 3e-3 of their results depends on which "
            "tokens run together, under every trainer. load_in_4bit=True has no such columns",
            threshold,
        )
    if is_on_samples(trainer):
        return  # its loss calls no loss_function, and counts as the plain Trainer does
    check_own_loss(model)
    if getattr(trainer, "_loss_shifts_labels", True) or not trainer.is_world_process_zero():
        return
    path = "model" if trainer.model is model else "model.get_base_model()"
    logger.warning(
        "loss_type=%s of %s: the plain Trainer divides the loss by all labels, also by those of "
        "first tokens, which are never predicted; hf_flexseq divides it by predicted tokens. Set "
        '%s.loss_type = "ForCausalLM" before the trainer is made, and the plain Trainer does so '
        "as well",
        getattr(model, "loss_type", None),
        type(model).__name__,
        path,
    )


# ---- what a trainer asks for


_argument = partial(option, holder="args")  # finds a refused value of a training argument


def _prompt_on_samples(trainer: Any) -> str | None:
    count = virtual_tokens_of(trainer.model)
    return f"{count} virtual tokens of PEFT with {type(trainer).__name__}" if count else None


def _adalora(trainer: Any) -> str | None:
    tuner = getattr(trainer.model, "base_model", None)
    is_adalora = hasattr(tuner, "trainable_adapter_name")
    return (
        f"AdaLoRA with {type(trainer).__name__}" if is_adalora and has_own_loss(trainer) else None
    )


def _smoothing_of_figures(trainer: Any) -> str | None:
    factor = trainer.args.label_smoothing_factor
    if not factor or not is_sft(trainer):
        return None
    return f"label_smoothing_factor={factor} of {type(trainer).__name__}"


def _losses_of_liger(trainer: Any) -> str | None:
    options = trainer.args.liger_kernel_config or {}
    asked = [name for name in LOSSES if trainer.args.use_liger_kernel and options.get(name)]
    return f"{asked[0]}=True in liger_kernel_config" if asked else None


def _saved_apart(trainer: Any) -> str | None:
    """Find machines that would each save their own part of one optimizer's state."""
    args = trainer.args
    saves_all = args.save_strategy != "no" and not args.save_only_model
    if is_sharded_at_load(trainer) and args.save_on_each_node and saves_all:
        return "save_on_each_node=True with a model that DistributedConfig has sharded"
    return None


def _saved_at_a_signal(trainer: Any) -> str | None:
    args = trainer.args
    if not getattr(args, "enable_jit_checkpoint", False) or args.world_size == 1:
        return None
    return f"enable_jit_checkpoint=True on {args.world_size} ranks"


def _steps_in_backward(trainer: Any) -> str | None:
    optim = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    is_refused = optim in ("lomo", "adalomo") or optim.endswith("layerwise")
    return f"optim={optim!r}" if is_refused else None


def _experts_of_reference(trainer: Any) -> str | None:
    if not is_zero3(trainer.accelerator):
        return None
    for name in ("ref_model", "teacher_model"):
        model = getattr(trainer, name, None)
        if isinstance(model, nn.Module):
            apart = experts_gathered_apart(model)
            if apart:
                return f"a {name} that DeepSpeed has prepared, with {listed(sorted(apart))}"
    return None


def _other_loss(trainer: Any) -> str | None:
    for cls in _classes_with(trainer, "compute_loss"):
        if package(cls) == "trl" and cls.__name__ != "SFTTrainer":
            return f"the loss of {cls.__name__}"
    if getattr(trainer, "loss_is_scaled_for_ga", None) is False and not has_own_loss(trainer):
        says_so = [*_classes_with(trainer, "loss_is_scaled_for_ga"), type(trainer)]
        return f"the loss of {says_so[0].__name__}"
    return None


def _own_samples(trainer: Any) -> str | None:
    """Find a trainer that makes its samples from prompts."""
    makes = [cls for cls in _classes_with(trainer, "_prepare_inputs") if cls is not Trainer]
    if not makes:
        return None
    trainer._set_signature_columns_if_needed()
    if "input_ids" in trainer._signature_columns:
        return None
    return f"samples made in {makes[0].__name__}"


def _classes_with(trainer: Any, name: str) -> list[type]:
    """Return the classes of a trainer that define an attribute, except hf_flexseq's own."""
    classes = type(trainer).__mro__
    return [cls for cls in classes if name in vars(cls) and package(cls) != "hf_flexseq"]


# ---- what a trainer and its model ask for together


def _own_function_on_samples(case: TrainerOfModel) -> str | None:
    if not has_own_loss(case.trainer) or own_loss_of(case.model) is None:
        return None
    return f"the own loss_function of {type(case.model).__name__} with the loss of {case.name}"


def _smoothed_own_loss(case: TrainerOfModel) -> str | None:
    factor = case.trainer.args.label_smoothing_factor
    if not factor or is_on_samples(case.trainer) or has_chunkable_loss(case.model):
        return None
    return f"label_smoothing_factor={factor} with {type(case.model).__name__}"


def _unknown_router_loss(case: TrainerOfModel) -> str | None:
    if not getattr(case.trainer, "aux_loss_enabled", False):
        return None
    reason = ""
    if not is_objective(case.trainer) and not asks_for_router_loss(case.model):
        reason = "its configuration does not name that coefficient"
    try:
        router_facts(case.model)
    except UnknownRouterLoss as unknown:
        reason = str(unknown)
    value = case.trainer.router_aux_loss_coef
    name = type(case.model).__name__
    return f"router_aux_loss_coef={value} with {name} ({reason})" if reason else None


# ---- the tables

TRAINER: tuple[Refusal[Any], ...] = (
    Refusal(
        setting="several GPUs in one process (DataParallel)",
        found=_argument("n_gpu", lambda value: value > 1),
        why="ranks are processes",
        instead="start one process per GPU with accelerate launch",
        error=ValueError,
    ),
    Refusal(
        setting="average_tokens_across_devices=False",
        found=_argument("average_tokens_across_devices", lambda value: not value),
        why="tokens move between ranks, so the mean is taken over all tokens",
        instead="set it to True",
        error=ValueError,
    ),
    Refusal(
        setting="ddp_timeout of 0 and less",
        found=_argument("ddp_timeout", lambda value: value <= 0),
        why="an exchange between ranks takes time",
        instead="give more than 0 seconds",
        error=ValueError,
    ),
    Refusal(
        setting="activation_offloading=True of TRL with offload=True of activation checkpointing",
        found=offloading_twice,
        why="both bring the same activations to the host",
        instead="leave activation_offloading out",
        error=ValueError,
    ),
    Refusal(
        setting=f"offload among the options of activation checkpointing before transformers "
        f"{OFFLOAD_FROM}",
        found=unknown_offloading,
        why="torch's checkpoint does not know it",
        instead="leave it out",
    ),
    Refusal(
        setting="trainers of TRL that distill in other ways than DistillationTrainer",
        found=unsuitable_distillation,
        why="divergences are computed from a teacher in this process",
        instead="use TRL's DistillationTrainer with a teacher_model of the same vocabulary",
    ),
    Refusal(
        setting=f"before TRL {FUSED_HEAD_FROM}: DPO, KTO, GRPO, RLOO, and SFT with "
        "use_liger_kernel or another loss_type than 'chunked_nll'",
        found=reads_logits_of_all_tokens,
        why="its loss reads logits, a whole vocabulary for every token, which stay where the plan "
        "has put them",
        instead=f"use TRL {FUSED_HEAD_FROM} or newer, whose losses read log-probabilities",
    ),
    Refusal(
        setting="a model on several devices (device_map)",
        found=lambda one: one.is_model_parallel,
        why="every process trains the whole model",
        instead="leave device_map out",
    ),
    Refusal(
        setting="methods and options of PEFT that [are not exact]"
        "(integrations.md#lora-qlora-and-prompt-tuning)",
        found=lambda one: unsuitable_adapter(one.model),
        why="a row has parts of several sequences, and virtual tokens are alike in all of them",
        instead="use LoRA, prompt tuning, or another exact method (docs/integrations.md)",
    ),
    Refusal(
        setting="label_smoothing_factor of SFTTrainer",
        found=_smoothing_of_figures,
        why="it would smooth by the logits of all tokens, and its head returns none",
        instead="use FlexSeqTrainer, or set it to 0",
    ),
    Refusal(
        setting="save_on_each_node=True with a model that DistributedConfig has sharded",
        found=_saved_apart,
        why="all ranks write the optimizer's state into one folder",
        instead="leave it out, with an output_dir that all machines share, or set "
        "save_only_model=True",
        error=ValueError,
    ),
    Refusal(
        setting="enable_jit_checkpoint=True on several ranks",
        found=_saved_at_a_signal,
        why="ranks may hear a signal in different steps, and all of them save together",
        instead="save every few steps (save_steps)",
    ),
    Refusal(
        setting="use_liger_kernel=True without the package",
        found=lambda one: one.args.use_liger_kernel and not is_liger_kernel_available(),
        why="its kernels are not installed",
        instead="run pip install liger-kernel",
        error=ImportError,
    ),
    Refusal(
        setting="fused_linear_cross_entropy and cross_entropy in liger_kernel_config",
        found=_losses_of_liger,
        why="hf_flexseq computes head and loss in chunks by itself",
        instead="leave it out",
        error=ValueError,
    ),
    Refusal(
        setting="optimizers that update weights in the backward (lomo, adalomo, layerwise)",
        found=_steps_in_backward,
        why="it updates the weights in every backward, and a step has several",
        instead="use adamw_torch",
    ),
    Refusal(
        setting="FlexSeqCallback and a reference model with experts under ZeRO-3",
        found=_experts_of_reference,
        why="ZeRO-3 would gather the parameters of experts by counts of module calls, which "
        "differ between ranks, so that they may wait for each other for ever",
        instead="put FlexSeqMixin in front of the trainer, or list these classes in DeepSpeed's "
        "zero_optimization.leaf_module.classes",
    ),
)

NEXT_TOKEN: tuple[Refusal[Any], ...] = (
    Refusal(
        setting=f"{FIGURES} of SFTTrainer",
        found=lambda one: is_sft(one) and hasattr(one, FIGURES),
        why="TRL's head returns neither logits nor hidden states",
        instead="use FlexSeqTrainer, or read outputs.log_probs and outputs.entropy",
    ),
    Refusal(
        setting="trainers of libraries whose loss is no sum over tokens, but for the objectives",
        found=_other_loss,
        why="it is not divided by the tokens of the step, num_items_in_batch "
        "(loss_is_scaled_for_ga=False)",
        instead="train with next-token loss, as Trainer and SFTTrainer do, or with TRL's DPO, "
        "KTO, Reward, GRPO, RLOO or DistillationTrainer",
    ),
    Refusal(
        setting="trainers that make their samples, but for GRPO, RLOO and Distillation",
        found=_own_samples,
        why="it makes samples while it trains, as for reinforcement learning, and its loss is not "
        "a sum over tokens of the dataset",
        instead="train with next-token loss, as Trainer and SFTTrainer do, or with TRL's GRPO, "
        "RLOO or DistillationTrainer",
    ),
)

ON_SAMPLES: tuple[Refusal[Any], ...] = (
    Refusal(
        setting="prompt tuning and P-tuning with an objective or a loss of your own",
        found=_prompt_on_samples,
        why="figures of whole samples have no places for virtual tokens",
        instead="use LoRA",
    ),
    Refusal(
        setting="AdaLoRA with a loss of your own",
        found=_adalora,
        why="outputs.loss is next-token loss there, without AdaLoRA's own term",
        instead="use LoRA, or leave the trainer's loss as it is",
    ),
    Refusal(
        setting="activation_offloading=True with an objective or a loss of your own",
        found=_argument("activation_offloading"),
        why="forwards of this trainer run before its step begins",
        instead="leave it out, since plans bring activations to the host where memory asks for it",
    ),
)

MODEL: tuple[Refusal[TrainerOfModel], ...] = (
    Refusal(
        setting="label_smoothing_factor with a model that keeps its own loss",
        found=_smoothed_own_loss,
        why="labels are smoothed where the loss is computed in chunks",
        instead="set it to 0",
    ),
    Refusal(
        setting="a model's own loss_function with a loss of your own",
        found=_own_function_on_samples,
        why="outputs.loss is next-token loss there",
        instead="leave model.loss_function as it is",
    ),
    Refusal(
        setting="router losses that hf_flexseq does not know",
        found=_unknown_router_loss,
        why="its router loss is not computed here",
        instead=NO_ROUTER_LOSS,
    ),
)
