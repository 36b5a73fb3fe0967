"""Attend with the FlashAttention that torch ships for CUDA, on packed sequences.

`torch.nn.attention.varlen` documents this kernel, but its backward belongs to autograd and takes
no merged output and log-sum-exp, and the private ops beneath it (`torch_attn::_varlen_attn`)
gained positional arguments between torch 2.11 and 2.13. So the aten ops below those are called,
with the arguments that every version from 2.11 on shares. They take windows, but no softcap.

These ops run FlashAttention-2, unless `activate_flash_attention_impl` of `torch.nn.attention` has
registered another implementation. So the registry is asked with every choice and every forward:
another implementation may lack FlashAttention-2's guarantees. FlashAttention-3 has separate
capabilities, any other implementation is refused by name. A version of torch without the registry
has FlashAttention-2 alone.

The common part of the builds is in cuda_flash.py. The reference implementation is
tests/kernels/reference.py; test_cuda_kernels.py there and scripts/gpu_check.py compare the two.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch.nn import attention

from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.capabilities import CallKind, KernelCapabilities
from hf_flexseq.kernels.cuda_flash import (
    FLASH2,
    FLASH3,
    FLASH4_PROBLEM,
    CudaFlash,
    query_bound,
    window_sizes,
)

_NO_DROPOUT = 0.0
# by the name under which torch's registry has an implementation; None is torch's own
_KNOWN: Mapping[str | None, KernelCapabilities] = {
    None: dataclasses.replace(FLASH2, softcap=False),
    "FA3": dataclasses.replace(FLASH3, softcap=False),
}
_UNDO = "undo it with torch.nn.attention.restore_flash_attention_impl()"
_REASONS: Mapping[str, str] = {"FA4": FLASH4_PROBLEM}


class TorchVarlen(CudaFlash):
    """The implementation of FlashAttention that is active in torch."""

    name = "torch_varlen"

    @property
    def capabilities(self) -> KernelCapabilities:
        """Capabilities of the active implementation. Raises NotImplementedError if unknown."""
        active = active_implementation()
        if active not in _KNOWN:
            raise NotImplementedError(_unknown(active))
        return _KNOWN[active]

    def reason_unsupported(self, calls: CallKind) -> str | None:
        """Return why this kernel cannot serve such calls, or None if it can."""
        if calls.device.type == "cuda" and not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no FlashAttention"
        active = active_implementation()
        if active not in _KNOWN:
            return _unknown(active)
        reason = _KNOWN[active].reason_unsupported(calls)
        if reason is not None and active is not None:
            return f"{active} is active in torch: {reason}; or {_UNDO}"
        return reason

    def launch_forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CudaFlash.launch_forward`."""
        # [Tq, H, D], [H, Tq], and what autograd would keep
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            call.q,
            call.k,
            call.v,
            *_lengths(call),
            False,  # return no debug mask
            **_options(call),
        )
        return out, lse

    def launch_backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `CudaFlash.launch_backward`."""
        # The state of dropout's random numbers, which nothing reads without dropout.
        random_state = torch.empty(2, dtype=torch.uint64, device=dout.device)
        unused = torch.empty(0, device=dout.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout,
            call.q,
            call.k,
            call.v,
            out,
            lse,
            *_lengths(call),
            random_state,
            unused,
            **_options(call),
        )
        return dq, dk, dv


def _lengths(call: KernelCall) -> tuple[object, ...]:
    """Return the shared arguments by position: lengths, dropout and causality."""
    segments = call.segments
    return (
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        query_bound(segments),
        segments.max_k,
        _NO_DROPOUT,
        segments.causal,
    )


def _options(call: KernelCall) -> dict[str, object]:
    """Return the arguments that forward and backward share by name.

    Asserts that the call has no softcap, which torch's operators do not take.
    """
    assert call.softcap is None, (
        f"torch_varlen was called with a softcap of {call.softcap}, which it does not have"
    )
    before, after = window_sizes(call.segments)
    return {"scale": call.scale, "window_size_left": before, "window_size_right": after}


def active_implementation() -> str | None:
    """Return the registered name of torch's active FlashAttention, None for torch's own."""
    ask = getattr(attention, "current_flash_attention_impl", None)
    if ask is None:
        return None
    active: str | None = ask()
    return active


def _unknown(active: str | None) -> str:
    """Return why an implementation that is active in torch is not used, and what to call."""
    reason = _REASONS.get(active or "", "what it guarantees is not known")
    return f"{active} is active in torch, and {reason}; {_UNDO}"
