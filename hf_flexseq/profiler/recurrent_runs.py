"""Provide the runs of recurrent layers that a calibration times, on whole sequences of each rank.

    ScanRun         convolution and scan of one layer, as a model calls them, forward and backward
    SecondPassRun   what a rank does besides where its sequence goes on on other ranks: its segment
                    is summed up, and in the backward its gradient

Numbers are such that states neither vanish nor grow, which some arithmetic is slower with.
"""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext
from hf_flexseq.kernels.scans import Scan, Tensors, fla, mamba2
from hf_flexseq.kernels.scans.choose import FLA, choose_scan
from hf_flexseq.kernels.scans.chunked import ChunkedScan
from hf_flexseq.layers import RecurrentShape
from hf_flexseq.recurrent import causal_convolution, mamba2_scan
from hf_flexseq.recurrent.layers import DELTA_RULES, delta_rule

# five: of a delta rule q, k, v, g and beta; of a Mamba 2 x, dt, A, B and C
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

MAMBA_OPTIONS: dict[str, Any] = {
    "dt_bias": None,
    "dt_softplus": True,
    "dt_limit": (0.0, float("inf")),
}


def scan_inputs(sizes: RecurrentShape, rows: torch.Tensor) -> Inputs:
    """Return what a layer's scan takes, from rows [tokens, channels] of its convolution.

    Of a delta rule q, k [tokens, key_heads, key_dim], v [tokens, value_heads, value_dim], g and
    beta; of a Mamba 2 x, dt, A, B and C.
    """
    tokens = rows.shape[0]
    keys = sizes.key_heads * sizes.key_dim
    values = sizes.value_heads * sizes.value_dim
    first, second, third = rows[:, : 2 * keys + values].split((keys, keys, values), dim=1)
    k = second.reshape(tokens, sizes.key_heads, sizes.key_dim)
    q = first.reshape(tokens, sizes.key_heads, sizes.key_dim)
    v = third.reshape(tokens, sizes.value_heads, sizes.value_dim)
    ones = rows.new_ones(tokens, sizes.value_heads)
    if sizes.kind == "mamba2":
        return v, -3 * ones, -ones[0], k, q
    if sizes.kind == "kimi_delta":
        decays = rows.new_full((tokens, sizes.value_heads, sizes.key_dim), -0.05)
        return q, k, v, decays, 0.5 * ones
    return q, k, v, -0.05 * ones, 0.5 * ones


def run_layer(
    sizes: RecurrentShape,
    rows: torch.Tensor,
    weight: torch.Tensor,
    context: SequenceContext,
) -> torch.Tensor:
    """Return what a layer's convolution and scan make of rows [tokens, channels].

    weight: [channels, width].
    """
    rows = causal_convolution(rows, weight, None, context)
    if sizes.kind == "convolution":
        return rows
    inputs = scan_inputs(sizes, rows)
    if sizes.kind == "mamba2":
        return mamba2_scan(*inputs, context, **MAMBA_OPTIONS)
    return delta_rule(sizes.kind, *inputs, context, l2norm=True)


def scan_of(
    sizes: RecurrentShape, inputs: Inputs, context: SequenceContext
) -> tuple[Scan, Tensors]:
    """Return the scan that runs such a layer on one sequence, and what it takes, from what
    `scan_inputs` returns."""
    first, *_ = inputs
    device = first.device
    if sizes.kind != "mamba2":
        chunk_inputs, fla_rule = DELTA_RULES[sizes.kind]
        if choose_scan(sizes.kind, device, first.dtype, sizes.key_dim) == FLA:
            return fla.FlaScan((first.shape[0],), device, fla_rule(), l2norm=True), inputs
    grid = context.programs.grid
    scan = ChunkedScan(grid)
    if sizes.kind == "mamba2":
        return scan, mamba2.chunk_inputs(*inputs, grid, **MAMBA_OPTIONS)
    return scan, chunk_inputs(*inputs, grid, l2norm=True)


class ScanRun:
    """Convolution and scan of one layer, forward and backward."""

    def __init__(
        self,
        sizes: RecurrentShape,
        context: SequenceContext,
        tokens: int,
        *,
        replays: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """context: of a shard of `tokens` tokens. replays: whether the backward computes the layer
        again."""
        self.sizes = sizes
        self.context = context
        self.replays = replays
        options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
        self.rows = torch.ones(tokens, sizes.channels, **options)  # [tokens, channels]
        weight = torch.full((sizes.channels, sizes.width), 1 / sizes.width, **options)
        self.weight = weight  # [channels, width]

    def __call__(self) -> None:
        arguments = (self.sizes, self.rows, self.weight, self.context)
        if self.replays:
            out = checkpoint(run_layer, *arguments, use_reentrant=False)
        else:
            out = run_layer(*arguments)
        torch.autograd.grad(out, (self.rows, self.weight), torch.ones_like(out))


class SecondPassRun:
    """The end state and the transition of a segment, and the gradient of the state before it."""

    def __init__(
        self,
        sizes: RecurrentShape,
        context: SequenceContext,
        tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """context: of a shard of `tokens` tokens."""
        rows = torch.ones(tokens, sizes.channels, dtype=dtype, device=device)
        self.scan, self.inputs = scan_of(sizes, scan_inputs(sizes, rows), context)
        self.dout, _, self.saved = self.scan.forward(self.inputs, None)

    def __call__(self) -> None:
        self.scan.summarise(self.inputs, (0,), (0,))
        self.scan.summarise_backward(self.dout, self.inputs, self.saved, (0,))
