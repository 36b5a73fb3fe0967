"""The gradients of a step where accelerate leaves them, and whether its optimizer took them."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

ALL_BY_NORM = "all parameters (by DeepSpeed's norm)"
_WRAPPED = "module."  # what DDP and the wrapper of a stage put before every name


def gradients_of(model: nn.Module, accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """Return this rank's gradients by the names of their parameters, after the last backward of a
    step and before its optimizer step.

    model: as accelerate has wrapped it, and as the step ran it.

    DeepSpeed steps within the last backward and then has no gradients any more, but the norm of
    all of them, which names none; {} if it computes none.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _norm_of_all(model, accelerator.device)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name.removeprefix(_WRAPPED)] = parameter.grad
    return gradients


def _norm_of_all(engine: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Return DeepSpeed's norm of all gradients, a scalar; NaN for its -1, which is not finite."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return {}
    if not isinstance(norm, torch.Tensor):
        norm = torch.full((), float(norm), device=device)
    return {ALL_BY_NORM: norm.where(norm >= 0, torch.nan)}


def step_was_skipped(accelerator: Accelerator) -> bool:
    """Tell if fp16's loss scaling has made the optimizer skip its last step. DeepSpeed also skips
    steps without a loss scale, if a gradient is not finite."""
    if not accelerator.optimizer_step_was_skipped:
        return False
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return not is_deepspeed or accelerator.mixed_precision == "fp16"
