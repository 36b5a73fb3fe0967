"""Choose the kernel that serves a device, a dtype, a head size and a kind of attention layer, and
state why the others do not serve.

A fixed order per device, fastest first; the first one without a reason against it is taken. If all
have one, the user reads every reason: falling back to a plain softmax would be right but so slow
and large that it must not happen silently.

A package that is installed and not used has its reason in the list, too.

The device alone decides the operations between kernel calls (`fused_operations.py`): Triton's
kernels on CUDA, where Triton can start, and torch's operations everywhere else.
"""

import functools
import logging
import os
import shutil
import sysconfig
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Protocol

import torch

from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.capabilities import CallKind, KernelCapabilities
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.cuda_flash import FLASH4_PROBLEM
from hf_flexseq.kernels.flash_attn import FlashAttn
from hf_flexseq.kernels.flash_attn3 import FlashAttn3
from hf_flexseq.kernels.fused_operations import Fused, TorchFused
from hf_flexseq.kernels.torch_varlen import TorchVarlen

logger = logging.getLogger(__name__)


class Candidate(Kernel, Protocol):
    """A kernel that states its capabilities and why it does not serve some calls."""

    @property
    def capabilities(self) -> KernelCapabilities:
        """Capabilities for every call that it serves."""
        ...

    def reason_unsupported(self, calls: CallKind) -> str | None:
        """Return why this kernel cannot serve such calls and what to change; None if it can."""
        ...


CANDIDATES: Mapping[str, tuple[Candidate, ...]] = {  # by device type, in order of preference
    "cuda": (FlashAttn3(), FlashAttn(), TorchVarlen()),
    "cpu": (CpuFlash(),),
}
# by device type: a distribution that is not used where it is installed, and why
_NOT_USED: Mapping[str, Mapping[str, str]] = {
    "cuda": {"flash-attn-4": FLASH4_PROBLEM},
}


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    window: bool = False,
    softcap: bool = False,
) -> Kernel:
    """Return the fastest kernel for inputs of `dtype` and `head_dim` on `device`.

    window, softcap: whether queries are kept from keys that are too far before them, and whether
    scores are capped.

    The choice is logged once at INFO, with the reasons. Raises ValueError, with every kernel's
    reason, when there is none.
    """
    calls = CallKind(device, dtype, head_dim, window, softcap)
    lines = tuple(explain(calls))
    for kernel in _candidates(calls.device):
        if kernel.reason_unsupported(calls) is None:
            log_once("attention kernel", lines)
            return kernel
    raise ValueError(f"no attention kernel for {calls} on {calls.device}: " + "; ".join(lines))


def explain(calls: CallKind) -> list[str]:
    """List one line per kernel of the device, in order of preference: chosen, not needed, or the
    reason; then one per package that is installed and not used."""
    lines = []
    is_chosen = False
    for kernel in _candidates(calls.device):
        reason = kernel.reason_unsupported(calls)
        if reason is not None:
            lines.append(f"{kernel.name}: {reason}")
        elif is_chosen:
            lines.append(f"{kernel.name}: not needed")
        else:
            lines.append(f"{kernel.name}: chosen")
            is_chosen = True
    for package, reason in _NOT_USED.get(calls.device.type, {}).items():
        if _is_installed(package):
            lines.append(f"{package}: not used, for {reason}")
    return lines


def capabilities(calls: CallKind) -> list[str]:
    """List the capabilities of each kernel that serves such inputs, in order of preference."""
    return [
        f"{kernel.name}: {kernel.capabilities.text()}"
        for kernel in _candidates(calls.device)
        if kernel.reason_unsupported(calls) is None
    ]


def choose_fused(device: torch.device) -> Fused:
    """Return the operations between kernel calls for a device; on CUDA the choice is logged."""
    if device.type != "cuda":
        return TorchFused()
    return _fused_for_cuda()


def reason_without_triton() -> str | None:
    """Return why Triton's kernels cannot serve on CUDA and what to install; None if they can."""
    if util.find_spec("triton") is None:
        return "triton is not installed; install the version that this torch names as its own"
    # Triton compiles its own launcher, once for each machine.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton finds no C compiler; install gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "triton needs Python.h; install Python's development headers"
    return None


@functools.cache
def _fused_for_cuda() -> Fused:
    """Return the implementation for CUDA, and log which it is."""
    reason = reason_without_triton()
    if reason is not None:
        logger.warning("merging and packing take several launches each: %s", reason)
        return TorchFused()
    from hf_flexseq.kernels.triton_fused import TritonFused

    logger.info("merging and packing: by Triton kernels")
    return TritonFused()


def _candidates(device: torch.device) -> tuple[Candidate, ...]:
    if device.type not in CANDIDATES:
        raise ValueError(
            f"no attention kernel for device type {device.type!r}; use one of "
            f"{', '.join(CANDIDATES)}"
        )
    return CANDIDATES[device.type]


@functools.cache
def log_once(what: str, lines: tuple[str, ...]) -> None:
    """Log a choice, with the reasons, unless the same was logged before. what: what was chosen."""
    logger.info("%s: %s", what, "; ".join(lines))


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
