"""Attend with torch's CPU flash kernel, sequence by sequence.

`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward give and take the log-sum-exp,
accept fewer key heads than query heads, a merged output and log-sum-exp, and every floating dtype.
Three habits of theirs matter here:

* `is_causal` aligns query 0 with key 0; where a causal sequence has earlier keys too, these are a
  call of their own and the two results are merged, in float32, so that the rounding to 16 bits
  remains a single one;
* a last dimension that is not contiguous is read as if it were, without an error, so it is made
  contiguous first;
* for 16-bit inputs the backward adds dk and dv up in 16 bits, over tiles of queries and over the
  heads that share a key head, which at 2,000 tokens has up to five times the error of a plain
  softmax. So the backward runs in float32, for about 1.4 times the time, and leaves its results
  so.

Every short sequence pays for the calls around its kernel, so each tensor is split into sequences
by one call, and the results are copied straight into views of the whole. The kernel leaves its
results tokens first, so those of a sequence alone are the whole, and nothing is copied.

Windows are cut into blocks (cpu_windows.py). The kernel has no softcap, so that is a blockwise
product in torch's operations (cpu_softcap.py).

Rejected: one padded batch of all sequences, which for long-tailed lengths computes mostly padding;
and a softmax written in Python, which is several times slower and keeps the whole score matrix.

The slow obvious twin is reference.py; tests/kernels/test_kernels.py compares the two.
"""

from collections.abc import Sequence

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.cpu_ops import BACKWARD, FORWARD, NO_DROPOUT
from hf_flexseq.kernels.cpu_softcap import CappedCall
from hf_flexseq.kernels.cpu_windows import WindowCall
from hf_flexseq.kernels.guarantees import Calls, Guarantees
from hf_flexseq.kernels.merge import merge_into
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
            q_all, k_all, v_all = (_heads_first(x) for x in (q, k, v))
            whole_out, whole_lse = attend.forward(q_all, k_all, v_all)
            return _tokens_first(whole_out).to(q.dtype), whole_lse[0].contiguous()
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
            dout, q, k, v, out = (_heads_first(x) for x in (dout, q, k, v, out))
            gradients = attend.backward(dout, q, k, v, out, lse[None])
            dq, dk, dv = (_tokens_first(x) for x in gradients)
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


class _PlainCall:
    """Attention of one call's sequences in which a query reads all keys, or all up to its own."""

    def __init__(self, causal: bool, scale: float) -> None:
        self._causal = causal
        self._scale = scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend in one sequence: q [1, H, n, D], k and v [1, Hkv, m, D] -> out [1, H, n, D], lse
        [1, H, n]."""
        earlier = k.shape[2] - q.shape[2]  # keys before the first query
        if not self._causal or not earlier:
            out, lse = FORWARD(q, k, v, NO_DROPOUT, self._causal, scale=self._scale)
            return out, lse

        # Both results stay wide, and only the merged one is rounded.
        wide = lse_dtype(q.dtype)
        q = q.to(wide)
        k = k.to(wide)
        v = v.to(wide)
        # 1. the earlier keys, which every query reads
        out_before, lse_before = FORWARD(
            q, k[:, :, :earlier], v[:, :, :earlier], NO_DROPOUT, False, scale=self._scale
        )
        # 2. the queries' own keys, causally
        out_own, lse_own = FORWARD(
            q, k[:, :, earlier:], v[:, :, earlier:], NO_DROPOUT, True, scale=self._scale
        )
        merge_into(out_before, lse_before, out_own, lse_own)
        return out_before, lse_before

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients in one sequence: dout, q and out [1, H, n, D], k and v [1, Hkv, m, D],
        lse [1, H, n] -> dq [1, H, n, D], dk and dv [1, Hkv, m, D]."""
        earlier = k.shape[2] - q.shape[2]  # keys before the first query
        if not self._causal or not earlier:
            dq, dk, dv = BACKWARD(
                dout, q, k, v, out, lse, NO_DROPOUT, self._causal, scale=self._scale
            )
            return dq, dk, dv

        # 1. the earlier keys, which every query reads
        k_before = k[:, :, :earlier]  # [1, Hkv, earlier, D]
        v_before = v[:, :, :earlier]
        dq_before, dk_before, dv_before = BACKWARD(
            dout, q, k_before, v_before, out, lse, NO_DROPOUT, False, scale=self._scale
        )
        # 2. the queries' own keys, causally
        k_own = k[:, :, earlier:]  # [1, Hkv, n, D]
        v_own = v[:, :, earlier:]
        dq_own, dk_own, dv_own = BACKWARD(
            dout, q, k_own, v_own, out, lse, NO_DROPOUT, True, scale=self._scale
        )
        dq = dq_before.add_(dq_own)
        dk = _joined(dk_before, dk_own)  # [1, Hkv, earlier + n, D]
        dv = _joined(dv_before, dv_own)
        return dq, dk, dv


def _attend(
    segments: Segments, scale: float, softcap: float | None, dtype: torch.dtype
) -> _PlainCall | WindowCall | CappedCall:
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
    return _PlainCall(segments.causal, scale)


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Put the tokens of two [1, heads, n, D] behind each other, tokens first in memory."""
    rows = torch.cat((_tokens_first(first), _tokens_first(second)))  # [n + m, heads, D]
    return _heads_first(rows)


def _split(x: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """View x [tokens, heads, D] as one [1, heads, n, D] per sequence of n tokens, with the last
    dimension contiguous."""
    views: Sequence[torch.Tensor] = _heads_first(x).split(lengths, dim=2)
    return views


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """View x [tokens, heads, D] as [1, heads, tokens, D], with the last dimension contiguous."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    # [tokens, heads, D] -> [heads, tokens, D] -> [1, heads, tokens, D]
    return x.transpose(0, 1).unsqueeze(0)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Return x [1, heads, tokens, D] as contiguous [tokens, heads, D]: a view of what the kernel
    leaves."""
    return x.squeeze(0).transpose(0, 1).contiguous()
