"""Trainers, options, models and settings of FSDP that pipelines refuse."""

from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedModel, Trainer

from hf_flexseq.base.refusals import Refusal, option, raise_all, refuse
from hf_flexseq.base.values import listed
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.model.checkpointing import asks_to_offload
from hf_flexseq.hf.model.layer_kinds import has_recurrent
from hf_flexseq.hf.model.loss_kinds import METHODS_OF_LOSS, has_own_loss, is_on_samples
from hf_flexseq.hf.model.rehearsal import code_of_model
from hf_flexseq.hf.model.router import NO_ROUTER_LOSS, OPTION, asks_for_router_loss
from hf_flexseq.hf.model.sharding import has_sharded_modules
from hf_flexseq.hf.model.trial import try_model
from hf_flexseq.steps.users_code import is_known, users_forward_hooks, users_methods

ONE_STAGE = "set pipeline_parallel_size=1"

# Methods that a pipeline replaces (`pipeline/trainer/mixin.py`), or never calls.
REPLACED = (
    "_wrap_model",
    "floating_point_ops",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_save",
    "_load_from_checkpoint",
    "_load_best_model",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)


class Staged(NamedTuple):
    """A trainer with a pipeline."""

    trainer: Any
    """The trainer."""
    args: FlexSeqArguments
    """The options of hf_flexseq."""

    @property
    def model(self) -> Any:
        """The whole model."""
        return self.trainer.model

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    @property
    def attending(self) -> list[int | None]:
        """Layer number of each call of attention in one forward; None if unknown."""
        if not isinstance(self.model, PreTrainedModel):
            return []
        return [call.asked.layer for call in try_model(self.model).calls]


class ShardedStages(NamedTuple):
    """FSDP for the stages of a pipeline."""

    plugin: FullyShardedDataParallelPlugin
    """The settings of FSDP."""
    cast_dtype: torch.dtype | None
    """dtype of accelerate's mixed precision, in which parameters are gathered; None without."""


def check_pipeline_trainer(trainer: Any, args: FlexSeqArguments) -> None:
    """Raise NotImplementedError for a Trainer that a pipeline refuses."""
    refuse(PIPELINE, Staged(trainer, args), where=_stages(args))


def check_replaced(trainer: Any, args: FlexSeqArguments) -> None:
    """Raise NotImplementedError for overrides of the user's that a pipeline would not call."""
    raise_all(
        [
            NotImplementedError(
                f"{where} would not be called{_stages(args)}, whose stages do this themselves: "
                f"remove it, or {ONE_STAGE}"
            )
            for where in users_methods(trainer, REPLACED)
        ]
    )


def check_fsdp_of_stages(
    plugin: FullyShardedDataParallelPlugin, cast_dtype: torch.dtype | None
) -> None:
    """Raise NotImplementedError for a setting of FSDP that stages cannot follow."""
    refuse(FSDP_OF_STAGES, ShardedStages(plugin, cast_dtype), where=" in a pipeline")


def check_divides(stages: int, world: int) -> None:
    """Raise ValueError unless every stage can have as many ranks as the others."""
    if world % stages:
        raise ValueError(
            f"pipeline_parallel_size={stages} does not divide the {world} ranks of the job"
        )


def _stages(args: FlexSeqArguments) -> str:
    return f" with pipeline_parallel_size={args.pipeline_parallel_size}"


# ---- what a trainer with a pipeline asks for


def _loss_on_samples(case: Staged) -> str | None:
    trainer = case.trainer
    if not is_on_samples(trainer):
        return None
    methods = users_methods(trainer, METHODS_OF_LOSS) if has_own_loss(trainer) else []
    return listed(methods or [f"the loss of {type(trainer).__name__}"])


def _own_compute_loss(case: Staged) -> str | None:
    is_stock = type(case.trainer).compute_loss is Trainer.compute_loss
    if is_stock or is_on_samples(case.trainer):  # which is named itself
        return None
    return f"compute_loss of {type(case.trainer).__name__}"


def _smoothing(case: Staged) -> str | None:
    factor = case.trainer.args.label_smoothing_factor
    return f"label_smoothing_factor={factor}" if factor else None


