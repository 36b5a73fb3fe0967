"""Attend on the CPU where a query reads all keys, or all up to its own.

`is_causal` of torch's kernel aligns query 0 with key 0. So where a causal sequence has earlier
keys too, these are a call of their own, and the two results are merged, in float32, so that the
rounding to 16 bits remains a single one.
"""

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.cpu_ops import (
    BACKWARD,
    FORWARD,
    NO_DROPOUT,
    heads_first,
    tokens_first,
)
from hf_flexseq.kernels.merge import merge_into


class FullCall:
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


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Put the tokens of two [1, heads, n, D] behind each other, tokens first in memory."""
    rows = torch.cat((tokens_first(first), tokens_first(second)))  # [n + m, heads, D]
    return heads_first(rows)
