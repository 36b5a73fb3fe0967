"""Attend with the FlashAttention-3 package (arXiv 2407.08608) on packed sequences, on Hopper.

Importing its module `flash_attn_interface` registers the operators `flash_attn_3::fwd` and
`flash_attn_3::bwd`, which are called here by the names of their arguments. The Python functions
above them belong to autograd, or have changed the order of their arguments between releases. A
release whose operators lack an argument, and a build without a backward or without packed
sequences, are refused by name.

The backward takes any output and log-sum-exp, and so the merged ones.

Written from the operators' schemas and sources; it has never run on a GPU. The common part of
FlashAttention's builds is in cuda_flash.py. The reference implementation is
tests/kernels/reference.py; test_cuda_kernels.py there checks the arguments against it on a
stand-in, and scripts/gpu_check.py the numbers on a GPU.

Rejected: FlashAttention-4 (`flash_attn.cute`). Its forward returns two tensors or four, depending
on the release, and 4.0.0b13 accesses memory that is not its own in the backward of a sequence
without queries, which rings have, at head size 256 on Blackwell (flash-attention#2562).
"""

import functools
import importlib
from collections.abc import Mapping

import torch

from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.capabilities import CallKind
from hf_flexseq.kernels.cuda_flash import (
    FLASH3,
    FlashPackage,
    shared_options,
)

_INTERFACE = "flash_attn_interface"
_LAUNCH = (
    "cu_seqlens_q", "cu_seqlens_k",
    "max_seqlen_q", "max_seqlen_k",
    "softmax_scale", "is_causal",
    "window_size_left", "window_size_right", "softcap",
)  # fmt: skip
# What is passed to each operator: first by position, in this order, then by name.
_BY_POSITION: Mapping[str, tuple[str, ...]] = {
    "fwd": ("q", "k", "v"),
    "bwd": ("dout", "q", "k", "v", "out", "softmax_lse"),
}
_BY_NAME: Mapping[str, tuple[str, ...]] = {
    "fwd": (*_LAUNCH, "num_splits"),
    "bwd": (*_LAUNCH, "dq", "dk", "dv", "deterministic"),
}
# Multiprocessors that a call leaves to transfers under way, which would wait for its end: its
# thread blocks are as many as there are multiprocessors, and stay.
MARGIN = 8
# Flags of a build, and what is missing under each.
_MISSING: Mapping[str, str] = {
    "FLASHATTENTION_DISABLE_BACKWARD": "backward",
    "FLASHATTENTION_DISABLE_VARLEN": "packed sequences",
}
_MISSING_WINDOWS: Mapping[str, str] = {"FLASHATTENTION_DISABLE_LOCAL": "sliding windows"}
_MISSING_SOFTCAP: Mapping[str, str] = {"FLASHATTENTION_DISABLE_SOFTCAP": "softcap"}


class FlashAttn3(FlashPackage):
    """FlashAttention-3 from its package."""

    name = "flash_attn3"
    capabilities = FLASH3

    def reason_unsupported(self, calls: CallKind) -> str | None:
        """Return why this kernel cannot serve such calls, or None if it can."""
        problem = package_problem()
        return problem or FLASH3.reason_unsupported(calls) or _lacking(calls)

    def launch_forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CudaFlash.launch_forward`."""
        # [Tq, H, D], [H, Tq], and the parts of split keys, here none
        out, lse, *_ = torch.ops.flash_attn_3.fwd(
            call.q, call.k, call.v, **self.launch_options(call), num_splits=1
        )
        return out, lse

    def call_backward(self, *tensors: torch.Tensor, **options: object) -> None:
        """See `FlashPackage.call_backward`."""
        torch.ops.flash_attn_3.bwd(*tensors, **options)

    def launch_options(self, call: KernelCall) -> dict[str, object]:
        """See `FlashPackage.launch_options`."""
        options = {
            **shared_options(call),
            "max_seqlen_q": call.segments.max_q,
            "is_causal": call.segments.causal,
        }
        if call.beside_transfers and _has_margin():
            options["sm_margin"] = MARGIN
        return options


@functools.cache
def package_problem() -> str | None:
    """Return why the package cannot be used at all, or None if it can."""
    try:
        importlib.import_module(_INTERFACE)
    # A build for another torch raises ImportError, too, with the missing symbol.
    except ImportError as error:
        return f"the FlashAttention-3 package cannot be imported ({error})"
    for name in ("fwd", "bwd"):
        problem = _operator_problem(name)
        if problem is not None:
            return problem
    return _without(_MISSING)


def _operator_problem(name: str) -> str | None:
    """Return why the operator `flash_attn_3::name` cannot be called, or None if it can."""
    packet = getattr(torch.ops.flash_attn_3, name, None)
    if packet is None:
        return f"{_INTERFACE} registers no operator flash_attn_3::{name}"
    arguments = [argument.name for argument in packet.default._schema.arguments]
    first = _BY_POSITION[name]
    if tuple(arguments[: len(first)]) != first:
        return f"flash_attn_3::{name} does not begin with the arguments {', '.join(first)}"
    lacking = [argument for argument in _BY_NAME[name] if argument not in arguments]
    if lacking:
        return f"flash_attn_3::{name} has no argument {', '.join(lacking)}; install a newer one"
    return None


@functools.cache
def _has_margin() -> bool:
    """Tell whether both operators can leave multiprocessors to others."""
    operators = (getattr(torch.ops.flash_attn_3, name) for name in _BY_NAME)
    return all("int sm_margin" in str(one.default._schema) for one in operators)


def _lacking(calls: CallKind) -> str | None:
    """Return why the build cannot serve such calls, or None if it can."""
    features = _MISSING_WINDOWS if calls.window else {}
    return _without({**features, **(_MISSING_SOFTCAP if calls.softcap else {})})


def _without(features: Mapping[str, str]) -> str | None:
    """Say which of the features, by flag, the build was made without."""
    try:
        config = importlib.import_module("flash_attn_config")
    except ImportError:
        return None
    flags = config.CONFIG["build_flags"]
    for flag, missing in features.items():
        if flags.get(flag, False):
            return f"this build has no {missing}; build it without {flag}"
    return None
