"""Attend within a sliding window on the CPU, block of queries by block of queries.

A block of n queries reads one run of at most n + w - 1 keys, in one call of torch's CPU flash
kernel, and a small mask hides the two triangles that some of its queries do not read (bands.py).
No result is merged, so 16-bit outputs are rounded once, as in a full call; gradients of keys that
several blocks read are added up.

Small blocks compute fewer hidden pairs, large ones need fewer calls and additions.
Their size was tuned for windows of 512 and 2,048 tokens.

Rejected: cutting a block's keys into a causal triangle, its own keys, and another one, the keys at
the window's edge, which are causal when queries and keys are both read backwards. It needs no mask
and computes no hidden pairs but those of the kernel's own tiles. At windows of 512 it takes 1.4
times the time of masked blocks, for the kernel's tiles are coarse beside such triangles and both
results are merged; at 2,048 it takes 0.96 times the time.

The slow obvious twin is reference.py.
"""

from collections.abc import Iterator

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.bands import Block, band, band_of, blocks
from hf_flexseq.kernels.cpu_full import FullCall
from hf_flexseq.kernels.cpu_ops import BACKWARD, FORWARD, NO_DROPOUT, zeros_tokens_first

_SMALL_BLOCK = 64  # queries
_LARGE_BLOCK = 256
_LONG_WINDOW = 1_024  # keys, from which large blocks are faster


class WindowCall:
    """Attention of one call's sequences within a window. A sequence that is not longer than the
    window is one full call, as it would be alone."""

    def __init__(self, window: int, scale: float, dtype: torch.dtype, most_queries: int) -> None:
        """dtype: of the mask, which the backward takes in the gradients' dtype. most_queries: of
        a sequence, so that the mask of short ones is small."""
        self._full = FullCall(causal=True, scale=scale)
        self._window = window
        self._scale = scale
        block = _LARGE_BLOCK if window >= _LONG_WINDOW else _SMALL_BLOCK
        self._block = min(block, max(most_queries, 1))
        self._band = band(self._block, window, dtype)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend in one sequence: q [1, H, n, D], k and v [1, Hkv, m, D] -> out [1, H, n, D],
        tokens first in memory, lse [1, H, n]."""
        if k.shape[2] <= self._window:
            return self._full.forward(q, k, v)
        out = zeros_tokens_first(q)
        lse = q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))
        for rows, keys in self._blocks(q, k):
            out[:, :, rows], lse[:, :, rows] = FORWARD(
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                NO_DROPOUT,
                False,
                attn_mask=self._mask(rows, keys),
                scale=self._scale,
            )
        return out, lse

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
        lse [1, H, n] -> dq [1, H, n, D], dk and dv [1, Hkv, m, D], tokens first in memory."""
        if k.shape[2] <= self._window:
            return self._full.backward(dout, q, k, v, out, lse)
        dq = zeros_tokens_first(q)
        dk = zeros_tokens_first(k)
        dv = zeros_tokens_first(v)
        for rows, keys in self._blocks(q, k):
            dq[:, :, rows], dk_block, dv_block = BACKWARD(
                dout[:, :, rows],
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                NO_DROPOUT,
                False,
                attn_mask=self._mask(rows, keys),
                scale=self._scale,
            )
            dk[:, :, keys] += dk_block
            dv[:, :, keys] += dv_block
        return dq, dk, dv

    def _blocks(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[Block]:
        return blocks(q.shape[2], k.shape[2], self._block, causal=True, window=self._window)

    def _mask(self, rows: slice, keys: slice) -> torch.Tensor:
        """Return what is added to the scores of a block: [queries, keys], a view."""
        return band_of(self._band, rows.stop - rows.start, keys.stop - keys.start)
