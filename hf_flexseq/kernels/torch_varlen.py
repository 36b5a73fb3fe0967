"""Attend with the FlashAttention that torch ships for CUDA, on packed sequences.

`torch.nn.attention.varlen` documents this kernel, but its backward belongs to autograd and takes
no merged output and log-sum-exp, and the private ops beneath it (`torch_attn::_varlen_attn`)
gained positional arguments between torch 2.11 and 2.13. So the aten ops below those are called,
with the arguments that every version from 2.11 on shares. They take windows, but no softcap.

Behind these ops stands FlashAttention-2, unless `activate_flash_attention_impl` of
`torch.nn.attention` has put another implementation there. So the registry is asked with every
choice and every forward: what holds for FlashAttention-2 is not taken for granted of another.
FlashAttention-3 has guarantees of its own, any other implementation is refused by name. A version
of torch without the registry has FlashAttention-2 alone.

What the builds have in common is in cuda_flash.py. The slow obvious twin is reference.py;
tests/kernels/test_cuda_kernels.py and scripts/gpu_check.py compare the two.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch.nn import attention

from hf_flexseq.kernels.cuda_flash import (
    FLASH2,
    FLASH3,
    FLASH4_PROBLEM,
    checked_lse,
    nothing_to_read,
    query_bound,
    rows_contiguous,
    window_sizes,
)
from hf_flexseq.kernels.guarantees import Calls, Guarantees
from hf_flexseq.kernels.segments import Segments

_NO_DROPOUT = 0.0
# by the name under which torch's registry has an implementation; None is torch's own
_KNOWN: Mapping[str | None, Guarantees] = {
    None: dataclasses.replace(FLASH2, softcap=False),
    "FA3": dataclasses.replace(FLASH3, softcap=False),
}
_UNDO = "undo it with torch.nn.attention.restore_flash_attention_impl()"
_REASONS: Mapping[str, str] = {"FA4": FLASH4_PROBLEM}


class TorchVarlen:
    """The implementation of FlashAttention that is active in torch."""

    name = "torch_varlen"
    wide_gradients = False

    @property
    def guarantees(self) -> Guarantees:
        """What the active implementation guarantees.

        Raises NotImplementedError for one that is not known here.
        """
        active = active_implementation()
        if active not in _KNOWN:
            raise NotImplementedError(_unknown(active))
        return _KNOWN[active]

    def why_not(self, calls: Calls) -> str | None:
        """Say why this kernel cannot serve such calls, or return None when it can."""
        if calls.device.type == "cuda" and not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no FlashAttention"
        active = active_implementation()
        if active not in _KNOWN:
            return _unknown(active)
        objection = _KNOWN[active].objection(calls)
        if objection is not None and active is not None:
            return f"{active} is active in torch: {objection}; or {_UNDO}"
        return objection

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
        _check_softcap(softcap)
        guarantees = self.guarantees
        if not segments.has_work():
            return nothing_to_read(q)
        before, after = window_sizes(segments)
        # [Tq, H, D], [H, Tq], and what autograd would keep
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            rows_contiguous(q),
            rows_contiguous(k),
            rows_contiguous(v),
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            query_bound(segments),
            segments.max_k,
            _NO_DROPOUT,
            segments.causal,
            False,  # return no debug mask
            scale=scale,
            window_size_left=before,
            window_size_right=after,
        )
        return out, checked_lse(lse, q, segments, guarantees)

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
        [Tk, Hkv, D]."""
        segments.check(q, k, v)
        _check_softcap(softcap)
        if not segments.has_work():
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        before, after = window_sizes(segments)
        # The state of dropout's random numbers, which nothing reads without dropout.
        random_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            rows_contiguous(dout),
            rows_contiguous(q),
            rows_contiguous(k),
            rows_contiguous(v),
            rows_contiguous(out),
            lse.contiguous(),
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            query_bound(segments),
            segments.max_k,
            _NO_DROPOUT,
            segments.causal,
            random_state,
            unused,
            scale=scale,
            window_size_left=before,
            window_size_right=after,
        )
        return dq, dk, dv


def active_implementation() -> str | None:
    """Return the name under which torch's registry has the active implementation of
    FlashAttention, None for torch's own."""
    ask = getattr(attention, "current_flash_attention_impl", None)
    if ask is None:
        return None
    active: str | None = ask()
    return active


def _check_softcap(softcap: float | None) -> None:
    """Assert that a call has no softcap, which torch's operators do not take."""
    assert softcap is None, (
        f"torch_varlen was called with a softcap of {softcap}, which it does not have"
    )


def _unknown(active: str | None) -> str:
    """Say why an implementation that is active in torch is not used, and what to call."""
    reason = _REASONS.get(active or "", "what it guarantees is not known")
    return f"{active} is active in torch, and {reason}; {_UNDO}"
