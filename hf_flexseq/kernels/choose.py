"""Choose the kernel that serves a device, a dtype and a head size, and say why not the others.

A fixed order per device, fastest first; the first one without an objection is taken. When all
object the user hears every objection: falling back to a plain softmax would be right but so slow
and large that nobody wants it silently.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Protocol

import torch

from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.flash_attn import FlashAttn
from hf_flexseq.kernels.torch_varlen import TorchVarlen

logger = logging.getLogger(__name__)


class Candidate(Kernel, Protocol):
    """A kernel that can say why it does not fit."""

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Say why this kernel cannot serve such inputs, and what to change; None when it can."""
        ...


CANDIDATES: Mapping[str, tuple[Candidate, ...]] = {  # by device type, in order of preference
    "cuda": (FlashAttn(), TorchVarlen()),
    "cpu": (CpuFlash(),),
}


@functools.cache
def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Return the fastest kernel for inputs of `dtype` and `head_dim` on `device`.

    The choice is logged once at INFO, with the reasons. Raises ValueError, with every kernel's
    objection, when there is none.
    """
    for kernel in _candidates(device):
        if kernel.why_not(device, dtype, head_dim) is None:
            logger.info("attention kernel: %s", "; ".join(explain(device, dtype, head_dim)))
            return kernel
    raise ValueError(
        f"no attention kernel for {dtype} with head size {head_dim} on {device}: "
        + "; ".join(explain(device, dtype, head_dim))
    )


def explain(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """List one line per kernel of the device, in order of preference: chosen, not needed, or the
    objection."""
    lines = []
    is_chosen = False
    for kernel in _candidates(device):
        objection = kernel.why_not(device, dtype, head_dim)
        if objection is not None:
            lines.append(f"{kernel.name}: {objection}")
        elif is_chosen:
            lines.append(f"{kernel.name}: not needed")
        else:
            lines.append(f"{kernel.name}: chosen")
            is_chosen = True
    return lines


def _candidates(device: torch.device) -> tuple[Candidate, ...]:
    if device.type not in CANDIDATES:
        raise ValueError(
            f"no attention kernel for device type {device.type!r}; use one of "
            f"{', '.join(CANDIDATES)}"
        )
    return CANDIDATES[device.type]
