"""Settings that cannot work are refused when the run is configured, each with one line that says
what to change.

ValueError is for what contradicts itself or is wrong, NotImplementedError for what would make
sense and is not there. What a model must be is in `model/checks.py`, what a dataset must hold in
`dataset_checks.py`, what an example must be in `hf_flexseq/steps/collator.py`.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend
from torch import nn
from transformers import PreTrainedModel, Trainer

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.distributed.connect import capabilities_on
from hf_flexseq.hf.losses import (
    has_planned_loss,
    reads_figures,
    says_at_home,
    unsuitable_distillation,
)
from hf_flexseq.hf.model.facts import is_fully_sharded, is_reentrant, zero_stage
from hf_flexseq.hf.model.router import (
    NO_ROUTER_LOSS,
    UnknownRouterLoss,
    asks_for_router_loss,
    router_facts,
)
from hf_flexseq.hf.overrides import check_overrides, runs_other_code

# ---- the accelerator


def check_accelerator(accelerator: Accelerator, args: FlexSeqArguments) -> None:
    """Raise ValueError or NotImplementedError for an Accelerator that does not go with
    hf_flexseq."""
    _check_world(accelerator)
    _check_parallelism(accelerator)
    _check_loaders(accelerator, args)
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise NotImplementedError(
            "torch.compile (dynamo_backend): every step has new shapes; leave it at 'no'"
        )
    if getattr(accelerator.ddp_handler, "static_graph", False):
        raise NotImplementedError(
            "ddp_static_graph=True: steps differ in their micro-batches; leave it at False"
        )
    if accelerator.mixed_precision == "fp8":
        raise NotImplementedError("mixed_precision='fp8' is not available; use 'bf16'")


def _check_world(accelerator: Accelerator) -> None:
    """Raise ValueError where the accelerator does not know all processes of the job: each would
    draw the same data, and none would reduce its gradients."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        launched = dist.get_world_size()
    if launched != accelerator.num_processes:
        raise ValueError(
            f"the job has {launched} processes, but accelerate sees {accelerator.num_processes}: "
            "on a CPU set use_cpu=True in the training arguments, or Accelerator(cpu=True)"
        )


