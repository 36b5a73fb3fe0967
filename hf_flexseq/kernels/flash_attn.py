"""Attend with the flash-attn package (FlashAttention-2, arXiv 2307.08691) on packed sequences.

Its low-level varlen functions are called, because the public ones belong to autograd and take no
merged output and log-sum-exp in the backward. Their Python signature and the [heads, tokens]
layout of the log-sum-exp date from 2.7; older releases are refused by name instead of being told
apart by guesses. FlashAttention-3 and -4 are other packages.

What the builds of these kernels have in common is in cuda_flash.py. The slow obvious twin is
reference.py; tests/kernels/test_cuda_kernels.py and scripts/gpu_check.py compare the two.
"""

import functools
from types import ModuleType

import torch

from hf_flexseq.kernels.cuda_flash import (
    FLASH2,
    checked_lse,
    nothing_to_read,
    query_bound,
    rows_contiguous,
    window_sizes,
)
from hf_flexseq.kernels.guarantees import Calls
from hf_flexseq.kernels.segments import Segments

_OLDEST = (2, 7)  # release of the package


class FlashAttn:
    """FlashAttention-2 from the flash-attn package."""

    name = "flash_attn"
    guarantees = FLASH2
    wide_gradients = FLASH2.wide_gradients

    def why_not(self, calls: Calls) -> str | None:
        """Say why this kernel cannot serve such calls, or return None when it can."""
        problem = package_problem()
        return problem or FLASH2.objection(calls)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`: q [Tq, H, D], k and v [Tk, Hkv, D] -> out [Tq, H, D], lse
        [H, Tq]."""
        segments.check(q, k, v)
        if not segments.has_work():
            return nothing_to_read(q)
        # [Tq, H, D], [H, Tq], and what autograd would keep
        out, lse, *_ = _interface()._flash_attn_varlen_forward(
            rows_contiguous(q),
            rows_contiguous(k),
            rows_contiguous(v),
            **_launch(segments, scale, softcap),
            return_softmax=False,
        )
        return out, checked_lse(lse, q, segments, FLASH2)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`: dout and out [Tq, H, D], lse [H, Tq] -> dq [Tq, H, D], dk and dv
        [Tk, Hkv, D].

        Deterministic under `torch.use_deterministic_algorithms(True)`.
        """
        segments.check(q, k, v)
        if not segments.has_work():
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        _interface()._flash_attn_varlen_backward(
            dout.contiguous(),
            rows_contiguous(q),
            rows_contiguous(k),
            rows_contiguous(v),
            rows_contiguous(out),
            lse.contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            **_launch(segments, scale, softcap),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def _launch(segments: Segments, scale: float, softcap: float | None) -> dict[str, object]:
    """Collect the arguments that forward and backward share, by the package's names."""
    before, after = window_sizes(segments)
    return {
        "cu_seqlens_q": segments.cu_seqlens_q,
        "cu_seqlens_k": segments.cu_seqlens_k,
        "max_seqlen_q": query_bound(segments),
        "max_seqlen_k": segments.max_k,
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": segments.causal,
        "window_size_left": before,
        "window_size_right": after,
        "softcap": softcap or 0.0,
        "alibi_slopes": None,
    }


@functools.cache
def package_problem() -> str | None:
    """Say why the package cannot be used at all, or return None when it can."""
    try:
        import flash_attn

        _interface()
    # A build for another torch raises ImportError, too, with the missing symbol.
    except ImportError as error:
        return f"the flash-attn package cannot be imported ({error})"
    version = tuple(int(part) for part in flash_attn.__version__.split(".")[:2])
    if version < _OLDEST:
        return f"flash-attn {flash_attn.__version__} is older than 2.7"
    return None


def _interface() -> ModuleType:
    from flash_attn import flash_attn_interface

    interface: ModuleType = flash_attn_interface
    return interface
