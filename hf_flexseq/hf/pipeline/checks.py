"""What a pipeline refuses when it is configured, each with one line that says what to change."""

from typing import Any

from accelerate.utils import DistributedType
from transformers import PreTrainedModel, Trainer

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.model.facts import has_sharded_modules
from hf_flexseq.hf.model.layer_kinds import recurrent_kinds
from hf_flexseq.hf.model.router import NO_ROUTER_LOSS, OPTION, asks_for_router_loss
from hf_flexseq.hf.model.trial import try_model
from hf_flexseq.hf.trainer_checks import Refusal, refuse
from hf_flexseq.steps.users_code import users_forward_hooks


def check_pipeline_trainer(trainer: Any, args: FlexSeqArguments) -> None:
    """Raise NotImplementedError for a Trainer whose work a pipeline would change."""
    stages = f" (pipeline_parallel_size={args.pipeline_parallel_size})"
    refuse(NotImplementedError, _of_trainer(trainer), where=stages)
    refuse(NotImplementedError, _of_options(args), where=stages)
    refuse(NotImplementedError, _of_model(trainer, args), where=stages)


def _of_trainer(trainer: Any) -> list[Refusal]:
    """Return what a trainer may ask for that a stage alone cannot do."""
    accelerator = trainer.accelerator
    return [
        Refusal(
            when=accelerator.distributed_type == DistributedType.DEEPSPEED,
            message="DeepSpeed with a pipeline: leave it out, or use FSDP2",
        ),
        Refusal(
            when=hasattr(trainer.model, "peft_config"),
            message="a PEFT model with a pipeline: train all parameters, or set "
            "pipeline_parallel_size=1",
        ),
        Refusal(
            when=accelerator.mixed_precision == "fp16",
            message="fp16 with a pipeline, whose stages would scale their losses differently; use "
            "bf16",
        ),
        Refusal(
            when=type(trainer).compute_loss is not Trainer.compute_loss,
            message=f"{type(trainer).__name__}'s own compute_loss with a pipeline, whose last "
            "stage alone sees a loss and could count metrics of tokens (SFTTrainer's accuracy and "
            "entropy): use FlexSeqTrainer",
        ),
        Refusal(
            when=getattr(trainer.args, "predict_with_generate", False),
            message="predict_with_generate with a pipeline: a stage alone cannot generate",
        ),
    ]


def _of_options(args: FlexSeqArguments) -> list[Refusal]:
    """Return the options of hf_flexseq that have no meaning for chunks."""
    return [
        Refusal(
            when=args.planner not in ("auto", "static"),
            message=f"planner={args.planner!r} with a pipeline; use 'auto', or 'static' with "
            "sp_degree ranks per chunk",
        ),
        Refusal(
            when=args.strategy not in ("auto", "local", "ulysses"),
            message=f"strategy={args.strategy!r} with a pipeline, whose chunks are rectangles "
            "over their prefix; use 'auto', or 'ulysses' with planner='static'",
        ),
        Refusal(
            when=args.strategy == "ulysses" and args.planner != "static",
            message="strategy='ulysses' without planner='static' with a pipeline; give "
            "sp_degree, too",
        ),
        Refusal(
            when=args.sync != "auto",
            message=f"sync={args.sync!r} with a pipeline; leave it at 'auto'",
        ),
    ]


def _of_model(trainer: Any, args: FlexSeqArguments) -> list[Refusal]:
    """Return the models that cannot be cut, and ways to make or load one that leave nothing to
    cut."""
    return [
        Refusal(
            when=has_sharded_modules(trainer.model),
            message="a model sharded at load with a pipeline: load it whole, and set fsdp=True",
        ),
        Refusal(
            when=_has_router_loss(trainer.model),
            message=f"{OPTION}=True with a pipeline, of which a stage sees but some of the "
            f"routers: {NO_ROUTER_LOSS}",
        ),
        Refusal(
            when=next(users_forward_hooks(trainer.model), None),
            message=f"{next(users_forward_hooks(trainer.model), None)} with a pipeline, whose "
            "stages run chunks of sequences: remove the hook, or set pipeline_parallel_size=1",
        ),
        Refusal(
            when=trainer.model_init is not None,
            message="model_init with a pipeline: a trial would begin with stages of the one "
            "before",
        ),
        Refusal(
            when=_attends_twice(trainer.model),
            message=f"{type(trainer.model).__name__}, of which a layer attends more than once, "
            "with a pipeline, which carries the keys of one attention per layer: set "
            "pipeline_parallel_size=1",
        ),
        Refusal(
            when=_shares_attention(trainer.model),
            message=f"{type(trainer.model).__name__}, of which layers share one attention, with a "
            "pipeline, which carries the keys of each layer: set pipeline_parallel_size=1",
        ),
        Refusal(
            when=(args.sp_degree or 1) > 1 and _recurs(trainer.model),
            message=f"{type(trainer.model).__name__}, which has recurrent layers, with "
            f"sp_degree={args.sp_degree} ranks that share every chunk of a pipeline: states are "
            "carried from chunk to chunk on one rank; leave sp_degree out",
        ),
    ]


def _has_router_loss(model: Any) -> bool:
    """Tell whether a model adds a router loss to its own."""
    return isinstance(model, PreTrainedModel) and asks_for_router_loss(model)


def _recurs(model: Any) -> bool:
    """Tell whether a model has recurrent layers."""
    return isinstance(model, PreTrainedModel) and bool(
        recurrent_kinds(model.config.get_text_config())
    )


def _shares_attention(model: Any) -> bool:
    """Tell whether attention does not know in which layer it is, since several layers have it."""
    if not isinstance(model, PreTrainedModel):
        return False
    return any(call.asked.layer is None for call in try_model(model).calls)


def _attends_twice(model: Any) -> bool:
    """Tell whether a layer calls attention more than once in a forward."""
    if not isinstance(model, PreTrainedModel):
        return False
    layers = [call.asked.layer for call in try_model(model).calls]
    return None not in layers and len(set(layers)) < len(layers)


def check_divides(stages: int, world: int) -> None:
    """Raise ValueError unless every stage can have as many ranks as the others."""
    if world % stages:
        raise ValueError(
            f"pipeline_parallel_size={stages} does not divide the {world} ranks of the job"
        )
