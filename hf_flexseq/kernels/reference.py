"""Plain softmax attention, sequence by sequence, in float32 (float64 for float64 inputs): the
obviously right twin.

It writes the whole score matrix of each sequence, so its memory grows with the square of the
longest one. Tests and `scripts/gpu_check.py` compare the fast kernels with it; nothing chooses it
by itself.

The backward is the closed form that flash kernels use (FlashAttention-2, arXiv 2307.08691, section
3.1), with the log-sum-exp and output that the caller gives, so that it can be one block of a
merged result:

    p = exp(s - lse)     dv = p^T dout     ds = p * (dout v^T - rowsum(dout * out))     dq = ds k
                         dk = ds^T q
"""

import torch

from hf_flexseq.kernels import Segments, lse_dtype


class Reference:
    """Slow and obvious, for every device and floating dtype."""

    name = "reference"
    wide_gradients = False

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
        out = q.new_zeros(q.shape)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype(q.dtype))  # [H, Tq]
        for rows, keys in segments.blocks():
            scores = _scores(q[rows], k[keys], segments.causal, scale)  # [Hkv, G, n, m]
            block_lse = scores.logsumexp(-1)  # [Hkv, G, n]
            p = torch.exp(scores - block_lse.unsqueeze(-1))
            lse[:, rows] = block_lse.flatten(0, 1)  # [H, n]
            # [n, H, D]
            out[rows] = (
                torch.einsum("hgnm,mhd->nhgd", p, v[keys].to(p.dtype)).flatten(1, 2).to(q.dtype)
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
        segments: Segments,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`."""
        segments.check(q, k, v)
        dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        for rows, keys in segments.blocks():
            kv_heads = k.shape[1]
            qg, og, dog = (_grouped(x[rows], kv_heads) for x in (q, out, dout))  # [n, Hkv, G, D]
            kf, vf = k[keys].to(qg.dtype), v[keys].to(qg.dtype)  # [m, Hkv, D]
            block_lse = lse[:, rows].unflatten(0, (kv_heads, -1)).unsqueeze(-1)  # [Hkv, G, n, 1]
            # [Hkv, G, n, m]
            p = torch.exp(_scores(q[rows], k[keys], segments.causal, scale) - block_lse)
            delta = (dog * og).sum(-1).permute(1, 2, 0).unsqueeze(-1)  # [Hkv, G, n, 1]
            ds = p * (torch.einsum("nhgd,mhd->hgnm", dog, vf) - delta) * scale
            dq[rows] = torch.einsum("hgnm,mhd->nhgd", ds, kf).flatten(1, 2).to(q.dtype)
            dk[keys] = torch.einsum("hgnm,nhgd->mhd", ds, qg).to(k.dtype)
            dv[keys] = torch.einsum("hgnm,nhgd->mhd", p, dog).to(v.dtype)
        return dq, dk, dv


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[n, H, D] -> [n, Hkv, G, D], the G query heads that share a key head side by side, in the
    dtype of the math."""
    return x.to(lse_dtype(x.dtype)).unflatten(1, (kv_heads, -1))


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """q [n, H, D], k [m, Hkv, D] -> scaled scores [Hkv, G, n, m], -inf where a query may not
    look."""
    grouped = _grouped(q, k.shape[1])
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, k.to(grouped.dtype)) * scale
    if causal:
        queries, keys = scores.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(
            1 + keys - queries
        )
        scores = scores.masked_fill(later, -torch.inf)
    return scores
