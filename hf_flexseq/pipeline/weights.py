"""Weight gradients apart from input gradients: what a pipeline can do later, because nobody waits
for it.

The stage before waits for the gradient of a layer's input; of the weights' only the optimizer
does. Zero-bubble schedules (arXiv 2401.10241) therefore split a backward into I, which only
follows the inputs, and W:

    I    each Linear's backward computes dx = dy W, and leaves (x, dy) in the store
    W    dW += dy^T x for everything that the chunk's I has left

Only the Linears inside layers are split. Norms, embedding and head, whose weight gradients are
either tiny or a by-product of the loss, are done in I.

Rejected: torch's `stage_backward_weight`, which walks the graph again from every weight and
replays a checkpointed layer each time: 99 attention forwards instead of 18.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

Key = Hashable


class WeightGradients:
    """The store of one stage: what waits, by the chunk that left it."""

    __slots__ = ("_deferred_to", "_linears", "_waiting")

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Let every plain nn.Linear inside `layers` ask this store in its backward. Undone by
        `detach`."""
        self._waiting: dict[Key, list[_Product]] = {}
        self._deferred_to: Key | None = None
        self._linears = [
            module for layer in layers for module in layer.modules() if type(module) is nn.Linear
        ]
        for linear in self._linears:
            linear.forward = _split_forward(linear, self)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give the Linears their own forward back."""
        for linear in self._linears:
            linear.__dict__.pop("forward", None)
        self._linears = []

    @contextmanager
    def deferred(self, key: Key) -> Iterator[None]:
        """Backwards inside this block leave their weight gradients for `run(key)`."""
        assert self._deferred_to is None, f"a backward inside the backward of {self._deferred_to}"
        assert key not in self._waiting, f"the input gradient of {key} comes twice"
        self._deferred_to, self._waiting[key] = key, []
        try:
            yield
        finally:
            self._deferred_to = None

    def run(self, key: Key) -> None:
        """Add the weight gradients that the backward of `key` has left."""
        assert key in self._waiting, (
            f"the weight gradient of {key} comes before its input gradient, or twice"
        )
        for product in self._waiting.pop(key):
            product.add()

    def put(self, product: "_Product") -> bool:
        """Whether the product waits now; if not, it is to be computed at once."""
        if self._deferred_to is None:
            return False
        self._waiting[self._deferred_to].append(product)
        return True

    def check_empty(self) -> None:
        left, self._waiting = list(self._waiting), {}
        assert not left, f"the step is over, but the weight gradients of {left} were never added"


class _Product:
    """One Linear's x [rows, in] and dy [rows, out] of one chunk."""

    __slots__ = ("dy", "linear", "x")

    def __init__(self, linear: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> None:
        self.linear, self.x, self.dy = (
            linear,
            x.reshape(-1, x.shape[-1]),
            dy.reshape(-1, dy.shape[-1]),
        )

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dW [out, in] and db [out], in the weights' dtype; None where not wanted."""
        weight, bias = self.linear.weight, self.linear.bias
        d_weight = (self.dy.t() @ self.x).to(weight.dtype) if weight.requires_grad else None
        d_bias = self.dy.sum(0).to(bias.dtype) if bias is not None and bias.requires_grad else None
        return d_weight, d_bias

    def add(self) -> None:
        for parameter, gradient in zip(
            (self.linear.weight, self.linear.bias), self.gradients(), strict=True
        ):
            if gradient is not None:
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )


def _split_forward(linear: nn.Linear, store: WeightGradients) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return _SplitLinear.apply(x, linear.weight, linear.bias, linear, store)

    return forward


class _SplitLinear(torch.autograd.Function):
    """F.linear whose backward may leave its weight gradient in the store. Under autocast it
    computes in its dtype."""

    @staticmethod
    def forward(ctx, x, weight, bias, linear, store):  # type: ignore[no-untyped-def]
        ctx.input_dtype = x.dtype
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        ctx.save_for_backward(x)
        ctx.linear, ctx.store = linear, store
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        weight = ctx.linear.weight
        dx = (dy @ weight.to(dy.dtype)).to(ctx.input_dtype) if ctx.needs_input_grad[0] else None
        # As an output of the forward x would hold its graph until W, and with it the stage's
        # input.
        product = _Product(ctx.linear, x.detach(), dy)
        if not any(ctx.needs_input_grad[1:3]) or ctx.store.put(product):
            return dx, None, None, None, None
        return dx, *product.gradients(), None, None