def _offload_without_gpu(case: Staged) -> str | None:
    if not asks_to_offload(case.trainer) or case.trainer.accelerator.device.type != "cpu":
        return None
    return "offload=True of activation checkpointing on a CPU"


def _ulysses_without_degree(case: Staged) -> str | None:
    if case.args.strategy != "ulysses" or case.args.planner == "static":
        return None
    return f"strategy='ulysses' and planner={case.args.planner!r}"


def _router_loss(case: Staged) -> str | None:
    is_asked = isinstance(case.model, PreTrainedModel) and asks_for_router_loss(case.model)
    return f"{OPTION}=True" if is_asked else None


def _own_code(case: Staged) -> str | None:
    # What a class of the user's own consists of is a part of it.
    if not isinstance(case.model, PreTrainedModel) or not is_known(type(case.model)):
        return None
    return next(iter(code_of_model(case.model)), None)


def _second_attention(case: Staged) -> str | None:
    layers = case.attending
    if None in layers or len(set(layers)) == len(layers):
        return None
    return f"{case.name}, which calls attention twice in a layer,"


def _shared_attention(case: Staged) -> str | None:
    if None not in case.attending:
        return None
    return f"{case.name}, whose layers share one attention module,"


def _shared_recurrent_chunks(case: Staged) -> str | None:
    if (case.args.sp_degree or 1) == 1 or not isinstance(case.model, PreTrainedModel):
        return None
    if not has_recurrent(case.model.config.get_text_config()):
        return None
    return f"sp_degree={case.args.sp_degree} for the recurrent layers of {case.name}"


def _other_param_dtype(case: ShardedStages) -> str | None:
    dtype = getattr(case.plugin.mixed_precision_policy, "param_dtype", None)
    if dtype in (None, case.cast_dtype):
        return None
    return f"param_dtype={dtype} of FSDP beside a mixed precision in {case.cast_dtype}"


# ---- the tables

