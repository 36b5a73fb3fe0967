"""Options for a run on CPU processes, and a check that all processes found each other."""

import os

import torch
from transformers import TrainingArguments


def device_defaults() -> dict:
    """Return options for the machine at hand.

    Without `use_cpu`, every process of a CPU run believes that it is alone.
    """
    if not on_cpu():
        return {}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        # Left to itself, DeepSpeed asks for a backend that CPU builds of torch do not have.
        import deepspeed

        deepspeed.init_distributed("gloo")
    return {"use_cpu": True}


def on_cpu() -> bool:
    """Return whether there is no accelerator, or one that processes cannot share (mps)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is None or accelerator.type == "mps"


def check_world(args: TrainingArguments) -> None:
    """Refuse processes that do not see each other: all would train and overwrite one model."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if args.world_size != launched:
        raise ValueError(
            f"{launched} processes were launched, but this one sees {args.world_size}: launch "
            "with one of recipes/accelerate_configs (CPU processes need distributed_type: "
            "MULTI_GPU with use_cpu: false)"
        )
