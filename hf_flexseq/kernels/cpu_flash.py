"""Attend with torch's CPU flash kernel, sequence by sequence.

`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward give and take the log-sum-exp,
accept fewer key heads than query heads, a merged output and log-sum-exp, and every floating dtype.
Two habits of theirs matter here, and others in cpu_pieces.py:

* a last dimension that is not contiguous is read as if it were, without an error, so it is made
  contiguous first;
* for 16-bit inputs the backward adds dk and dv up in 16 bits, over tiles of queries and over the
  heads that share a key head, which at 2,000 tokens has up to five times the error of a plain
  softmax. So the backward runs in float32, for about 1.4 times the time, and leaves its results
  so.

Every short sequence pays for the calls around its kernel, so each tensor is split into sequences
by one call, and the results are copied straight into views of the whole.

Rejected: one padded batch of all sequences, which for long-tailed lengths computes mostly padding;
and a softmax written in Python, which is several times slower and keeps the whole score matrix.

tests/kernels/test_kernels.py compares it with the reference implementation, reference.py there.
"""

from collections.abc import Iterator, Sequence

import torch

from hf_flexseq.kernels import KernelCall, lse_dtype
from hf_flexseq.kernels.capabilities import CallKind, KernelCapabilities
from hf_flexseq.kernels.cpu_pieces import PiecewiseAttention, Tensors, heads_first


class CpuFlash:
    """FlashAttention on the CPU."""

    name = "cpu_flash"
    capabilities = KernelCapabilities(
        device="cpu",
        dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        wide_gradients=True,
        softcap=True,
    )
    wide_gradients = capabilities.wide_gradients

    def reason_unsupported(self, calls: CallKind) -> str | None:
        """Return why this kernel cannot serve such calls, or None if it can."""
        return self.capabilities.reason_unsupported(calls)

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`: -> out [Tq, H, D], lse [H, Tq]."""
        call.check()
        attention = _attention(call)
        q, k, v, segments, *_ = call
        out = q.new_zeros(q.shape)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype(q.dtype))  # [H, Tq]
        of_queries = _split((q, out), segments.q_lens)
        of_keys = _split((k, v), segments.k_lens)
        lses = lse.unsqueeze(0).split(segments.q_lens, dim=2)  # [1, H, n] per sequence
        for (q_i, out_i), keys, lse_i in zip(of_queries, of_keys, lses, strict=True):
            if q_i.numel() and keys[0].numel():
                sequence_out, sequence_lse = attention.forward(q_i, *keys)
                out_i.copy_(sequence_out)
                lse_i.copy_(sequence_lse)
        return out, lse

    def backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`: dout, out [Tq, H, D], lse [H, Tq] -> dq, dk, dv as q, k, v."""
        call.check()
        attention = _attention(call)
        segments = call.segments
        # 16-bit inputs are widened, and their gradients stay wide.
        tensors = (dout, call.q, call.k, call.v, out)
        dout, q, k, v, out = (x.to(lse_dtype(x.dtype)) for x in tensors)
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        of_queries = _split((dout, q, out, dq), segments.q_lens)
        of_keys = _split((k, v, dk, dv), segments.k_lens)
        lses = lse.unsqueeze(0).split(segments.q_lens, dim=2)  # [1, H, n] per sequence
        for queries, keys, lse_i in zip(of_queries, of_keys, lses, strict=True):
            (dout_i, q_i, out_i, dq_i), (k_i, v_i, dk_i, dv_i) = queries, keys
            if q_i.numel() and k_i.numel():
                found = attention.backward(dout_i, q_i, k_i, v_i, out_i, lse_i)
                for target, gradient in zip((dq_i, dk_i, dv_i), found, strict=True):
                    target.copy_(gradient)
        return dq, dk, dv


def _attention(call: KernelCall) -> PiecewiseAttention:
    """Return how a call attends in each of its sequences."""
    return PiecewiseAttention(
        causal=call.segments.causal,
        window=call.segments.window,
        scale=call.scale,
        softcap=call.softcap,
    )


def _split(tensors: Tensors, lengths: Sequence[int]) -> Iterator[Tensors]:
    """View each x [tokens, heads, D] as [1, heads, n, D] by sequence of n tokens, D contiguous."""
    return zip(*(heads_first(x).split(lengths, dim=2) for x in tensors), strict=True)
