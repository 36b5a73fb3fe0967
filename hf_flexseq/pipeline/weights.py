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

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

Key = Hashable  # names the backward of a chunk on a stage


class WeightGradients:
    """The store of one stage: products that wait, by the backward that left them."""

    __slots__ = ("_deferred_to", "_linears", "_waiting")

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Let every plain nn.Linear inside `layers` ask this store in its backward. Undone by
        `detach`."""
        self._waiting: dict[Key, list[_Product]] = {}
        self._deferred_to: Key | None = None  # the backward that is running, if it is an I
        self._linears: list[nn.Linear] = []
        for layer in layers:
            for module in layer.modules():
                if type(module) is nn.Linear:
                    self._linears.append(module)
        for linear in self._linears:
            linear.forward = _split_forward(linear, self)

    def detach(self) -> None:
        """Give the Linears their own forward back."""
        for linear in self._linears:
            linear.__dict__.pop("forward", None)
        self._linears = []

    @contextmanager
    def deferred(self, key: Key) -> Iterator[None]:
        """Make backwards inside this block leave their weight gradients for `run(key)`."""
        assert self._deferred_to is None, f"a backward inside the backward of {self._deferred_to}"
        assert key not in self._waiting, f"the input gradient of {key} comes twice"
        self._deferred_to = key
        self._waiting[key] = []
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
        """Keep the product if the running backward is an I. Returns whether it was kept; if not,
        it is to be computed at once."""
        if self._deferred_to is None:
            return False
        self._waiting[self._deferred_to].append(product)
        return True

    def check_empty(self) -> None:
        """Fail unless all weight gradients have been added. Afterwards nothing waits."""
        left = list(self._waiting)
        self._waiting = {}
        assert not left, f"the step is over, but the weight gradients of {left} were never added"


class _Product:
    """The weight gradient of one Linear for one chunk, not yet computed.

    x: [rows, in_features], what the Linear read; dy: [rows, out_features], the gradient of what it
    gave
    """

    __slots__ = ("dy", "linear", "x")

    def __init__(self, linear: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> None:
        self.linear = linear
        self.x = x.reshape(-1, x.shape[-1])  # [..., in_features] -> [rows, in_features]
        self.dy = dy.reshape(-1, dy.shape[-1])  # [..., out_features] -> [rows, out_features]

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return dW [out_features, in_features] and db [out_features] in the weights' dtype; None
        for each that is not wanted."""
        weight = self.linear.weight
        bias = self.linear.bias
        d_weight = None
        d_bias = None
        if weight.requires_grad:
            # [out_features, rows] @ [rows, in_features] -> [out_features, in_features]
            d_weight = (self.dy.t() @ self.x).to(weight.dtype)
        if bias is not None and bias.requires_grad:
            d_bias = self.dy.sum(0).to(bias.dtype)  # [rows, out_features] -> [out_features]
        return d_weight, d_bias

    def add(self) -> None:
        """Add the gradients to those of the Linear."""
        d_weight, d_bias = self.gradients()
        _add_gradient(self.linear.weight, d_weight)
        _add_gradient(self.linear.bias, d_bias)


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Add `gradient`, of the parameter's shape, to the parameter's own; None adds nothing."""
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _split_forward(
    linear: nn.Linear, store: WeightGradients
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward for `linear`, [..., in_features] -> [..., out_features], that asks the
    store in its backward."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return _SplitLinear.apply(x, linear.weight, linear.bias, linear, store)

    return forward


class _SplitLinear(torch.autograd.Function):
    """F.linear whose backward may leave its weight gradient in the store. Under autocast it
    computes in autocast's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: nn.Linear,
        store: WeightGradients,
    ) -> torch.Tensor:
        """Return x [..., in_features] times weight [out_features, in_features], plus bias
        [out_features]: [..., out_features]."""
        ctx.input_dtype = x.dtype
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        ctx.save_for_backward(x)
        ctx.linear = linear
        ctx.store = store
        if bias is not None:
            bias = bias.to(x.dtype)
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx [..., in_features] for dy [..., out_features], and the gradients of weight and
        bias unless the store has kept their product."""
        (x,) = ctx.saved_tensors
        weight = ctx.linear.weight
        dx = None
        if ctx.needs_input_grad[0]:
            # [..., out_features] @ [out_features, in_features] -> [..., in_features]
            dx = (dy @ weight.to(dy.dtype)).to(ctx.input_dtype)
        # As an output of the forward x would hold its graph until W, and with it the stage's
        # input.
        product = _Product(ctx.linear, x.detach(), dy)
        if not any(ctx.needs_input_grad[1:3]) or ctx.store.put(product):
            return dx, None, None, None, None
        return dx, *product.gradients(), None, None
