"""Recurrent layers as scans and token by token, with random inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_flexseq.kernels.scans import gated_delta, kimi, mamba2
from tests.recurrent import stepwise


class Kind(NamedTuple):
    """A kind of recurrent layer."""

    chunk_inputs: Callable[..., Any]
    """Of the inputs of a layer, a grid and options."""
    stepwise: Callable[..., Any]
    """Of a state, the inputs of a layer and options."""
    make: Callable[..., tuple[torch.Tensor, ...]]
    """Of a number of tokens, a generator and by how much decays are stronger."""
    is_of_token: tuple[bool, ...]
    """Whether an input has a row for each token."""
    options: dict[str, Any]
    state_shape: tuple[int, int, int]


def _delta_inputs(
    tokens: int, random: torch.Generator, stronger: float, *, key_heads: int, channels: bool
) -> tuple[torch.Tensor, ...]:
    """q, k [tokens, key_heads, 6], v [tokens, 4, 5], g [tokens, 4] or [tokens, 4, 6], beta."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, dtype=torch.float64, generator=random)

    g = -0.2 * stronger * (normal(4, 6) if channels else normal(4)).exp()
    return normal(key_heads, 6), normal(key_heads, 6), normal(4, 5), g, normal(4).sigmoid()


def _mamba_inputs(
    tokens: int, random: torch.Generator, stronger: float
) -> tuple[torch.Tensor, ...]:
    """x [tokens, 4, 5], dt [tokens, 4], A [4], B, C [tokens, 2, 6], dt_bias [4]."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    x, dt, A = normal(tokens, 4, 5), normal(tokens, 4), -stronger * normal(4).exp()
    return x, dt, A, normal(tokens, 2, 6), normal(tokens, 2, 6), normal(4)


def _mamba_chunk_inputs(*inputs: Any, **options: Any) -> Any:
    *layer, dt_bias, grid = inputs
    return mamba2.chunk_inputs(*layer, grid, dt_bias=dt_bias, **options)


def _mamba_stepwise(*inputs: Any, **options: Any) -> Any:
    *layer, dt_bias = inputs
    return stepwise.mamba2_from(*layer, dt_bias=dt_bias, **options)


def _delta(of: Any, *, key_heads: int, channels: bool, l2norm: bool) -> Kind:
    def make(*how: Any) -> tuple[torch.Tensor, ...]:
        return _delta_inputs(*how, key_heads=key_heads, channels=channels)

    options = {"l2norm": l2norm}
    return Kind(of.chunk_inputs, stepwise.delta_rule_from, make, (True,) * 5, options, (4, 6, 5))


KINDS = {
    "gated delta": _delta(gated_delta, key_heads=4, channels=False, l2norm=True),
    "gated delta of grouped keys": _delta(gated_delta, key_heads=2, channels=False, l2norm=True),
    "kimi": _delta(kimi, key_heads=4, channels=True, l2norm=True),
    "mamba2": Kind(
        _mamba_chunk_inputs,
        _mamba_stepwise,
        _mamba_inputs,
        (True, True, False, True, True, False),
        {"dt_softplus": True, "dt_limit": (0.1, 2.0)},
        (4, 6, 5),
    ),
}
