"""torch's CPU flash kernel, sequence by sequence.

`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward give and take the log-sum-exp, accept fewer key
heads than query heads, a merged output and log-sum-exp, and every floating dtype. Three habits of theirs matter here:

* `is_causal` aligns query 0 with key 0, which is right because causal sequences have as many queries as keys;
* a last dimension that is not contiguous is read as if it were, without an error, so it is made contiguous first;
* for 16-bit inputs the backward adds dk and dv up in 16 bits, over tiles of queries and over the heads that share a
  key head, which at 2,000 tokens has up to five times the error of a plain softmax. So the backward runs in float32,
  for about 1.4 times the time.

Rejected: one padded batch of all sequences, which for long-tailed lengths computes mostly padding; and a softmax
written in Python, which is several times slower and keeps the whole score matrix.
"""

import torch

from hf_flexseq.kernels import Segments, lse_dtype

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class CpuFlash:
    """FlashAttention on the CPU."""

    name = "cpu_flash"

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this kernel cannot serve such inputs; None when it can."""
        if device.type != "cpu":
            return f"it runs on the CPU, not on {device.type}"
        return None if dtype in _DTYPES else f"it has no {dtype}; use one of {', '.join(map(str, _DTYPES))}"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, *, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        segments.check(q, k, v)
        out = q.new_zeros(q.shape)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype(q.dtype))  # [H, Tq]
        for rows, keys in segments.blocks():
            block_out, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _batched(q[rows]), _batched(k[keys]), _batched(v[keys]), 0.0, segments.causal, scale=scale
            )
            out[rows] = _packed(block_out)
            lse[:, rows] = block_lse.squeeze(0)  # [1, H, n] -> [H, n]
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
        dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        exact = lse_dtype(q.dtype)
        for rows, keys in segments.blocks():
            block = dout[rows], q[rows], k[keys], v[keys], out[rows]
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(_batched(x.to(exact)) for x in block),
                lse[:, rows].unsqueeze(0),  # [1, H, n]
                0.0,
                segments.causal,
                scale=scale,
            )
            dq[rows], dk[keys], dv[keys] = map(_packed, grads)
        return dq, dk, dv


def _batched(x: torch.Tensor) -> torch.Tensor:
    """[n, heads, D] -> [1, heads, n, D], with the last dimension contiguous."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1).unsqueeze(0)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, n, D] -> [n, heads, D]"""
    return x.squeeze(0).transpose(0, 1)