PIPELINE: tuple[Refusal[Staged], ...] = (
    Refusal(
        setting="label_smoothing_factor",
        found=_smoothing,
        why="the last stage smooths no labels",
        instead="set it to 0, or use one stage",
    ),
    Refusal(
        setting="DeepSpeed",
        found=lambda case: case.trainer.accelerator.distributed_type == DistributedType.DEEPSPEED,
        why="it would reduce gradients of different stages with each other",
        instead="leave it out, or use FSDP2",
    ),
    Refusal(
        setting="a PEFT model",
        found=lambda case: hasattr(case.model, "peft_config"),
        why="adapters are not cut into stages",
        instead=f"train all parameters, or {ONE_STAGE}",
    ),
    Refusal(
        setting="fp16",
        found=lambda case: case.trainer.accelerator.mixed_precision == "fp16",
        why="stages would scale their losses differently",
        instead="use bf16",
    ),
    Refusal(
        setting="a loss on whole samples",
        found=_loss_on_samples,
        why="a stage has no figures of whole samples",
        instead="set it to 1",
    ),
    Refusal(
        setting="a compute_loss other than the Trainer's (SFTTrainer)",
        found=_own_compute_loss,
        why="only the last stage sees a loss, or could count metrics of tokens",
        instead="use FlexSeqTrainer",
    ),
    Refusal(
        setting="auto_find_batch_size=True",
        found=lambda case: case.trainer.args.auto_find_batch_size,
        why="a stage holds several chunks at once, as many as the schedule says",
        instead="set it to False, and max_tokens_per_rank to a lower cap",
    ),
    Refusal(
        setting="predict_with_generate=True",
        found=lambda case: getattr(case.trainer.args, "predict_with_generate", False),
        why="a stage alone cannot generate",
        instead="set it to False",
    ),
    Refusal(
        setting="planners other than auto and static",
        found=option("planner", lambda value: value not in ("auto", "static"), holder="args"),
        why="chunks of a pipeline have their own planner",
        instead="use 'auto', or 'static' with sp_degree ranks per chunk",
    ),
    Refusal(
        setting="strategies other than auto, local and ulysses",
        found=option(
            "strategy", lambda value: value not in ("auto", "local", "ulysses"), holder="args"
        ),
        why="chunks attend to all earlier keys of their sequence",
        instead="use 'auto', or 'ulysses' with planner='static'",
    ),
    Refusal(
        setting="strategy='ulysses' without planner='static'",
        found=_ulysses_without_degree,
        why="ranks per chunk are fixed",
        instead="set planner='static' and sp_degree",
    ),
    Refusal(
        setting="sync",
        found=option("sync", lambda value: value != "auto", holder="args"),
        why="the order of actions decides it",
        instead="leave it at 'auto'",
    ),
    Refusal(
        setting="a model sharded at load",
        found=lambda case: has_sharded_modules(case.model),
        why="it cannot be cut into stages",
        instead="load it whole, and set fsdp=True",
    ),
    Refusal(
        setting="router losses",
        found=_router_loss,
        why="a stage sees only some of the routers",
        instead=NO_ROUTER_LOSS,
    ),
    Refusal(
        setting="neftune_noise_alpha",
        found=lambda case: case.trainer.args.neftune_noise_alpha is not None,
        why="chunks of a sequence have no noise of their own",
        instead=f"leave it out, or {ONE_STAGE}",
    ),
    Refusal(
        setting="use_liger_kernel=True",
        found=lambda case: case.trainer.args.use_liger_kernel,
        why="Liger puts its kernels into whole models",
        instead=f"set it to False, or {ONE_STAGE}",
    ),
    Refusal(
        setting="forward hooks",
        found=lambda case: next(users_forward_hooks(case.model), None),
        why="stages run chunks of sequences",
        instead=f"remove the hook, or {ONE_STAGE}",
    ),
    Refusal(
        setting="modules and functions of your own in a library's model",
        found=_own_code,
        why="nothing can try on a stage whether they keep sequences apart",
        instead=f"take them out, or {ONE_STAGE}",
    ),
    Refusal(
        setting="model_init",
        found=lambda case: case.trainer.model_init is not None,
        why="a second trial would begin with the stages of the first",
        instead="give the model itself",
    ),
    Refusal(
        setting="offload=True of activation checkpointing on a CPU",
        found=_offload_without_gpu,
        why="stages leave it to transformers, which pins memory for a GPU",
        instead="leave offload out",
    ),
    Refusal(
        setting="models that call attention twice in a layer",
        found=_second_attention,
        why="a pipeline carries the keys of one attention per layer",
        instead=ONE_STAGE,
    ),
    Refusal(
        setting="models whose layers share one attention module",
        found=_shared_attention,
        why="a pipeline carries the keys of each layer",
        instead=ONE_STAGE,
    ),
    Refusal(
        setting="recurrent layers with sp_degree above 1",
        found=_shared_recurrent_chunks,
        why="states are carried from chunk to chunk on one rank",
        instead="leave sp_degree out",
    ),
)

FSDP_OF_STAGES: tuple[Refusal[ShardedStages], ...] = (
    Refusal(
        setting="FSDP version 1",
        found=option("fsdp_version", lambda value: value != 2, holder="plugin"),
        why="stages are sharded with FSDP2",
        instead="set version=2 in fsdp_config",
    ),
    Refusal(
        setting="cpu_offload of FSDP",
        found=lambda case: isinstance(case.plugin.cpu_offload, CPUOffloadPolicy),
        why="stages keep their shards on the device",
        instead="leave it out",
    ),
    Refusal(
        setting="activation_checkpointing of FSDP",
        found=lambda case: case.plugin.activation_checkpointing,
        why="stages checkpoint chunks themselves",
        instead="set it in the training arguments",
    ),
    Refusal(
        setting="cpu_ram_efficient_loading of FSDP",
        found=lambda case: case.plugin.cpu_ram_efficient_loading,
        why="it leaves stages without values",
        instead="give FlexSeqTrainer the model's name, so that every rank loads its own stage",
    ),
    Refusal(
        setting="mixed_precision_policy of FSDP with another param_dtype",
        found=_other_param_dtype,
        why="stages gather parameters in the dtype of the mixed precision",
        instead="leave the policy out, and set bf16=True if wanted",
    ),
    Refusal(
        setting="ignored_modules of FSDP",
        found=lambda case: bool(case.plugin.ignored_modules),  # a name would stand in the error
        why="stages shard all their modules",
        instead="leave them out",
    ),
)
