"""Recurrent layers as scans and token by token, with random inputs."""

import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from hf_flexseq.kernels.scans import fla, gated_delta, kimi, mamba2
from hf_flexseq.kernels.scans.chunked_scan import ChunkedScan
from hf_flexseq.kernels.scans.grid import ChunkGrid
from tests.attention.recurrent import stepwise

CPU = torch.device("cpu")


class Kind(NamedTuple):
    """A kind of recurrent layer."""

    chunk_inputs: Callable  # of the inputs of a layer, a grid and options
    stepwise: Callable  # of a state, the inputs of a layer and options
    make: Callable  # of a number of tokens, a generator and by how much decays are stronger
    is_of_token: tuple[bool, ...]  # whether an input has a row for each token
    options: dict
    rule: Callable | None = None  # flash-linear-attention's, where that runs the scan


STATE_SHAPE = (4, 6, 8)


def _delta(of, rule=None, *, key_heads=4, channels=False):
    """A delta rule: q, k [tokens, key_heads, 6], v [tokens, 4, 8], g [tokens, 4 heads] or [tokens,
    4, 6], beta [tokens, 4]."""

    def make(tokens, random, stronger):
        def normal(*shape):
            return torch.randn(tokens, *shape, dtype=torch.float64, generator=random)

        g = -0.2 * stronger * (normal(4, 6) if channels else normal(4)).exp()
        return normal(key_heads, 6), normal(key_heads, 6), normal(4, 8), g, normal(4).sigmoid()

    options = {"l2norm": True}
    return Kind(of.chunk_inputs, stepwise.delta_rule_from, make, (True,) * 5, options, rule)


def _mamba_inputs(tokens, random, stronger):
    """x [tokens, 4, 8], dt [tokens, 4], A [4], B, C [tokens, 2, 6], dt_bias [4]."""

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    x, dt, A = normal(tokens, 4, 8), normal(tokens, 4), -stronger * normal(4).exp()
    return x, dt, A, normal(tokens, 2, 6), normal(tokens, 2, 6), normal(4)


def _mamba_chunk_inputs(x, dt, A, B, C, dt_bias, grid, *, dt_softplus, dt_limit):
    dt = mamba2.positive_steps(dt, dt_bias, dt_softplus, dt_limit)
    return mamba2.chunk_inputs(x, dt, A, B, C, grid)


def _mamba_token_inputs(x, dt, A, B, C, dt_bias, *, dt_softplus, dt_limit):
    dt = mamba2.positive_steps(dt, dt_bias, dt_softplus, dt_limit)
    return mamba2.token_inputs(x, dt, A, B, C)


def _mamba_stepwise(*inputs, **options):
    *layer, dt_bias = inputs
    return stepwise.mamba2_from(*layer, dt_bias=dt_bias, **options)


KINDS = {
    "gated delta": _delta(gated_delta),
    "gated delta of grouped keys": _delta(gated_delta, key_heads=2),
    "kimi": _delta(kimi, channels=True),
    "mamba2": Kind(
        _mamba_chunk_inputs,
        _mamba_stepwise,
        _mamba_inputs,
        (True, True, False, True, True, False),
        {"dt_softplus": True, "dt_limit": (0.1, 2.0)},
    ),
}


OF_PACKAGE = {
    "mamba2 of the package": KINDS["mamba2"]._replace(rule=fla.gated_linear_attention),
    "gated delta of the package": _delta(gated_delta, fla.gated_delta_rule),
    "grouped keys of the package": _delta(gated_delta, fla.gated_delta_rule, key_heads=2),
    "kimi of the package": _delta(kimi, fla.kimi_delta_rule, channels=True),
}


class Case:
    """Random inputs of a kind of layer over segments, and gradients of what it gives."""

    def __init__(self, kind, lengths, stronger=1):
        random = torch.Generator().manual_seed(1)
        self.kind = kind
        self.lengths = tuple(lengths)
        self.layer = kind.make(sum(lengths), random, stronger)
        shape = (len(lengths), *STATE_SHAPE)
        self.states = torch.randn(shape, dtype=torch.float64, generator=random)
        self.dfinals = torch.randn(shape, dtype=torch.float64, generator=random)
        heads, _, values = STATE_SHAPE
        of_out = (sum(lengths), heads, values)
        self.dout_rows = torch.randn(of_out, dtype=torch.float64, generator=random)
        for x in (*self.layer, self.states):
            x.requires_grad_()
        self.grid = ChunkGrid(lengths, CPU)
        self.scan = ChunkedScan(self.grid)
        self.dout = self.grid.to_chunks(self.dout_rows).contiguous()  # as the scan takes it
        if kind.rule is not None:
            options = {} if kind.make is _mamba_inputs else {"l2norm": True}
            self.scan = fla.FlaScan(lengths, CPU, kind.rule(**options))
            self.dout = self.dout_rows

    def wanted(self):
        """out [tokens, H, V] and the states behind the segments [segments, H, K, V], token by
        token."""
        results = []
        by_input = [
            x.split(self.lengths) if of_token else [x] * len(self.lengths)
            for x, of_token in zip(self.layer, self.kind.is_of_token, strict=True)
        ]
        for state, *taken in zip(self.states, *by_input, strict=True):
            results.append(self.kind.stepwise(state, *taken, **self.kind.options))
        outs, finals = zip(*results, strict=True)
        return torch.cat(outs), torch.stack(finals)

    def inputs(self):
        """What the scan takes."""
        if self.kind.rule is not None and self.kind.make is _mamba_inputs:
            return _mamba_token_inputs(*self.layer, **self.kind.options)
        if self.kind.rule is not None:
            return self.layer
        return self.kind.chunk_inputs(*self.layer, self.grid, **self.kind.options)

    def rows(self, out):
        """[tokens, H, V] of what the scan gives."""
        return out if self.kind.rule is not None else self.grid.rows(out)


# ---- flash-linear-attention


def stand_in(
    q, k, v, g, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None,
):  # fmt: skip
    """A function of the package, with the arguments that it has: rows [1, tokens, ...]. Without
    beta it is simple gated linear attention."""
    assert scale == (1.0 if beta is None else None)
    assert output_final_state
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert q.shape[0] == 1
    assert initial_state.shape[0] == len(cu_seqlens) - 1
    outs, finals = [], []
    for state, rows in zip(initial_state, pairwise(cu_seqlens), strict=True):
        taken = [x[0, slice(*rows)] for x in (q, k, v, g, beta) if x is not None]
        if beta is None:
            out, final = stepwise.gated_linear_from(state, *taken)
        else:
            out, final = stepwise.delta_rule_from(state, *taken, l2norm=use_qk_l2norm_in_kernel)
        outs.append(out)
        finals.append(final)
    return torch.cat(outs)[None], torch.stack(finals)


@pytest.fixture
def package(monkeypatch):
    """The package, as far as it is called."""
    delta = SimpleNamespace(chunk_gated_delta_rule=stand_in)
    kda = SimpleNamespace(chunk_kda=stand_in)
    gla = SimpleNamespace(chunk_simple_gla=stand_in)
    modules = {"": None, ".ops": None, ".ops.gated_delta_rule": delta, ".ops.kda": kda}
    modules[".ops.simple_gla"] = gla
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"fla{name}", module or SimpleNamespace())
