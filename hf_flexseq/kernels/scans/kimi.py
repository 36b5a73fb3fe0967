"""The effect of a chunk on a state under Kimi's delta rule (arXiv 2510.26692, section 3), the
gated delta rule of `gated_delta.py` with a decay for every channel of a key.

Within a chunk, with G [C, K] the running sums of g, the products of two tokens are

    (q_i k_j) -> sum over channels of q_i k_j exp(G_i - G_j),    j <= i

which is not a product of two matrices times a factor. So a chunk is cut into blocks of `BLOCK`
tokens. Between blocks, with R the sums before the first token of the later block,

    sum over channels of  (q_i exp(G_i - R)) (k_j exp(R - G_j))

has exponents of at most 0 on both sides, and is a product of matrices. Inside a block it is
written out. The whole chunk written out would take C x C x K numbers a chunk and head.

The products written out, BLOCK x K numbers per token and head, are not kept for the backward but
computed again, for a few chunks at a time. Their backward needs nothing else: with dx and dk the
gradients of the left and right factors, the gradient of G is x dx - k dk.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.scans import Tensors
from hf_flexseq.kernels.scans.gated_delta import unit
from hf_flexseq.kernels.scans.grid import ChunkGrid

BLOCK = 16  # tokens between which decays are written out
# Chunks of heads that are written out at once: what a CPU's cache holds, few launches on a GPU.
AT_ONCE = {"cpu": 4, "cuda": 1 << 12}


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

    attn, products = _Products.apply(q, k, sums, grid.computes)
    system = products * beta
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


class _Products(torch.autograd.Function):
    """The decayed products of each token with those up to itself."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, sums: torch.Tensor, computes: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return products of queries and of keys with keys: [N, H, C, K] -> 2 x [N, H, C, C]."""
        ctx.computes = computes
        x = torch.stack((q, k), dim=2).flatten(0, 1)  # [N x H, 2, C, K]
        sums = sums.flatten(0, 1)  # [N x H, C, K]
        ctx.save_for_backward(x, sums)
        ctx.shape = q.shape
        tokens = x.shape[2]
        out = x.new_zeros(*x.shape[:3], tokens)  # [N x H, 2, C, C]
        for some in _some(x) if computes else ():
            for start, stop in _blocks(tokens):
                before, own = slice(0, start), slice(start, stop)
                left = x[some, :, own]  # [n, 2, b, K]
                if start:
                    to_left, to_right = _decays_between(sums[some], start, stop)
                    right = (x[some, 1, before] * to_right).unsqueeze(1)  # [n, 1, start, K]
                    out[some, :, own, before] = (left * to_left) @ right.transpose(-1, -2)
                # [n, b, b, K] @ [n, b, K, 2] -> [n, b, b, 2]
                weights = _decays_inside(sums[some, own]).mul_(x[some, 1, own].unsqueeze(1))
                inside = weights @ left.permute(0, 2, 3, 1)
                out[some, :, own, own] = inside.permute(0, 3, 1, 2)
        of_queries, of_keys = out.view(*q.shape[:2], *out.shape[1:]).unbind(2)
        return of_queries, of_keys

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_queries: torch.Tensor, of_keys: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k and sums, [N, H, C, K]."""
        x, sums = ctx.saved_tensors
        tokens = x.shape[2]
        dout = torch.stack((of_queries, of_keys), dim=2).flatten(0, 1)  # [N x H, 2, C, C]
        dx = torch.empty_like(x)  # of the left factors
        dright = torch.zeros_like(sums)  # of the keys on the right
        for some in _some(x) if ctx.computes else ():
            for start, stop in _blocks(tokens):
                before, own = slice(0, start), slice(start, stop)
                left, right = x[some, :, own], x[some, 1, own]  # [n, 2, b, K], [n, b, K]
                # 1. inside the block; above the diagonal decays are zero
                decays = _decays_inside(sums[some, own])  # [n, i, j, K]
                grads = dout[some, :, own, own]  # [n, 2, i, j]
                # [n, i, j, 2] @ [n, i, 2, K] -> [n, i, j, K] -> [n, j, K]
                spread = grads.permute(0, 2, 3, 1) @ left.transpose(1, 2)
                dright[some, own] += spread.mul_(decays).sum(1)
                # [n, i, 2, j] @ [n, i, j, K] -> [n, i, 2, K]
                weights = decays.mul_(right.unsqueeze(1))
                dleft = (grads.transpose(1, 2) @ weights).transpose(1, 2)  # [n, 2, b, K]
                # 2. with the blocks before
                if start:
                    to_left, to_right = _decays_between(sums[some], start, stop)
                    grads = dout[some, :, own, before]  # [n, 2, b, start]
                    earlier = x[some, 1, before] * to_right  # [n, start, K]
                    dleft = dleft + (grads @ earlier.unsqueeze(1)) * to_left
                    of_pairs = grads.transpose(-1, -2) @ (left * to_left)  # [n, 2, start, K]
                    dright[some, before] += of_pairs.sum(1) * to_right
                dx[some, :, own] = dleft
        dsums = (x * dx).sum(1) - x[:, 1] * dright
        dq, dk = dx.unbind(1)
        return dq.view(ctx.shape), (dk + dright).view(ctx.shape), dsums.view(ctx.shape), None


def _some(x: torch.Tensor) -> Iterator[slice]:
    """Iterate over the chunks [chunks, ...] that are written out at once."""
    at_once = AT_ONCE["cpu" if x.device.type == "cpu" else "cuda"]
    for start in range(0, x.shape[0], at_once):
        yield slice(start, start + at_once)


def _blocks(tokens: int) -> Iterator[tuple[int, int]]:
    """Iterate over the tokens [start, stop) of each block."""
    for start in range(0, tokens, BLOCK):
        yield start, min(start + BLOCK, tokens)


def _decays_between(
    sums: torch.Tensor, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors of tokens of a block [n, 1, b, K] and of keys before it [n, start, K]."""
    before = sums[:, start - 1 : start]  # [n, 1, K]
    left = (sums[:, start:stop] - before).exp().unsqueeze(1)
    return left, (before - sums[:, :start]).exp()


def _decays_inside(sums: torch.Tensor) -> torch.Tensor:
    """Return decays between tokens of a block: [n, b, K] -> [n, b, b, K], 0 above the diagonal."""
    tokens = sums.shape[1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=sums.device).triu(1)
    decays = sums.unsqueeze(2) - sums.unsqueeze(1)
    return decays.masked_fill_(later.unsqueeze(-1), -torch.inf).exp_()
