"""An MLP that is computed for one piece of the tokens after the other, forward and backward.

The activations inside of an MLP are wider than the hidden states, and exist for all tokens at
once. An MLP treats every token alone, so its tokens can be cut into pieces, *tiles*:

    forward     compute each tile without a graph, and keep the input of the MLP alone
    backward    compute each tile again, with a graph, and take its gradients at once

The forward runs twice instead of once. Under activation checkpointing it runs twice as well, not
three times: the replay of a layer ends as soon as it has all of the layer's saved tensors, and the
input is saved before the MLP runs. Where the rest of the layer saves more, such as a norm after
the MLP, or where `torch.utils.checkpoint.set_checkpoint_early_stop(False)` is set, it runs three
times.

Gradients of the hidden states equal the gradients of an MLP in one piece. Gradients of weights are
sums over tokens in another order. They are returned once, when all tiles are done, as wrappers
expect: DDP sees a gradient that is ready once, FSDP2 and ZeRO-3 one reduction. Tiles use
`torch.autograd.grad`, whose hooks on weights do not fire. Weights are inputs of the function, and
frozen ones cost nothing.

In 16 bits gradients of weights are added in float32 and rounded once. While the backward of one
MLP runs, this holds 4 bytes for each of its trained weights besides the gradient of a tile.

Rejected: `backward` in each tile, which adds to `.grad` and fires the wrappers' hooks in the
middle. Rejected: to keep the input as an attribute of the node, which neither checkpointing nor
hooks on saved tensors would see.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

Compute = Callable[[torch.Tensor], torch.Tensor]


class TokenWise(NamedTuple):
    """A function that treats every token alone."""

    compute: Compute
    """Takes hidden states [..., tokens, hidden], and returns a tensor of this shape."""
    weights: Callable[[], list[torch.Tensor]]
    """Returns the weights that get gradients, always as many and in one order: those that
    `compute` uses now, for wrappers may exchange them between forward and backward."""


def in_tiles(function: TokenWise, hidden: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return `function.compute(hidden)`, computed in `tiles` pieces of the tokens.

    hidden: [..., tokens, hidden] -> the same shape. tiles: at least 1; no more pieces are made
    than there are tokens. The function must draw no random numbers.
    """
    arithmetic = _Arithmetic.now(hidden.device.type)
    if not torch.is_grad_enabled():
        return _forward(function.compute, hidden, tiles, arithmetic)
    # The input is saved here, before anything is computed.
    node = _Tiles.apply(function, tiles, arithmetic, hidden, *function.weights())
    with torch.no_grad():
        result = _forward(function.compute, hidden, tiles, arithmetic)
    return _WithGradient.apply(node, result)


# ---- autocast


class _Arithmetic(NamedTuple):
    """State of autocast, which the backward restores."""

    device_type: str
    dtype: torch.dtype | None
    """Dtype that it casts to; None while it is off."""

    @classmethod
    def now(cls, device_type: str) -> "_Arithmetic":
        """Return the state for tensors of a device."""
        if not torch.amp.is_autocast_available(device_type):  # as for the meta device
            return cls(device_type, None)
        if not torch.is_autocast_enabled(device_type):
            return cls(device_type, None)
        return cls(device_type, torch.get_autocast_dtype(device_type))

    def restored(self) -> AbstractContextManager[Any]:
        """Surround the computation of a tile. Weights are cast anew for each: a computation with a
        graph must not take weights from autocast's cache that were cast without one."""
        if not torch.amp.is_autocast_available(self.device_type):
            return nullcontext()
        is_on = self.dtype is not None
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=is_on, cache_enabled=False
        )

    def result_dtype(self, hidden: torch.Tensor) -> torch.dtype:
        """Return the dtype in which results are expected; a gradient in another one is cast."""
        if self.dtype is None or hidden.dtype == torch.float64:
            return hidden.dtype
        return self.dtype


# ---- forward


def _pieces(x: torch.Tensor, tiles: int) -> Sequence[torch.Tensor]:
    """Return [..., tokens, hidden] cut along its tokens, views of [..., n, hidden] each."""
    count = max(1, min(tiles, x.shape[-2]))
    return x.tensor_split(count, dim=-2)


def _forward(
    compute: Compute, hidden: torch.Tensor, tiles: int, arithmetic: _Arithmetic
) -> torch.Tensor:
    """Return the result of all tiles, [..., tokens, hidden], in the dtype of the first one."""
    whole: torch.Tensor | None = None
    start = 0
    for piece in _pieces(hidden, tiles):
        with arithmetic.restored():
            result = compute(piece)  # [..., n, hidden]
        if whole is None:
            whole = result.new_empty(hidden.shape)
        stop = start + piece.shape[-2]
        whole[..., start:stop, :] = result
        start = stop
    assert whole is not None, "there is one tile at least"
    return whole


# ---- backward


class _Tiles(torch.autograd.Function):
    """A node that keeps hidden states, and returns a stand-in for the result: its gradient is all
    that is used of it."""

    @staticmethod
    def forward(
        ctx: Any,
        function: TokenWise,
        tiles: int,
        arithmetic: _Arithmetic,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        """hidden: [..., tokens, hidden] -> this shape, without memory."""
        ctx.function = function
        ctx.tiles = tiles
        ctx.arithmetic = arithmetic
        ctx.save_for_backward(hidden)
        dtype = arithmetic.result_dtype(hidden)
        return hidden.new_zeros((), dtype=dtype).expand(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """gradient: [..., tokens, hidden] -> the gradients of hidden, of this shape, and of each
        weight."""
        (hidden,) = ctx.saved_tensors
        weights = ctx.function.weights()
        assert len(weights) == len(ctx.needs_input_grad) - 4, "weights were frozen since"
        sums = _Sums(weights)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[3] else None
        start = 0
        pieces = _pieces(hidden, ctx.tiles)
        for piece, of_result in zip(pieces, _pieces(gradient, ctx.tiles), strict=True):
            leaf = piece.detach().requires_grad_(of_hidden is not None)
            with torch.enable_grad(), ctx.arithmetic.restored():
                result = ctx.function.compute(leaf)  # [..., n, hidden]
            inputs = [*weights] if of_hidden is None else [*weights, leaf]
            found = torch.autograd.grad(
                result, inputs, of_result.to(result.dtype), allow_unused=True
            )
            sums.add(found[: len(weights)])
            stop = start + piece.shape[-2]
            if of_hidden is not None:
                of_hidden[..., start:stop, :] = found[-1]
            start = stop
        return (None, None, None, of_hidden, *sums.rounded())


class _Sums:
    """Sums over tiles of the gradients of weights, in float32 at least."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = weights
        self._sums: list[torch.Tensor | None] = [None] * len(weights)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of a tile, one for each weight; None for a weight without a part."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._sums[index]
            if total is None:
                is_short = gradient.dtype.itemsize == 2
                self._sums[index] = gradient.float() if is_short else gradient
            else:
                total += gradient

    def rounded(self) -> list[torch.Tensor | None]:
        """Return the sums in the dtypes of the weights."""
        rounded: list[torch.Tensor | None] = []
        for index, weight in enumerate(self._weights):
            total = self._sums[index]
            self._sums[index] = None
            rounded.append(None if total is None else total.to(weight.dtype))
        return rounded


class _WithGradient(torch.autograd.Function):
    """Gives a result the gradient function of its stand-in."""

    @staticmethod
    def forward(ctx: Any, node: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """node and result: [..., tokens, hidden] -> the result."""
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Hand the gradient, [..., tokens, hidden], on to the stand-in."""
        return gradient, None
