"""The effect of a chunk on a state under the gated delta rule (arXiv 2412.06464, section 3.3).

With a state S [K, V], a token decays it, reads its content with its key, and writes the
difference to its value:

    S = exp(g) S;    S = S + k beta (v - k^T S)^T;    out = q^T S

Within a chunk of C tokens, with G the running sums of g and P[i, j] = exp(G_i - G_j) for j <= i:

    (I + beta_i (k_i k_j) P[i, j] for j < i)  [u | w]  =  beta [v | exp(G) k]
    attn = (q_i k_j) P[i, j]    q exp(G)    k exp(G_C - G)    decay = exp(G_C)

All exponents are at most 0. The products of queries and keys are taken once for each key head,
however many heads it serves.
"""

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.scans import Tensors
from hf_flexseq.kernels.scans.grid import ChunkGrid

NORM_EPS = 1e-6


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
    """Return the inputs of `ChunkedScan`, in float32 (float64 for float64).

    q, k: [tokens, key_heads, K]; v: [tokens, H, V]; g, beta: [tokens, H]. q is multiplied by K **
    -0.5; with `l2norm` q and k are made unit vectors before. Returns q, k, w [N, H, C, K], u [N,
    H, C, V], attn [N, H, C, C] and decay [N, H].
    """
    wide = lse_dtype(q.dtype)
    q, k, v, g, beta = (x.to(wide) for x in (q, k, v, g, beta))
    if l2norm:
        q, k = unit(q), unit(k)
    q = q * q.shape[-1] ** -0.5
    heads = v.shape[1]
    shared = heads // k.shape[1]  # heads of a key head
    q, k, v = (grid.to_chunks(x) for x in (q, k, v))  # [N, heads, C, K or V]
    beta = grid.to_chunks(beta)  # [N, H, C]
    sums = grid.to_chunks(g).cumsum(-1)  # [N, H, C]

    # 1. decays between tokens of a chunk: [N, H, C, C]
    later = torch.ones(grid.chunk, grid.chunk, dtype=torch.bool, device=q.device).triu(1)
    decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()

    # 2. products, once for each key head: [N, key_heads, C, C] -> [N, H, C, C]
    attn = _for_heads(q @ k.transpose(-1, -2), shared) * decays
    system = _for_heads(k @ k.transpose(-1, -2), shared) * decays * beta.unsqueeze(-1)

    # 3. what is written, and what is read before: one system for both
    q, k = _for_heads(q, shared), _for_heads(k, shared)  # [N, H, C, K]
    decayed = sums.exp().unsqueeze(-1)  # [N, H, C, 1]
    sides = torch.cat((v, k * decayed), dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)

    # 4. from and to the state
    last = sums[..., -1:]  # [N, H, 1]
    return (
        q * decayed,
        k * (last - sums).exp().unsqueeze(-1),
        w.contiguous(),
        u.contiguous(),
        attn,
        last.squeeze(-1).exp(),
    )


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., D] over their lengths, as flash-linear-attention does."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _for_heads(x: torch.Tensor, shared: int) -> torch.Tensor:
    """Return x for all heads of each key head: [N, key_heads, ...] -> [N, H, ...]."""
    return x if shared == 1 else x.repeat_interleave(shared, dim=1)
