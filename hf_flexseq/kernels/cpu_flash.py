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
by one call, and the results are copied straight into views of the whole. The kernel leaves its
results tokens first, so the results of a single sequence are returned without a copy.

Rejected: one padded batch of all sequences, which for long-tailed lengths computes mostly padding;
and a softmax written in Python, which is several times slower and keeps the whole score matrix.

tests/kernels/test_kernels.py compares it with the reference implementation, reference.py there.
"""

from collections.abc import Sequence

import torch

from hf_flexseq.kernels import KernelCall, lse_dtype
from hf_flexseq.kernels.capabilities import CallKind, KernelCapabilities
from hf_flexseq.kernels.cpu_pieces import PiecewiseAttention, heads_first, tokens_first


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
        if _is_one_sequence(call):
            whole_out, whole_lse = attention.forward(*(heads_first(x) for x in (q, k, v)))
            return tokens_first(whole_out).to(q.dtype), whole_lse[0].contiguous()
        out = q.new_empty(q.shape)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype))  # [H, Tq]
        # each tensor as one view [1, heads, n, D] per sequence, lse as [1, H, n]
        sequences = zip(
            _split(q, segments.q_lens),
            _split(k, segments.k_lens),
            _split(v, segments.k_lens),
            _split(out, segments.q_lens),
            lse.unsqueeze(0).split(segments.q_lens, dim=2),
            strict=True,
        )
        for q_i, k_i, v_i, out_i, lse_i in sequences:
            if q_i.numel() and k_i.numel():
                sequence_out, sequence_lse = attention.forward(q_i, k_i, v_i)
                out_i.copy_(sequence_out)
                lse_i.copy_(sequence_lse)
            else:
                out_i.zero_()
                lse_i.fill_(-torch.inf)
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
        if _is_one_sequence(call):
            whole = tuple(heads_first(x) for x in (dout, q, k, v, out))
            dq, dk, dv = attention.backward(*whole, lse[None])
            return tokens_first(dq), tokens_first(dk), tokens_first(dv)
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        # each tensor as one view [1, heads, n, D] per sequence, lse as [1, H, n]
        given = zip(
            _split(dout, segments.q_lens),
            _split(q, segments.q_lens),
            _split(k, segments.k_lens),
            _split(v, segments.k_lens),
            _split(out, segments.q_lens),
            lse.unsqueeze(0).split(segments.q_lens, dim=2),
            strict=True,
        )
        lengths = (segments.q_lens, segments.k_lens, segments.k_lens)
        wanted = zip(*(_split(x, n) for x, n in zip(gradients, lengths, strict=True)), strict=True)
        for of_sequence, targets in zip(given, wanted, strict=True):
            _, q_i, k_i, *_ = of_sequence
            if q_i.numel() and k_i.numel():
                for target, gradient in zip(
                    targets, attention.backward(*of_sequence), strict=True
                ):
                    target.copy_(gradient)
            else:
                for target in targets:
                    target.zero_()
        return gradients


def _attention(call: KernelCall) -> PiecewiseAttention:
    """Return how a call attends in each of its sequences."""
    return PiecewiseAttention(
        causal=call.segments.causal,
        window=call.segments.window,
        scale=call.scale,
        softcap=call.softcap,
    )


def _is_one_sequence(call: KernelCall) -> bool:
    """Return whether a call has a single sequence, with queries and keys."""
    return len(call.segments.q_lens) == 1 and call.segments.has_work()


def _split(x: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """View x [tokens, heads, D] as [1, heads, n, D] per sequence of n tokens, D contiguous."""
    views: Sequence[torch.Tensor] = heads_first(x).split(lengths, dim=2)
    return views
