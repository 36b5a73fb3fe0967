"""Recurrent layers over sequences that several ranks hold, as their models call them.

    gated_delta_rule    Gated DeltaNet (arXiv 2412.06464): Qwen3-Next, Qwen3.5, OLMo-Hybrid
    kimi_delta_rule     the same with a decay for every channel of a key (Kimi Linear, arXiv
                        2510.26692)
    mamba2_scan         Mamba 2 (arXiv 2405.21060): Nemotron-H, Granite 4, Bamba, Falcon-H1, Zamba

All take this rank's rows and return rows of the same tokens. `kernels/scans` works out the effect
of a chunk of 64 tokens on a state, in operations that autograd knows; `scan.py` goes from chunk to
chunk, and from rank to rank. On CUDA flash-linear-attention's kernels do both, where they are
installed (`kernels/scans/choose.py`).
"""

from collections.abc import Callable, Hashable, Mapping
from functools import partial

import torch

from hf_flexseq.attention.recurrent.rows import RecurrentContext, check_rows
from hf_flexseq.attention.recurrent.scan import run_scan
from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.scans import Tensors, fla, gated_delta, kimi, mamba2
from hf_flexseq.kernels.scans.choose import FLA, GATED_DELTA, KIMI_DELTA, MAMBA2, choose_scan
from hf_flexseq.kernels.scans.chunked_scan import ChunkedScan

ChunkInputs = Callable[..., Tensors]
# by kind: what a chunk does to a state, and the kernels of flash-linear-attention
DELTA_RULES: Mapping[str, tuple[ChunkInputs, Callable[..., fla.Rule]]] = {
    GATED_DELTA: (gated_delta.chunk_inputs, fla.gated_delta_rule),
    KIMI_DELTA: (kimi.chunk_inputs, fla.kimi_delta_rule),
}


def delta_rule(
    kind: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    seq_ctx: RecurrentContext,
    *,
    l2norm: bool,
) -> torch.Tensor:
    """Run a delta rule through every sequence, wherever its tokens are.

    With a state S [K, V] for each head, zero before the first token, a token does

        S = exp(g) S;    S = S + k beta (v - k^T S)^T;    out = q^T S

    kind: `GATED_DELTA` or `KIMI_DELTA`. q, k: [tokens, key_heads, K]; v: [tokens, heads, V]; beta:
    [tokens, heads]; g, the logarithm of the decay: [tokens, heads], or for Kimi's rule, with a
    decay for every channel of a key, [tokens, heads, K]. Each key head serves heads / key_heads
    heads that follow each other, in Kimi's rule one. q is multiplied by K ** -0.5; with `l2norm` q
    and k are made unit vectors before. Returns [tokens, heads, V].

    Collective over the groups of the shard. Raises ValueError when q does not have the shard's
    number of tokens.
    """
    check_rows(q, seq_ctx)
    chunk_inputs, fla_rule = DELTA_RULES[kind]
    if choose_scan(kind, q.device, q.dtype, q.shape[-1]) == FLA:
        rule = partial(fla_rule, l2norm=l2norm)
        return _fla((kind, l2norm), rule, (q, k, v, g, beta), seq_ctx, dtype=v.dtype)
    grid = seq_ctx.programs.grid
    inputs = chunk_inputs(q, k, v, g, beta, grid, l2norm=l2norm)
    return grid.rows(run_scan(ChunkedScan(grid), inputs, seq_ctx, dtype=v.dtype))


gated_delta_rule = partial(delta_rule, GATED_DELTA)
kimi_delta_rule = partial(delta_rule, KIMI_DELTA)


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    seq_ctx: RecurrentContext,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """Run Mamba 2's scan through every sequence, wherever its tokens are.

    With a state h [P, N] for each head, zero before the first token, and dt made positive, a token
    does

        h = exp(dt A) h + dt x B^T;    out = h C + D x

    x: [tokens, heads, P]; dt: [tokens, heads]; A, D and dt_bias: [heads]; B, C: [tokens, groups,
    N], each for heads / groups heads that follow each other. dt becomes dt + dt_bias, its softplus
    where `dt_softplus` says so, and is then kept within `dt_limit`. Returns [tokens, heads, P].

    Collective over the groups of the shard. Raises ValueError when x does not have the shard's
    number of tokens.
    """
    check_rows(x, seq_ctx)
    # With D to come, the output is rounded after that.
    dtype = x.dtype if D is None else lse_dtype(x.dtype)
    dt = mamba2.positive_steps(dt, dt_bias, dt_softplus, dt_limit)
    if choose_scan(MAMBA2, x.device, x.dtype, B.shape[-1]) == FLA:
        rows = mamba2.token_inputs(x, dt, A, B, C)
        out = _fla(MAMBA2, fla.gated_linear_attention, rows, seq_ctx, dtype=dtype)
    else:
        grid = seq_ctx.programs.grid
        inputs = mamba2.chunk_inputs(x, dt, A, B, C, grid)
        out = grid.rows(run_scan(ChunkedScan(grid), inputs, seq_ctx, dtype=dtype))
    if D is not None:
        out = out + x * D.to(out.dtype).unsqueeze(-1)
    return out.to(x.dtype)


def _fla(
    key: Hashable,
    make_rule: Callable[[], fla.Rule],
    inputs: Tensors,
    seq_ctx: RecurrentContext,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return out [tokens, heads, V] by a rule of flash-linear-attention, from its rows.

    key: of the rule, which all layers of the kind share. dtype: of the output.
    """
    device = inputs[0].device
    scan = seq_ctx.programs.once(key, lambda lengths: fla.FlaScan(lengths, device, make_rule()))
    return run_scan(scan, inputs, seq_ctx, dtype=dtype)
