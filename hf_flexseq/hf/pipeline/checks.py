"""What a pipeline refuses when it is configured, each with one line that says what to change."""

from typing import Any

from accelerate.utils import DistributedType
from transformers import Trainer

from hf_flexseq.config import FlexSeqArguments


def check_pipeline_trainer(trainer: Any, args: FlexSeqArguments) -> None:
    """Raise NotImplementedError for a Trainer whose work a pipeline would change."""
    kind = trainer.accelerator.distributed_type
    training = trainer.args
    stages = f"pipeline_parallel_size={args.pipeline_parallel_size}"
    for what, there in {
        "DeepSpeed with a pipeline: leave it out, or use FSDP2": kind == DistributedType.DEEPSPEED,
        "a PEFT model with a pipeline: train all parameters, or set "
        "pipeline_parallel_size=1": hasattr(trainer.model, "peft_config"),
        "fp16 with a pipeline, whose stages would scale their losses differently; use bf16": (
            trainer.accelerator.mixed_precision == "fp16"
        ),
        f"{type(trainer).__name__}'s own compute_loss with a pipeline, whose last stage alone "
        f"sees a loss and could "
        "count metrics of tokens (SFTTrainer's accuracy and entropy): use FlexSeqTrainer": (
            type(trainer).compute_loss is not Trainer.compute_loss
        ),
        "predict_with_generate with a pipeline: a stage alone cannot generate": getattr(
            training, "predict_with_generate", False
        ),
        f"planner={args.planner!r} with a pipeline; use 'auto', or 'static' with sp_degree ranks "
        f"per chunk": (args.planner not in ("auto", "static")),
        f"strategy={args.strategy!r} with a pipeline, whose chunks are rectangles over their "
        f"prefix; use 'auto', or "
        "'ulysses' with planner='static'": args.strategy not in ("auto", "local", "ulysses"),
        "strategy='ulysses' without planner='static' with a pipeline; give sp_degree, too": (
            args.strategy == "ulysses" and args.planner != "static"
        ),
        f"sync={args.sync!r} with a pipeline; leave it at 'auto'": args.sync != "auto",
        "a model sharded at load with a pipeline: load it whole, and set fsdp=True": any(
            hasattr(module, "set_requires_gradient_sync") for module in trainer.model.modules()
        ),
        "model_init with a pipeline: a trial would begin with stages of the one before": (
            trainer.model_init is not None
        ),
    }.items():
        if there:
            raise NotImplementedError(f"hf_flexseq does not support {what} ({stages})")


def check_divides(stages: int, world: int) -> None:
    """Raise ValueError unless every stage can have as many ranks as the others."""
    if world % stages:
        raise ValueError(
            f"pipeline_parallel_size={stages} does not divide the {world} ranks of the job"
        )
