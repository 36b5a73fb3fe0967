"""Ring attention in one page, to read before `hf_flexseq/program/ring.py`: each rank has one chunk
of a causal sequence, and in every step it reads the keys and values of the chunk before.

    step      0          1          2
    rank 0    0 over 0   -          -             rank 2, step 1: queries of chunk 2
    rank 1    1 over 1   1 over 0   -             over the keys of chunk 1
    rank 2    2 over 2   2 over 1   2 over 0

Ranks are entries of a list, and a message is a look into another rank's entry. The compiled ring
does the same, and adds equal work (two chunks for each rank, or helpers), many sequences in one
call, transfers ahead of the step that reads them, and gradients that travel while others compute.

Ring Attention (arXiv 2310.01889), with the backward of FlashAttention-2 (arXiv 2307.08691).
"""

import torch


def ring_forward(qs, ks, vs):
    """q, k, v [t, heads, head_dim] of each rank -> out, the same shape, and lse [heads, t]."""
    outs, lses = [], []
    for rank, q in enumerate(qs):
        out = torch.zeros_like(q)
        lse = torch.full((q.shape[1], len(q)), -torch.inf, dtype=q.dtype)
        for source in range(rank, -1, -1):
            scores = _scores(q, ks[source], causal=source == rank)
            part_lse = scores.logsumexp(-1)
            part = torch.einsum("hqk,khd->qhd", (scores - part_lse[..., None]).exp(), vs[source])
            # the softmax over the keys of both is a mean of their results
            both = torch.logaddexp(lse, part_lse)
            out = _weighted(out, lse - both) + _weighted(part, part_lse - both)
            lse = both
        outs.append(out)
        lses.append(lse)
    return outs, lses


def ring_backward(douts, qs, ks, vs, outs, lses):
    """-> dq, dk, dv of each rank. With the merged out and lse every call's gradients are
    independent of the others, and only summed: dq here, dk and dv by the owner of the keys."""
    dqs, dks, dvs = ([torch.zeros_like(x) for x in xs] for xs in (qs, ks, vs))
    for rank, (q, dout, out, lse) in enumerate(zip(qs, douts, outs, lses, strict=True)):
        delta = (dout * out).sum(-1).T  # [heads, t]
        for source in range(rank, -1, -1):
            scores = _scores(q, ks[source], causal=source == rank)
            p = (scores - lse[..., None]).exp()  # [heads, queries, keys]
            dp = torch.einsum("qhd,khd->hqk", dout, vs[source])
            ds = p * (dp - delta[..., None]) * q.shape[-1] ** -0.5
            dqs[rank] += torch.einsum("hqk,khd->qhd", ds, ks[source])
            dks[source] += torch.einsum("hqk,qhd->khd", ds, q)
            dvs[source] += torch.einsum("hqk,qhd->khd", p, dout)
    return dqs, dks, dvs


def _scores(q, k, *, causal):
    """[heads, queries, keys]; later chunks have all keys of earlier ones before them."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(q), len(k)).triu(1).bool() & causal
    return scores.masked_fill(hidden, -torch.inf)


def _weighted(out, log_weights):
    """out [t, heads, head_dim] times the weights of its queries, [heads, t]."""
    return out * log_weights.exp().T[..., None]
