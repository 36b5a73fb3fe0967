"""Attend with capped scores on the CPU: c tanh(s / c) in place of a score s (Gemma 2).

torch's CPU flash kernel has no softcap, so the products are torch's own, block of queries by piece
of keys; no more scores exist at once than those of one block and one piece, in each head. Mixed
precision would round these products to 16 bits, which flash kernels do not.
Forward, for each block (FlashAttention, arXiv 2205.14135, with the merge of merge.py):

    s   = c tanh(scale q k^T / c), -inf where hidden
    lse = logsumexp(s), out = exp(s - lse) v       of one piece
    merge them into the block's

Backward, with the merged out and lse, so that every piece is independent of the others:

    t  = tanh(scale q k^T / c)
    p  = exp(c t - lse)
    dv = p^T dout
    ds = p * (dout v^T - rowsum(dout * out)) * (1 - t^2) * scale
    dq = ds k
    dk = ds^T q

Heads that share a key head are rows of one product, so no key is repeated. The slow obvious twin
is reference.py.
"""

from collections.abc import Iterator

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.bands import blocks
from hf_flexseq.kernels.cpu_ops import zeros_tokens_first
from hf_flexseq.kernels.merge import merge_into

# tuned by timing windows of 512 and 2,048 tokens on one CPU core
_BLOCK = 128  # queries
_PIECE = 512  # keys


class CappedCall:
    """Attention of one call's sequences with capped scores, within a window or without."""

    def __init__(self, causal: bool, window: int | None, scale: float, softcap: float) -> None:
        self._causal = causal
        self._window = window
        self._scale = scale
        self._softcap = softcap

    @torch.autocast("cpu", enabled=False)
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend in one sequence: q [1, H, n, D], k and v [1, Hkv, m, D] -> out [1, H, n, D] and
        lse [1, H, n], both in `lse_dtype` of q's."""
        wide = lse_dtype(q.dtype)
        q = q.to(wide)
        k = k.to(wide)
        v = v.to(wide)
        out = zeros_tokens_first(q)
        lse = q.new_full(q.shape[:3], -torch.inf)
        # G query heads share each key head; R = G x the block's queries
        for rows, keys in self._pieces(q, k):
            k_piece = k[0, :, keys]  # [Hkv, m, D]
            q_block = _grouped(q[:, :, rows], k)  # [Hkv, R, D]
            scores = self._tanh(q_block, k_piece).mul_(self._softcap)  # [Hkv, R, m]
            self._hide(scores, rows, keys, q, k)
            piece_lse = scores.logsumexp(-1, keepdim=True)  # [Hkv, R, 1]
            # A query may read no key of this piece: -inf - -inf would be NaN.
            p = scores.sub_(piece_lse.clamp_min(torch.finfo(wide).min)).exp_()
            piece_out = p @ v[0, :, keys]  # [Hkv, R, D]
            block_lse = lse[:, :, rows]
            merge_into(
                out[:, :, rows],
                block_lse,
                _ungrouped(piece_out, q),
                piece_lse.reshape(block_lse.shape),
            )
        return out, lse

    @torch.autocast("cpu", enabled=False)
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
        dq = zeros_tokens_first(q)
        dk = zeros_tokens_first(k)
        dv = zeros_tokens_first(v)
        delta = (dout * out).sum(-1, keepdim=True)  # [1, H, n, 1]
        for rows, keys in self._pieces(q, k):
            k_piece = k[0, :, keys]  # [Hkv, m, D]
            q_block = _grouped(q[:, :, rows], k)  # [Hkv, R, D]
            dout_block = _grouped(dout[:, :, rows], k)

            # p = exp(s - lse)
            tanh = self._tanh(q_block, k_piece)  # [Hkv, R, m]
            p = (tanh * self._softcap).sub_(_grouped(lse[:, :, rows].unsqueeze(-1), k))
            self._hide(p, rows, keys, q, k)
            p.exp_()
            dv[0, :, keys] += p.transpose(1, 2) @ dout_block

            # ds = p * (dout v^T - delta) * (1 - t^2) * scale
            ds = dout_block @ v[0, :, keys].transpose(1, 2)  # [Hkv, R, m]
            ds.sub_(_grouped(delta[:, :, rows], k)).mul_(p)
            ds.mul_(tanh.square_().neg_().add_(1)).mul_(self._scale)
            dq[:, :, rows] += _ungrouped(ds @ k_piece, q)
            dk[0, :, keys] += ds.transpose(1, 2) @ q_block
        return dq, dk, dv

    def _pieces(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
        """Iterate over the queries of each block, with each piece of the keys that they read."""
        cut = blocks(q.shape[2], k.shape[2], _BLOCK, causal=self._causal, window=self._window)
        for rows, keys in cut:
            for start in range(keys.start, keys.stop, _PIECE):
                yield rows, slice(start, min(start + _PIECE, keys.stop))

    def _tanh(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return tanh(scale q k^T / softcap): q [Hkv, R, D], k [Hkv, m, D] -> [Hkv, R, m]."""
        return (q @ k.transpose(1, 2)).mul_(self._scale / self._softcap).tanh_()

    def _hide(
        self, scores: torch.Tensor, rows: slice, keys: slice, q: torch.Tensor, k: torch.Tensor
    ) -> None:
        """Set scores [Hkv, R, m] of keys that a query may not read to -inf, in place.

        q, k: the whole sequence's, [1, H, n, D] and [1, Hkv, m, D].
        """
        if not self._causal:
            return
        earlier = k.shape[2] - q.shape[2]  # keys before the first query
        first_query = earlier + rows.start  # as a key
        last_query = earlier + rows.stop - 1
        window = self._window
        crosses_end = keys.stop - 1 > first_query
        crosses_start = window is not None and keys.start <= last_query - window
        if not crosses_end and not crosses_start:
            return
        own = torch.arange(first_query, last_query + 1).unsqueeze(-1)  # [queries, 1]
        read = torch.arange(keys.start, keys.stop)  # [m]
        hidden = read > own  # [queries, m]
        if window is not None:
            hidden |= read <= own - window
        # [Hkv, R, m] -> [Hkv, G, queries, m]
        scores.unflatten(1, (-1, len(own))).masked_fill_(hidden, -torch.inf)


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Bring the heads that share a key head of k [1, Hkv, m, D] behind each other:
    x [1, H, n, D] -> [Hkv, G n, D]."""
    return x[0].unflatten(0, (k.shape[1], -1)).flatten(1, 2)


def _ungrouped(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Undo `_grouped`: x [Hkv, G n, D] -> [1, H, n, D], with the heads of q [1, H, ...]."""
    return x.reshape(1, q.shape[1], -1, x.shape[-1])
