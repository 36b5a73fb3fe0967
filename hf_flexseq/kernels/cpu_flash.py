"""torch's CPU flash kernel, sequence by sequence.

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

Every short sequence pays for the calls around its kernel, so all tensors are cut into sequences by
one call each, and the results go straight to their places.

Rejected: one padded batch of all sequences, which for long-tailed lengths computes mostly padding;
and a softmax written in Python, which is several times slower and keeps the whole score matrix.
"""

from collections.abc import Iterator, Sequence

import torch

from hf_flexseq.kernels import Segments, lse_dtype

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class CpuFlash:
    """FlashAttention on the CPU."""

    name = "cpu_flash"
    wide_gradients = True

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this kernel cannot serve such inputs; None when it can."""
        if device.type != "cpu":
            return f"it runs on the CPU, not on {device.type}"
        return (
            None
            if dtype in _DTYPES
            else f"it has no {dtype}; use one of {', '.join(map(str, _DTYPES))}"
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        segments.check(q, k, v)
        out = q.new_empty(q.shape)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype))  # [H, Tq]
        parts = _parts(segments, of_queries=(q, out), of_keys=(k, v))
        for (q_i, out_i, k_i, v_i), lse_i in zip(parts, _lse_parts(segments, lse), strict=True):
            if q_i.numel() and k_i.numel():
                block_out, block_lse = _forward(q_i, k_i, v_i, segments.causal, scale)
                out_i.copy_(block_out)
                lse_i.copy_(block_lse)
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`."""
        segments.check(q, k, v)
        dout, q, k, v, out = (x.to(lse_dtype(x.dtype)) for x in (dout, q, k, v, out))
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        parts = _parts(segments, of_queries=(dout, q, out, dq), of_keys=(k, v, dk, dv))
        for (dout_i, q_i, out_i, dq_i, k_i, v_i, *dkv_i), lse_i in zip(
            parts, _lse_parts(segments, lse), strict=True
        ):
            if q_i.numel() and k_i.numel():
                block = _backward((dout_i, q_i, k_i, v_i, out_i, lse_i), segments.causal, scale)
                for gradient, of_block in zip((dq_i, *dkv_i), block, strict=True):
                    gradient.copy_(of_block)
            else:
                for gradient in (dq_i, *dkv_i):
                    gradient.zero_()
        return dq, dk, dv


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Sequence[torch.Tensor]:
    """out [1, H, n, D] and lse [1, H, n] of one sequence."""
    early = k.shape[2] - q.shape[2]
    if not causal or not early:
        return _FORWARD(q, k, v, 0.0, causal, scale=scale)
    q, k, v = (x.to(lse_dtype(x.dtype)) for x in (q, k, v))
    before = _FORWARD(q, k[:, :, :early], v[:, :, :early], 0.0, False, scale=scale)
    own = _FORWARD(q, k[:, :, early:], v[:, :, early:], 0.0, True, scale=scale)
    lse = torch.logaddexp(before[1], own[1])
    return sum(out * (part_lse - lse).exp().unsqueeze(-1) for out, part_lse in (before, own)), lse


def _backward(
    tensors: Sequence[torch.Tensor], causal: bool, scale: float
) -> Sequence[torch.Tensor]:
    """dq, dk, dv of one sequence from its dout, q, k, v, out, lse."""
    dout, q, k, v, out, lse = tensors
    early = k.shape[2] - q.shape[2]
    if not causal or not early:
        return _BACKWARD(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
    before = _BACKWARD(
        dout, q, k[:, :, :early], v[:, :, :early], out, lse, 0.0, False, scale=scale
    )
    own = _BACKWARD(dout, q, k[:, :, early:], v[:, :, early:], out, lse, 0.0, True, scale=scale)
    return before[0] + own[0], *(
        torch.cat(both, dim=2) for both in zip(before[1:], own[1:], strict=True)
    )


def _parts(
    segments: Segments, *, of_queries: Sequence[torch.Tensor], of_keys: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """For every sequence its part of each tensor, [1, heads, n, D] of [tokens, heads, D], as
    views."""
    views = [_batched(x).split(segments.q_lens, dim=2) for x in of_queries]
    views += [_batched(x).split(segments.k_lens, dim=2) for x in of_keys]
    return zip(*views, strict=True)


def _lse_parts(segments: Segments, lse: torch.Tensor) -> Sequence[torch.Tensor]:
    """[1, H, n] of lse [H, Tq], for every sequence."""
    return lse.unsqueeze(0).split(segments.q_lens, dim=2)


def _batched(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, D] -> [1, heads, tokens, D], with the last dimension contiguous."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1).unsqueeze(0)
