"""Attend with torch's CPU flash kernel, sequence by sequence.

`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward give and take the log-sum-exp,
accept fewer key heads than query heads, a merged output and log-sum-exp, and every floating dtype.
Two habits of theirs matter here, and a third one in cpu_full.py:

* a last dimension that is not contiguous is read as if it were, without an error, so it is made
  contiguous first;
* for 16-bit inputs the backward adds dk and dv up in 16 bits, over tiles of queries and over the
  heads that share a key head, which at 2,000 tokens has up to five times the error of a plain
  softmax. So the backward runs in float32, for about 1.4 times the time, and leaves its results
  so.

Every short sequence pays for the calls around its kernel, so each tensor is split into sequences
by one call, and the results are copied straight into views of the whole. The kernel leaves its
results tokens first, so those of a sequence alone are the whole, and nothing is copied.

Full and causal sequences are one or two calls of the kernel (cpu_full.py), windows are cut into
blocks (cpu_windows.py). The kernel has no softcap, so that is a blockwise product in torch's
operations (cpu_softcap.py).

Rejected: one padded batch of all sequences, which for long-tailed lengths computes mostly padding;
and a softmax written in Python, which is several times slower and keeps the whole score matrix.

The slow obvious twin is reference.py; tests/kernels/test_kernels.py compares the two.
"""

from collections.abc import Sequence

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.cpu_full import FullCall
from hf_flexseq.kernels.cpu_ops import heads_first, tokens_first
from hf_flexseq.kernels.cpu_softcap import CappedCall
from hf_flexseq.kernels.cpu_windows import WindowCall
from hf_flexseq.kernels.guarantees import Calls, Guarantees
from hf_flexseq.kernels.segments import Segments


class CpuFlash:
    """FlashAttention on the CPU."""

    name = "cpu_flash"
    guarantees = Guarantees(
        device="cpu",
        dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        wide_gradients=True,
        windows=True,
        softcap=True,
    )
    wide_gradients = guarantees.wide_gradients

    def why_not(self, calls: Calls) -> str | None:
        """Say why this kernel cannot serve such calls, or return None when it can."""
        return self.guarantees.objection(calls)

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
        attend = _attend(segments, scale, softcap, q.dtype)
        if len(segments.q_lens) == 1 and q.numel() and k.numel():
            q_all, k_all, v_all = (heads_first(x) for x in (q, k, v))
            whole_out, whole_lse = attend.forward(q_all, k_all, v_all)
            return tokens_first(whole_out).to(q.dtype), whole_lse[0].contiguous()
        out = q.new_empty(q.shape)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype))  # [H, Tq]
        # each tensor as one view [1, heads, n, D] per sequence, lse as [1, H, n]
        sequences = zip(
            _split(q, segments.q_lens),
            _split(out, segments.q_lens),
            _split(k, segments.k_lens),
            _split(v, segments.k_lens),
            lse.unsqueeze(0).split(segments.q_lens, dim=2),
            strict=True,
        )
        for q_i, out_i, k_i, v_i, lse_i in sequences:
            if q_i.numel() and k_i.numel():
                sequence_out, sequence_lse = attend.forward(q_i, k_i, v_i)
                out_i.copy_(sequence_out)
                lse_i.copy_(sequence_lse)
            else:
                out_i.zero_()
                lse_i.fill_(-torch.inf)
        return out, lse

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
        attend = _attend(segments, scale, softcap, lse_dtype(q.dtype))
        # 16-bit inputs are widened, and their gradients stay wide.
        dout, q, k, v, out = (x.to(lse_dtype(x.dtype)) for x in (dout, q, k, v, out))
        if len(segments.q_lens) == 1 and q.numel() and k.numel():
            dout, q, k, v, out = (heads_first(x) for x in (dout, q, k, v, out))
            gradients = attend.backward(dout, q, k, v, out, lse[None])
            dq, dk, dv = (tokens_first(x) for x in gradients)
            return dq, dk, dv
        dq = q.new_empty(q.shape)
        dk = k.new_empty(k.shape)
        dv = v.new_empty(v.shape)
        # each tensor as one view [1, heads, n, D] per sequence, lse as [1, H, n]
        sequences = zip(
            _split(dout, segments.q_lens),
            _split(q, segments.q_lens),
            _split(k, segments.k_lens),
            _split(v, segments.k_lens),
            _split(out, segments.q_lens),
            lse.unsqueeze(0).split(segments.q_lens, dim=2),
            _split(dq, segments.q_lens),
            _split(dk, segments.k_lens),
            _split(dv, segments.k_lens),
            strict=True,
        )
        for dout_i, q_i, k_i, v_i, out_i, lse_i, dq_i, dk_i, dv_i in sequences:
            if q_i.numel() and k_i.numel():
                gradients = attend.backward(dout_i, q_i, k_i, v_i, out_i, lse_i)
                dq_i.copy_(gradients[0])
                dk_i.copy_(gradients[1])
                dv_i.copy_(gradients[2])
            else:
                dq_i.zero_()
                dk_i.zero_()
                dv_i.zero_()
        return dq, dk, dv


def _attend(
    segments: Segments, scale: float, softcap: float | None, dtype: torch.dtype
) -> FullCall | WindowCall | CappedCall:
    """Return how a call attends in each of its sequences.

    dtype: of its tensors. A window that hides nothing is none.
    """
    window = segments.window
    if window is not None and window >= segments.max_k:
        window = None
    if softcap is not None:
        return CappedCall(segments.causal, window, scale, softcap)
    if window is not None:
        return WindowCall(window, scale, dtype, segments.max_q)
    return FullCall(segments.causal, scale)


def _split(x: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """View x [tokens, heads, D] as one [1, heads, n, D] per sequence of n tokens, with the last
    dimension contiguous."""
    views: Sequence[torch.Tensor] = heads_first(x).split(lengths, dim=2)
    return views
