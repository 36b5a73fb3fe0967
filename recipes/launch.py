"""What a run on CPU processes needs to be told, and a check that all processes found each
other."""

import os

import torch
from transformers import TrainingArguments


def device_defaults() -> dict:
    """Options for the machine at hand. Without `use_cpu`, every process of a CPU run believes that
    it is alone."""
    if not on_cpu():
        return {}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        # Left to itself, DeepSpeed asks for a backend that CPU builds of torch do not have.
        import deepspeed

        deepspeed.init_distributed("gloo")
    return {"use_cpu": True}


def on_cpu() -> bool:
    """No accelerator, or one that processes cannot share (mps)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is None or accelerator.type == "mps"


def check_world(args: TrainingArguments) -> None:
    """Processes that do not see each other would all train, and overwrite, the same model."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if args.world_size != launched:
        raise ValueError(
            f"{launched} processes were launched, but this one sees {args.world_size}: launch "
            f"with one of "
            "recipes/accelerate_configs (CPU processes need distributed_type: MULTI_GPU with "
            "use_cpu: false)"
        )
