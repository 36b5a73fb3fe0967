"""Softmax attention of one sequence, written out: the slow and obvious twin of all that attention
computes on ranks."""

from collections.abc import Sequence

import torch

from hf_flexseq.base.layers import FULL, Reach


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    reach: Reach = FULL,
    sinks: torch.Tensor | None = None,
    blocks: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """[length, heads, head_dim] of q, keys and values of fewer heads, sinks [heads] -> [length,
    heads, size of the values]. blocks: [start, stop) of tokens that see both ways."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(_hidden(len(q), reach, blocks, q.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=2)
    shares = scores.softmax(-1)[:, :, : len(k)]
    return torch.einsum("hqk,khd->qhd", shares, v)


def _hidden(
    length: int, reach: Reach, blocks: Sequence[tuple[int, int]], device: torch.device
) -> torch.Tensor:
    """Where a query may not look: bool [length, length]."""
    positions = torch.arange(length, device=device)
    ago = positions[:, None] - positions
    hidden = ago < 0
    for start, stop in blocks:
        hidden[start:stop, start:stop] = False
    if reach.window is not None:
        hidden |= ago >= reach.window
    if reach.chunk is not None:
        hidden |= positions[:, None] // reach.chunk != positions // reach.chunk
    return hidden
