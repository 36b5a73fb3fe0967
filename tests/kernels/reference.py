"""Attend with a plain softmax, sequence by sequence, in float32 (float64 for float64 inputs): the
reference implementation of the other kernels.

It writes the whole score matrix of each sequence, so its memory grows with the square of the
longest one. Tests and `scripts/gpu_check.py` compare the fast kernels with it.

The backward is the closed form that flash kernels use (FlashAttention-2, arXiv 2307.08691, section
3.1), with the log-sum-exp and output that the caller gives, so that it can be one block of a
merged result:

    p  = exp(s - lse)
    dv = p^T dout
    ds = p * (dout v^T - rowsum(dout * out))
    dq = ds k
    dk = ds^T q

With a softcap c the scores s are c tanh(raw / c), and ds is taken times 1 - (s / c)^2.
"""

from collections.abc import Iterator

import torch

from hf_flexseq.kernels import KernelCall, lse_dtype
from hf_flexseq.kernels.segments import Segments


def blocks(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """Iterate over the query rows and the key rows of every sequence that has both."""
    q_stop = 0
    k_stop = 0
    for q_len, k_len in zip(segments.q_lens, segments.k_lens, strict=True):
        q_stop += q_len
        k_stop += k_len
        if q_len and k_len:
            yield slice(q_stop - q_len, q_stop), slice(k_stop - k_len, k_stop)


class Reference:
    """Slow and obvious attention, for every device and floating dtype.

    In the shapes below G query heads share each of the Hkv key heads, H = Hkv * G.
    """

    name = "reference"
    wide_gradients = False

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`: -> out [Tq, H, D], lse [H, Tq]."""
        call.check()
        q, k, v, segments, scale, softcap, *_ = call
        out = q.new_zeros(q.shape)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype(q.dtype))  # [H, Tq]
        for rows, keys in blocks(segments):
            scores = _scores(q[rows], k[keys], scale, softcap)  # [Hkv, G, n, m]
            scores = scores.masked_fill(_hidden(scores, segments), -torch.inf)
            block_lse = scores.logsumexp(-1)  # [Hkv, G, n]
            p = torch.exp(scores - block_lse.unsqueeze(-1))  # [Hkv, G, n, m]
            # [Hkv, G, n, m] x [m, Hkv, D] -> [n, Hkv, G, D]
            block_out = torch.einsum("hgnm,mhd->nhgd", p, v[keys].to(p.dtype))
            out[rows] = block_out.flatten(1, 2).to(q.dtype)  # [n, H, D]
            lse[:, rows] = block_lse.flatten(0, 1)  # [H, n]
        return out, lse

    def backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`: dout, out [Tq, H, D], lse [H, Tq] -> dq, dk, dv as q, k, v."""
        call.check()
        q, k, v, segments, scale, softcap, *_ = call
        dq = q.new_zeros(q.shape)
        dk = k.new_zeros(k.shape)
        dv = v.new_zeros(v.shape)
        kv_heads = k.shape[1]
        for rows, keys in blocks(segments):
            q_grouped = _grouped(q[rows], kv_heads)  # [n, Hkv, G, D]
            out_grouped = _grouped(out[rows], kv_heads)
            dout_grouped = _grouped(dout[rows], kv_heads)
            k_wide = k[keys].to(q_grouped.dtype)  # [m, Hkv, D]
            v_wide = v[keys].to(q_grouped.dtype)

            # p = exp(s - lse)
            block_lse = lse[:, rows].unflatten(0, (kv_heads, -1)).unsqueeze(-1)  # [Hkv, G, n, 1]
            scores = _scores(q[rows], k[keys], scale, softcap)  # [Hkv, G, n, m]
            hidden = _hidden(scores, segments)  # [n, m]
            p = torch.exp(scores.masked_fill(hidden, -torch.inf) - block_lse)

            # ds = p * (dout v^T - rowsum(dout * out))
            row_sums = (dout_grouped * out_grouped).sum(-1)  # [n, Hkv, G]
            delta = row_sums.permute(1, 2, 0).unsqueeze(-1)  # [Hkv, G, n, 1]
            dp = torch.einsum("nhgd,mhd->hgnm", dout_grouped, v_wide)  # [Hkv, G, n, m]
            ds = p * (dp - delta) * scale
            if softcap is not None:
                ds = ds * (1 - (scores / softcap).square())  # the derivative of c tanh(s / c)

            dq[rows] = torch.einsum("hgnm,mhd->nhgd", ds, k_wide).flatten(1, 2).to(q.dtype)
            dk[keys] = torch.einsum("hgnm,nhgd->mhd", ds, q_grouped).to(k.dtype)
            dv[keys] = torch.einsum("hgnm,nhgd->mhd", p, dout_grouped).to(v.dtype)
        return dq, dk, dv


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Group heads by key head, in the dtype of the math: [n, H, D] -> [n, Hkv, G, D]."""
    return x.to(lse_dtype(x.dtype)).unflatten(1, (kv_heads, -1))


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Multiply q [n, H, D] with k [m, Hkv, D] -> scaled and capped scores [Hkv, G, n, m]."""
    grouped = _grouped(q, k.shape[1])  # [n, Hkv, G, D]
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, k.to(grouped.dtype)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores


def _hidden(scores: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return where a query may not look, for scores [Hkv, G, n, m]: bool [n, m]."""
    queries, keys = scores.shape[-2:]
    everywhere = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    if not segments.causal:
        return ~everywhere
    # The last query reads all keys: query i may read keys 0 to i + keys - queries,
    last = keys - queries
    hidden = everywhere.triu(last + 1)
    if segments.window is not None:
        # or only the last `window` of these.
        hidden |= everywhere.tril(last - segments.window)
    return hidden
