"""What a chunk does to a state under Kimi's delta rule (arXiv 2510.26692, section 3): the gated
delta rule of `gated_delta.py` with a decay for every channel of a key.

Within a chunk, with G [C, K] the running sums of g, the products of two tokens are

    (q_i k_j) -> sum over channels of q_i k_j exp(G_i - G_j),    j <= i

which is no product of two matrices times a factor. So a chunk is cut into blocks of `BLOCK`
tokens. Between blocks, with R the sums before the first token of the later block,

    sum over channels of  (q_i exp(G_i - R)) (k_j exp(R - G_j))

has exponents of at most 0 on both sides, and is a product of matrices. Inside a block it is
written out. The whole chunk written out would take C x C x K numbers a chunk and head.
"""

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.scans import Tensors
from hf_flexseq.kernels.scans.gated_delta import unit
from hf_flexseq.kernels.scans.grid import ChunkGrid

BLOCK = 16  # tokens between which decays are written out


def chunk_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    grid: ChunkGrid,
    *,
    l2norm: bool,
) -> Tensors:
    """Return what `ChunkedScan` takes, in float32 (float64 for float64).

    q, k, g: [tokens, H, K]; v: [tokens, H, V]; beta: [tokens, H]. q is multiplied by K ** -0.5;
    with `l2norm` q and k are made unit vectors before. Returns q, k, w [N, H, C, K], u [N, H, C,
    V], attn [N, H, C, C] and decay [N, H, K].
    """
    wide = lse_dtype(q.dtype)
    q, k, v, g, beta = (x.to(wide) for x in (q, k, v, g, beta))
    if l2norm:
        q, k = unit(q), unit(k)
    q = q * q.shape[-1] ** -0.5
    q, k, v, g = (grid.to_chunks(x) for x in (q, k, v, g))  # [N, H, C, K or V]
    beta = grid.to_chunks(beta).unsqueeze(-1)  # [N, H, C, 1]
    sums = g.cumsum(-2)  # [N, H, C, K]

    attn = _products(q, k, sums)
    system = _products(k, k, sums) * beta
    decayed = sums.exp()
    sides = torch.cat((v, k * decayed), dim=-1) * beta
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    last = sums[..., -1:, :]  # [N, H, 1, K]
    return (
        q * decayed,
        k * (last - sums).exp(),
        w.contiguous(),
        u.contiguous(),
        attn,
        last.squeeze(-2).exp(),
    )


def _products(x: torch.Tensor, k: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the decayed products of each token with those up to itself: x, k, sums [N, H, C, K]
    -> [N, H, C, C], zeros above the diagonal."""
    tokens = x.shape[-2]
    block = min(BLOCK, tokens)
    rows = []
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        own = slice(start, stop)
        # 1. with the blocks before: [N, H, block, start]
        parts = []
        if start:
            before = sums[..., start - 1 : start, :]  # [N, H, 1, K]
            left = x[..., own, :] * (sums[..., own, :] - before).exp()
            right = k[..., :start, :] * (before - sums[..., :start, :]).exp()
            parts.append(left @ right.transpose(-1, -2))
        # 2. inside the block: [N, H, block, block, K] -> [N, H, block, block]
        of_block = sums[..., own, :]
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=x.device).triu(1)
        decays = of_block.unsqueeze(-2) - of_block.unsqueeze(-3)
        decays = decays.masked_fill(later.unsqueeze(-1), -torch.inf).exp()
        within = x[..., own, :].unsqueeze(-2) * k[..., own, :].unsqueeze(-3) * decays
        parts.append(within.sum(-1))
        # 3. nothing after it
        parts.append(x.new_zeros(*x.shape[:-2], stop - start, tokens - stop))
        rows.append(torch.cat(parts, dim=-1))
    return torch.cat(rows, dim=-2)
