"""Recurrent layers of one whole sequence, token by token: the obvious twins of `recurrent/`."""

import torch
from torch.nn import functional

from hf_flexseq.attention import recurrent


def convolution(x, weight, bias):
    """[tokens, channels] -> [tokens, channels]; weight [channels, W]."""
    width = weight.shape[1]
    padded = torch.cat((x.new_zeros(width - 1, x.shape[1]), x))
    rows = []
    for token in range(x.shape[0]):
        read = padded[token : token + width]  # [W, channels]
        rows.append((read * weight.t()).sum(0))
    out = torch.stack(rows)
    return out if bias is None else out + bias


def delta_rule(q, k, v, g, beta, *, l2norm):
    """q, k [tokens, key_heads, K], v [tokens, heads, V], g [tokens, heads] or [tokens, heads, K],
    beta [tokens, heads] -> [tokens, heads, V]."""
    state = v.new_zeros(v.shape[1], q.shape[-1], v.shape[-1])
    return delta_rule_from(state, q, k, v, g, beta, l2norm=l2norm)[0]


def delta_rule_from(state, q, k, v, g, beta, *, l2norm):
    """`delta_rule` from a state [heads, K, V] -> its output, and the state behind it."""
    heads = v.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    if g.dim() == 2:
        g = g.unsqueeze(-1)
    rows = []
    for token in range(q.shape[0]):
        state = state * g[token].exp().unsqueeze(-1)
        read = (k[token].unsqueeze(-1) * state).sum(1)  # [heads, V]
        written = (v[token] - read) * beta[token].unsqueeze(-1)
        state = state + k[token].unsqueeze(-1) * written.unsqueeze(1)
        rows.append((q[token].unsqueeze(-1) * state).sum(1))
    return torch.stack(rows), state


def mamba2(x, dt, A, B, C, *, D, dt_bias, dt_softplus, dt_limit):
    """x [tokens, heads, P], dt [tokens, heads], A, D, dt_bias [heads], B, C [tokens, groups, N] ->
    [tokens, heads, P]."""
    state = x.new_zeros(x.shape[1], B.shape[2], x.shape[2])
    limits = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    return mamba2_from(state, x, dt, A, B, C, **limits)[0] + D.unsqueeze(-1) * x


def mamba2_from(state, x, dt, A, B, C, *, dt_bias, dt_softplus, dt_limit):
    """`mamba2` without D from a state [heads, N, P] -> its output, and the state behind it."""
    heads = x.shape[1]
    B, C = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (B, C))
    dt = dt + dt_bias
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    rows = []
    for token in range(x.shape[0]):
        added = B[token].unsqueeze(-1) * (dt[token].unsqueeze(-1) * x[token]).unsqueeze(1)
        state = state * (dt[token] * A).exp()[:, None, None] + added
        rows.append((C[token].unsqueeze(-1) * state).sum(1))
    return torch.stack(rows), state


def gated_linear_from(state, q, k, v, g):
    """q, k [tokens, heads, K], v [tokens, heads, V], g [tokens, heads], from a state [heads, K, V]
    -> the output, and the state behind it."""
    rows = []
    for token in range(q.shape[0]):
        decayed = state * g[token].exp()[:, None, None]
        state = decayed + k[token].unsqueeze(-1) * v[token].unsqueeze(1)
        rows.append((q[token].unsqueeze(-1) * state).sum(1))
    return torch.stack(rows), state


LAYERS = {  # by kind: over ranks, and token by token
    "convolution": (recurrent.causal_convolution, convolution),
    "gated delta": (recurrent.gated_delta_rule, delta_rule),
    "kimi delta": (recurrent.kimi_delta_rule, delta_rule),
    "mamba2": (recurrent.mamba2_scan, mamba2),
}


def layer(kind, seq_ctx, *tensors, **options):
    """A recurrent layer of this rank's rows; without a context of one whole sequence, token by
    token."""
    over_ranks, alone = LAYERS[kind]
    if seq_ctx is None:
        return alone(*tensors, **options)
    return over_ranks(*tensors, seq_ctx, **options)
