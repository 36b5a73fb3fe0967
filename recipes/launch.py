"""Options for the machine at hand, and a check that all processes found each other."""

import os

import torch
from transformers import TrainingArguments

# Both names are read by torch; the second is the old one.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def device_defaults() -> dict:
    """Return options for the machine at hand.

    Without `use_cpu`, every process of a CPU run believes that it is alone. On a GPU the lengths
    of every micro-batch differ, so the allocator has to reuse the memory of other sizes: its
    segments expand, unless the environment says otherwise.
    """
    if not on_cpu():
        set_allocator()
        return {}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        # Left to itself, DeepSpeed asks for a backend that CPU builds of torch do not have.
        import deepspeed

        deepspeed.init_distributed("gloo")
    return {"use_cpu": True}


def set_allocator() -> None:
    """Let the allocator's segments expand unless the environment has settings for it, and say so
    on the first process. Call before the GPU is used: torch then reads the settings."""
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE
    if os.environ.get("RANK", "0") == "0":
        print(f"{ALLOCATOR_VARIABLES[0]}={EXPANDABLE}: lengths differ from step to step")


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
