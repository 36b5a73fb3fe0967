"""Scans give what the functions of transformers give that they stand in for."""

from unittest import mock

import pytest
import torch
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_flexseq.kernels.scans.chunked import ChunkedScan
from hf_flexseq.kernels.scans.grid import ChunkGrid
from tests.kernels.scans.cases import CPU, KINDS

TOKENS = 150


def of_transformers(kind, layer):
    """Their output and final state of one sequence: [tokens, H, V], [H, K, V]."""
    options = KINDS[kind].options
    if kind == "mamba2":
        x, dt, A, B, C, dt_bias = layer
        out, state = modeling_bamba.mamba2_chunk_scan(
            x[None],
            dt[None],
            A,
            B[None],
            C[None],
            chunk_size=64,
            dt_bias=dt_bias,
            return_final_states=True,
            **options,
        )
        return out[0], state[0].transpose(-1, -2)  # theirs is [H, V, K]
    function = modeling_qwen3_next.torch_chunk_gated_delta_rule
    if kind == "kimi":
        function = modeling_kimi_linear.chunk_kimi_delta_attention
    q, k, v, g, beta = (x[None] for x in layer)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": options["l2norm"]}
    out, state = function(q, k, v, g=g, beta=beta, **options)
    return out[0], state[0]


def ours(kind, layer):
    """Our output and final state of one sequence: [tokens, H, V], [H, K, V]."""
    grid = ChunkGrid((TOKENS,), CPU)
    inputs = KINDS[kind].chunk_inputs(*layer, grid, **KINDS[kind].options)
    out, finals, _ = ChunkedScan(grid).forward(inputs, None)
    return grid.rows(out), finals[0]


@pytest.mark.parametrize("kind", KINDS)
def test_both_are_the_same(kind):
    layer = KINDS[kind].make(TOKENS, torch.Generator().manual_seed(0), 1)
    # They compute in float32 whatever comes.
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        wanted = of_transformers(kind, layer)
    assert wanted[0].dtype == torch.float64
    for got, want in zip(ours(kind, layer), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.bfloat16):
        lower = tuple(x.to(dtype) for x in layer)
        got = ours(kind, lower)
        assert got[0].dtype == got[1].dtype == torch.float32
        for one, want in zip(got, of_transformers(kind, lower), strict=True):
            # A decay between two tokens is a difference of sums, here of up to some hundred.
            rounding = max(torch.finfo(want.dtype).eps, 32 * torch.finfo(torch.float32).eps)
            far = rounding * want.abs().max().item()
            torch.testing.assert_close(one.to(want.dtype), want, rtol=0, atol=far)