def _check_parallelism(accelerator: Accelerator) -> None:
    parallelism = getattr(accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size", "tp_size"):
        size = getattr(parallelism, name, 1) or 1
        if size > 1:
            raise ValueError(
                f"{name}={size}: hf_flexseq chooses the sequence-parallel groups itself, over all "
                "ranks; leave parallelism_config out"
            )
    if accelerator.distributed_type in (DistributedType.XLA, DistributedType.MEGATRON_LM):
        raise NotImplementedError(
            f"{accelerator.distributed_type.value} is not available; use DDP, FSDP2 or ZeRO"
        )


def _check_loaders(accelerator: Accelerator, args: FlexSeqArguments) -> None:
    dataloader = accelerator.dataloader_config
    if dataloader.dispatch_batches:
        raise ValueError("dispatch_batches=True joins rows of different lengths; leave it at None")
    if dataloader.split_batches:
        raise ValueError("split_batches=True cuts rows that are not batches; leave it at False")
    if dataloader.use_stateful_dataloader and args.lookahead:
        raise ValueError(
            f"use_stateful_dataloader=True saves a state that lookahead={args.lookahead} has read "
            "past: set lookahead=0"
        )
    steps = accelerator.gradient_accumulation_steps
    if steps > 1 and accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(
            f"gradient_accumulation_steps={steps} makes the Accelerator divide every loss once "
            f"more; leave it at 1 and give engine.steps(..., accumulation={steps})"
        )


def resolve_sync(
    args: FlexSeqArguments,
    model: nn.Module,
    accelerator: Accelerator,
    *,
    lockstep: bool,
    is_ordered: bool,
) -> bool:
    """Decide if all ranks run every micro-batch together.

    lockstep: whether something that cannot be seen here makes them.
    is_ordered: whether the transport carries out transfers one after the other.
    Raises ValueError when they have to and sync='free' asks otherwise.
    """
    reason = None
    is_sharded = is_fully_sharded(model, accelerator) or zero_stage(model, accelerator) >= 2
    each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    if is_sharded or each or lockstep:
        reason = (
            "needs ranks that run different numbers of micro-batches, but here they meet in every "
            "one (FSDP, ZeRO-2/3, sync_each_batch, or a compute_loss of your own)"
        )
    elif is_ordered and _reduces_by_itself(accelerator):
        reason = (
            "needs one place in the plan where all ranks reduce gradients, but here each does so "
            "in its own last micro-batch (DeepSpeed, or a DDP comm_hook), which can hang on NCCL"
        )
    if reason is not None and args.sync == "free":
        raise ValueError(f"sync='free' {reason}: use sync='auto'")
    return reason is not None or args.sync == "lockstep"


def _reduces_by_itself(accelerator: Accelerator) -> bool:
    """Tell if gradients are reduced by something that `hf_flexseq/steps/reduction.py` cannot stand
    in for."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return True
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    return bool(hook != DDPCommunicationHookType.NO)


# ---- the trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A setting that hf_flexseq does not support."""

    when: Any
    """Truthy where it is asked for."""

    message: str
    """What it is, and what to change."""


def refuse(kind: type[Exception], refusals: Iterable[Refusal], *, where: str = "") -> None:
    """Raise an exception of `kind` for the first refusal that applies.

    where: said at the end of the message.
    """
    for refusal in refusals:
        if refusal.when:
            raise kind(f"hf_flexseq does not support {refusal.message}{where}")


def check_trainer(trainer: Trainer, args: FlexSeqArguments) -> None:
    """Raise ValueError or NotImplementedError for a Trainer that does not go with hf_flexseq."""
    refuse(ValueError, _contradictions(trainer.args))
    refuse(NotImplementedError, _missing(trainer))
    if has_planned_loss(trainer):
        refuse(NotImplementedError, _missing_at_home(trainer.args))
    else:
        refuse(NotImplementedError, _missing_in_next_token_loss(trainer))
    refuse(NotImplementedError, _missing_in_arguments(trainer.args))
    check_overrides(trainer, pipeline_parallel_size=args.pipeline_parallel_size)
    own_loss = runs_other_code(trainer)
    if has_planned_loss(trainer):
        own_loss = False  # it runs between the passes
        if args.pipeline_parallel_size > 1:
            raise NotImplementedError(
                f"pipeline_parallel_size={args.pipeline_parallel_size} with a loss that is "
                "computed from figures of whole sequences: set it to 1"
            )
    resolve_sync(
        args,
        trainer.model,
        trainer.accelerator,
        lockstep=own_loss,
        is_ordered=capabilities_on(trainer.accelerator.device).ordered,
    )


def check_router_loss(trainer: Any, model: PreTrainedModel) -> None:
    """Raise NotImplementedError for a router loss that is not computed here: of a trainer of TRL
    that adds one to its own, or of a model beside a loss that reads log-probabilities.

    model: the trainer's, without adapters. `check_model` has seen what it asks for itself.
    """
    if reads_figures(trainer) and asks_for_router_loss(model):
        raise NotImplementedError(
            f"output_router_logits=True of {type(model).__name__} with a loss of "
            f"{type(trainer).__name__}'s own, which gets log-probabilities and no router loss: "
            "set config.output_router_logits=False"
        )
    if not getattr(trainer, "aux_loss_enabled", False):
        return
    name = type(model).__name__
    if not has_planned_loss(trainer) and not asks_for_router_loss(model):
        raise NotImplementedError(
            f"router_aux_loss_coef={trainer.router_aux_loss_coef} with {name}, whose "
            f"configuration does not name that coefficient: {NO_ROUTER_LOSS}"
        )
    try:
        router_facts(model)
    except UnknownRouterLoss as reason:
        raise NotImplementedError(
            f"router_aux_loss_coef={trainer.router_aux_loss_coef} with {name}: {reason}; "
            f"{NO_ROUTER_LOSS}"
        ) from reason


def _contradictions(training: Any) -> list[Refusal]:
    """Return what training arguments may ask for that contradicts planned steps."""
    return [
        Refusal(
            when=training.n_gpu > 1,
            message=f"n_gpu={training.n_gpu} (DataParallel): start one process per GPU with "
            "accelerate launch",
        ),
        Refusal(
            when=not training.average_tokens_across_devices,
            message="average_tokens_across_devices=False: tokens move between ranks, so only "
            "their common mean makes sense",
        ),
        Refusal(
            when=training.ddp_timeout <= 0,
            message=f"ddp_timeout={training.ddp_timeout}: no exchange between ranks would have "
            "time; give more than 0 seconds",
        ),
        Refusal(
            when=training.auto_find_batch_size,
            message="auto_find_batch_size=True: max_tokens_per_rank bounds the memory instead",
        ),
        Refusal(
            when=_is_reentrant(training),
            message="use_reentrant=True, which is torch's default: set "
            f"{_checkpointing(training)}_kwargs={{'use_reentrant': False}}",
        ),
        Refusal(
            when=getattr(training, "packing", False) or getattr(training, "eval_packing", False),
            message="packing=True: rows that are packed already would be taken for single "
            "sequences; set packing=False",
        ),
    ]


def _checkpointing(training: Any) -> str:
    """Return what the training arguments call checkpointing: older versions of transformers have
    the second name alone."""
    if hasattr(training, "activation_checkpointing"):
        return "activation_checkpointing"
    return "gradient_checkpointing"


def _is_reentrant(training: Any) -> bool:
    """Tell if layers would be checkpointed the reentrant way: torch does so when it is given
    options, but not this one."""
    given = (
        getattr(training, "activation_checkpointing_kwargs", None)
        or getattr(training, "gradient_checkpointing_kwargs", None)
        or {}
    )
    options = dict(given)
    for not_for_torch in ("every_n_layers", "offload"):
        options.pop(not_for_torch, None)
    return bool(options) and is_reentrant(options)


def _missing(trainer: Trainer) -> list[Refusal]:
    """Return what a trainer may ask for that would make sense and is not there."""
    tp_size = trainer.get_tp_size()
    distillation = unsuitable_distillation(trainer)
    return [
        Refusal(when=distillation is not None, message=f"{distillation}"),
        Refusal(
            when=trainer.is_model_parallel,
            message="a model on several devices (device_map): give every process the whole model",
        ),
        Refusal(
            when=tp_size > 1,
            message=f"tensor parallelism (tp_size={tp_size}): leave it out",
        ),
        Refusal(
            when=_lengthens_sequences(trainer.model),
            message="prompt learning and adaption prompts of PEFT: they lengthen sequences; use "
            "LoRA",
        ),
    ]


def _missing_at_home(training: Any) -> list[Refusal]:
    """Return what a trainer may ask for whose loss is computed at home, after its forwards."""
    return [
        Refusal(
            when=getattr(training, "activation_offloading", False),
            message="activation_offloading=True with this trainer: forwards run before its step "
            f"begins; use {_checkpointing(training)}=True",
        ),
    ]


def _missing_in_next_token_loss(trainer: Trainer) -> list[Refusal]:
    """Return what a trainer may ask for beside a loss that is a sum over tokens."""
    return [
        Refusal(
            when=trainer.compute_loss_func is not None,
            message=f"compute_loss_func of {type(trainer).__name__}, which gives it logits: use "
            "FlexSeqTrainer, whose compute_loss_func reads outputs.log_probs and outputs.entropy",
        ),
        Refusal(
            when=says_at_home(trainer),
            message=f"flexseq_loss_at_home=True of {type(trainer).__name__}, whose own loss is a "
            "sum over tokens: leave it out, or derive from FlexSeqTrainer",
        ),
        Refusal(
            when=getattr(trainer, "loss_is_scaled_for_ga", None) is False,
            message=f"{_class_with(trainer, 'loss_is_scaled_for_ga')}: its loss is not a sum over "
            "tokens divided by those of the step, num_items_in_batch (loss_is_scaled_for_ga="
            "False); train with next-token loss, as Trainer and SFTTrainer do, or with TRL's "
            "DPO, KTO, Reward, GRPO, RLOO or DistillationTrainer",
        ),
        Refusal(
            when=_makes_its_samples(trainer),
            message=f"{_class_with(trainer, '_prepare_inputs')}: it makes samples while it "
            "trains, as for reinforcement learning, and its loss is not a sum over tokens of the "
            "dataset; train with next-token loss, as Trainer and SFTTrainer do, or with TRL's "
            "GRPO, RLOO or DistillationTrainer",
        ),
    ]


def _class_with(trainer: Trainer, name: str) -> str:
    """Return the name of the class that gives a trainer its attribute `name`."""
    for cls in type(trainer).__mro__:
        if name in vars(cls):
            return cls.__name__
    return type(trainer).__name__


def _makes_its_samples(trainer: Trainer) -> bool:
    """Tell if a trainer draws prompts, and makes of them what it trains on."""
    if type(trainer)._prepare_inputs is Trainer._prepare_inputs:
        return False
    trainer._set_signature_columns_if_needed()
    return "input_ids" not in trainer._signature_columns


def _lengthens_sequences(model: Any) -> bool:
    """Tell if an adapter of PEFT puts tokens of its own in front of a sequence."""
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            return True
        if getattr(adapter, "is_adaption_prompt", False):
            return True
    return False


def _missing_in_arguments(training: Any) -> list[Refusal]:
    """Return what training arguments may ask for that would make sense and is not there."""
    optim = str(getattr(training.optim, "value", training.optim))
    return [
        Refusal(
            when=training.label_smoothing_factor != 0,
            message=f"label_smoothing_factor={training.label_smoothing_factor}: the Trainer's "
            "smoother would shift labels that are already shifted; set it to 0",
        ),
        Refusal(
            when=training.torch_compile,
            message="torch_compile=True: every step has new shapes; set it to False",
        ),
        Refusal(
            when=training.use_liger_kernel,
            message="use_liger_kernel=True: it replaces the model's forward; hf_flexseq computes "
            "the loss in chunks by itself",
        ),
        Refusal(
            when=training.neftune_noise_alpha is not None,
            message=f"neftune_noise_alpha={training.neftune_noise_alpha}: its noise depends on "
            "how sequences are packed",
        ),
        Refusal(
            when=optim in ("lomo", "adalomo") or optim.endswith("layerwise"),
            message=f"optim={optim!r}: it updates the weights in every backward, and a step has "
            "several; use adamw_torch",
        ),
    ]
