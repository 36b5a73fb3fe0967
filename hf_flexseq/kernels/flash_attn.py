"""Attend with the flash-attn package (FlashAttention-2, arXiv 2307.08691) on packed sequences.

Its low-level varlen functions are called, because the public ones belong to autograd and take no
merged output and log-sum-exp in the backward. Their Python signature and the [heads, tokens]
layout of the log-sum-exp date from 2.7; older releases are refused by name instead of being told
apart by guesses. FlashAttention-3 and -4 are other packages.

The common part of these kernels' builds is in cuda_flash.py. The reference implementation is
tests/kernels/reference.py; test_cuda_kernels.py there and scripts/gpu_check.py compare the two.
"""

import functools
from types import ModuleType

import torch

from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.capabilities import CallKind
from hf_flexseq.kernels.cuda_flash import (
    FLASH2,
    FlashPackage,
    query_bound,
    shared_options,
)

_OLDEST = (2, 7)  # release of the package


class FlashAttn(FlashPackage):
    """FlashAttention-2 from the flash-attn package."""

    name = "flash_attn"
    capabilities = FLASH2

    def reason_unsupported(self, calls: CallKind) -> str | None:
        """Return why this kernel cannot serve such calls, or None if it can."""
        problem = package_problem()
        return problem or FLASH2.reason_unsupported(calls)

    def launch_forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CudaFlash.launch_forward`."""
        # [Tq, H, D], [H, Tq], and what autograd would keep
        out, lse, *_ = _interface()._flash_attn_varlen_forward(
            call.q, call.k, call.v, **self.launch_options(call), return_softmax=False
        )
        return out, lse

    def call_backward(self, *tensors: torch.Tensor, **options: object) -> None:
        """See `FlashPackage.call_backward`."""
        dout, *others = tensors
        _interface()._flash_attn_varlen_backward(dout.contiguous(), *others, **options)

    def launch_options(self, call: KernelCall) -> dict[str, object]:
        """See `FlashPackage.launch_options`."""
        return {
            **shared_options(call),
            "max_seqlen_q": query_bound(call.segments),
            "dropout_p": 0.0,
            "causal": call.segments.causal,
            "alibi_slopes": None,
        }


@functools.cache
def package_problem() -> str | None:
    """Return why the package cannot be used at all, or None if it can."""
    try:
        import flash_attn

        interface = _interface()
    # A build for another torch raises ImportError, too, with the missing symbol.
    except ImportError as error:
        return f"the flash-attn package cannot be imported ({error})"
    version = tuple(int(part) for part in flash_attn.__version__.split(".")[:2])
    if version < _OLDEST:
        return f"flash-attn {flash_attn.__version__} is older than 2.7"
    if getattr(interface, "USE_TRITON_ROCM", False):
        return (
            "flash-attn's Triton kernels for AMD ignore windows and softcaps; unset "
            "FLASH_ATTENTION_TRITON_AMD_ENABLE"
        )
    return None


def _interface() -> ModuleType:
    from flash_attn import flash_attn_interface

    interface: ModuleType = flash_attn_interface
    return interface
