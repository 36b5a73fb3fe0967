"""The effect of a chunk on a state in Mamba 2 (arXiv 2405.21060, section 6).

With a state h [N, P], a token decays it by one number, and adds to it:

    h = exp(dt A) h + B (dt x)^T;    out = C^T h

Within a chunk, with S the running sums of dt A, nothing is read before it is written:

    u = dt x    attn = (C_i B_j) exp(S_i - S_j) for j <= i
    q = C exp(S)    k = B exp(S_C - S)    decay = exp(S_C)

The products of C and B are taken once for each of their groups.
"""

import torch
from torch.nn import functional

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.scans.grid import ChunkGrid


def positive_steps(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """Return the steps [tokens, H] as a scan uses them. dt_bias: [H]."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    return dt.clamp(min=dt_limit[0], max=dt_limit[1])


def token_inputs(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the rows of simple gated linear attention that do the same: q = C, k = B, v = dt x,
    and the logarithm of the decay g = dt A in float32 (float64 for float64).

    The arguments have the shapes given in `chunk_inputs`. Returns q, k [tokens, H, N], v [tokens,
    H, P] and g [tokens, H].
    """
    wide = lse_dtype(x.dtype)
    dt = dt.to(wide)
    shared = x.shape[1] // B.shape[1]  # heads of a group
    q = C.repeat_interleave(shared, dim=1)
    k = B.repeat_interleave(shared, dim=1)
    v = (x.to(wide) * dt.unsqueeze(-1)).to(x.dtype)
    return q, k, v, dt * A.to(wide)


def chunk_inputs(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    grid: ChunkGrid,
) -> tuple[torch.Tensor | None, ...]:
    """Return the inputs of `ChunkedScan`, in float32 (float64 for float64).

    x: [tokens, H, P]; dt, positive: [tokens, H]; A: [H]; B, C: [tokens, groups, N]. Returns q, k
    [chunks, H, c, N], None, u [chunks, H, c, P], attn [chunks, H, c, c] and decay [chunks, H], for
    chunks of c tokens.
    """
    wide = lse_dtype(x.dtype)
    x, dt, A, B, C = (one.to(wide) for one in (x, dt, A, B, C))
    shared = x.shape[1] // B.shape[1]  # heads of a group
    u = grid.to_chunks(x * dt.unsqueeze(-1))  # [chunks, H, c, P]
    k, q = grid.to_chunks(B), grid.to_chunks(C)  # [chunks, groups, c, N]
    steps = grid.to_chunks(dt * A)  # [chunks, H, c]
    sums = steps.cumsum(-1)

    # 1. decays between tokens of a chunk, and products of a group: [chunks, H, c, c]. Each sum of
    #    steps is taken on its own: differences of sums in the hundreds would lose digits.
    ones = torch.ones(grid.chunk, grid.chunk, dtype=torch.bool, device=x.device)
    between = steps.unsqueeze(-1).expand(*steps.shape, grid.chunk).masked_fill(ones.triu(), 0)
    decays = between.cumsum(-2).masked_fill(ones.triu(1), -torch.inf).exp()
    attn = (q @ k.transpose(-1, -2)).repeat_interleave(shared, dim=1) * decays

    # 2. from and to the state
    last = sums[..., -1:]  # [chunks, H, 1]
    rest = steps.flip(-1).cumsum(-1).flip(-1) - steps  # [chunks, H, c] after each token
    q = q.repeat_interleave(shared, dim=1) * sums.exp().unsqueeze(-1)
    k = k.repeat_interleave(shared, dim=1) * rest.exp().unsqueeze(-1)
    return q, k, None, u.contiguous(), attn, last.squeeze(-1).exp()
