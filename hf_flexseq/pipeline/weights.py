"""Weight gradients, computed apart from input gradients: only the optimizer waits for them.

The previous stage waits for the gradient of a layer's input. Zero-bubble schedules (arXiv
2401.10241) therefore split a backward into I, which only follows the inputs, and W:

    I    each Linear's backward computes dx = dy W, and leaves (x, dy) in the store
    W    dW += dy^T x for everything that the chunk's I has left

Only the Linears inside layers are split. Norms, embedding and head, whose weight gradients are
either tiny or a by-product of the loss, are done in I.

Every chunk uses the same weights and adds to the same gradients, split or not:

    casts    under autocast a weight is cast at its first use in a step, and later uses find that
             copy, until the step ends or the weight changes
    sums     dW is added to the gradient of the Linear where it is multiplied, never rounded to
             the 16 bits of its factors (`kernels/products.py`)

Rejected: autocast's own cache of weights, which is emptied after every forward and lives on in the
graph of every chunk in flight; dW by autograd, which would add a copy of it; and torch's
`stage_backward_weight`, which walks the graph again from every weight and replays a checkpointed
layer each time: 99 attention forwards instead of 18.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hf_flexseq.kernels.products import addmm_into, mm_into

BackwardKey = Hashable  # names the backward of a chunk on a stage


class WeightGradients:
    """Store of one stage: postponed products by backward, and cast weights."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Make plain nn.Linears inside `layers` use this store, until `detach`."""
        self._waiting: dict[BackwardKey, list[_Product]] = {}
        self._deferred_to: BackwardKey | None = None  # the backward that is running, if it is an I
        self._casts: dict[nn.Linear, _Cast] = {}
        self._keeps_casts = False  # True if a step is running
        self._linears: list[nn.Linear] = []
        for layer in layers:
            for module in layer.modules():
                if type(module) is nn.Linear:
                    self._linears.append(module)
        for linear in self._linears:
            # A partial, not a function: a copy of the model has a Linear of its own in it.
            linear.forward = partial(_split_forward, linear, self)

    def detach(self) -> None:
        """Give the Linears their own forward back."""
        for linear in self._linears:
            linear.__dict__.pop("forward", None)
        self._linears = []

    # ---- casts

    @contextmanager
    def casting_once(self) -> Iterator[None]:
        """Keep cast weights inside the block: one optimizer step, or its forwards."""
        self._keeps_casts = True
        try:
            yield
        finally:
            self._keeps_casts = False
            self._casts.clear()

    def cast(self, linear: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [out_features, in_features] in `dtype`, cast at most once per step."""
        weight = linear.weight
        if weight.dtype == dtype:
            return weight
        kept = self._casts.get(linear)
        if kept is not None and kept.is_of(weight, dtype):
            return kept.value
        value = weight.detach().to(dtype)
        if self._keeps_casts:
            self._casts[linear] = _Cast(weight, weight._version, value)
        return value

    # ---- gradients

    @contextmanager
    def deferred(self, key: BackwardKey) -> Iterator[None]:
        """Make backwards inside this block leave their weight gradients for `run(key)`."""
        assert self._deferred_to is None, f"a backward inside the backward of {self._deferred_to}"
        assert key not in self._waiting, f"the input gradient of {key} comes twice"
        self._deferred_to = key
        self._waiting[key] = []
        try:
            yield
        finally:
            self._deferred_to = None

    def run(self, key: BackwardKey) -> None:
        """Add the weight gradients that the backward of `key` has left."""
        assert key in self._waiting, (
            f"the weight gradient of {key} comes before its input gradient, or twice"
        )
        for product in self._waiting.pop(key):
            product.add()

    def put(self, product: "_Product") -> bool:
        """Keep the product if the running backward is an I, else return False: compute it now."""
        if self._deferred_to is None:
            return False
        self._waiting[self._deferred_to].append(product)
        return True

    def check_empty(self) -> None:
        """Fail unless all weight gradients have been added. Afterwards nothing waits."""
        left = list(self._waiting)
        self._waiting = {}
        assert not left, f"the step is over, but the weight gradients of {left} were never added"


class _Cast(NamedTuple):
    """A weight [out_features, in_features] in another dtype."""

    weight: nn.Parameter  # what was cast
    version: int  # of the weight at that time; changes in place count it up
    value: torch.Tensor

    def is_of(self, weight: nn.Parameter, dtype: torch.dtype) -> bool:
        """Return whether this is `weight` as it is now, in `dtype`."""
        unchanged = self.weight is weight and self.version == weight._version
        return unchanged and self.value.dtype == dtype


class _Product:
    """The postponed weight gradient of one Linear for one chunk, of input x [rows, in_features]
    and gradient dy [rows, out_features]."""

    __slots__ = ("dy", "linear", "x")

    def __init__(self, linear: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> None:
        self.linear = linear
        self.x = x.reshape(-1, x.shape[-1])  # [..., in_features] -> [rows, in_features]
        self.dy = dy.reshape(-1, dy.shape[-1])  # [..., out_features] -> [rows, out_features]

    def add(self) -> None:
        """Add dW [out_features, in_features] and db [out_features] to the Linear's gradients."""
        weight = self.linear.weight
        bias = self.linear.bias
        if weight.requires_grad:
            # [out_features, rows] @ [rows, in_features] -> [out_features, in_features]
            if weight.grad is None:
                gradient = torch.empty_like(
                    weight, dtype=_gradient_dtype(weight), requires_grad=False
                )
                weight.grad = mm_into(gradient, self.dy.t(), self.x)
            else:
                addmm_into(weight.grad, self.dy.t(), self.x)
        if bias is not None and bias.requires_grad:
            # [rows, out_features] -> [out_features]
            d_bias = self.dy.sum(0, dtype=_gradient_dtype(bias))
            bias.grad = d_bias if bias.grad is None else bias.grad.add_(d_bias)


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of the parameter's gradient, maybe wider than its own (`ShardedStage`)."""
    dtype: torch.dtype = parameter.grad_dtype or parameter.dtype
    return dtype


def _split_forward(linear: nn.Linear, store: WeightGradients, x: torch.Tensor) -> torch.Tensor:
    """Return linear(x), [..., in_features] -> [..., out_features]; its backward uses the store."""
    out: torch.Tensor = _SplitLinear.apply(x, linear.weight, linear.bias, linear, store)
    return out


class _SplitLinear(torch.autograd.Function):
    """F.linear whose backward adds its weight gradient, or leaves it in the store."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: nn.Linear,
        store: WeightGradients,
    ) -> torch.Tensor:
        """Return x [..., in_features] @ weight.T + bias: [..., out_features]."""
        ctx.input_dtype = x.dtype
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
            weight = store.cast(linear, x.dtype)
            if bias is not None:
                bias = bias.to(x.dtype)
        ctx.save_for_backward(x)
        ctx.linear = linear
        ctx.store = store
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx [..., in_features] for dy [..., out_features]. The gradients of weight and
        bias are added to the Linear's `grad`s, unless the store has kept their product."""
        # What torch's `once_differentiable` refuses later, at a price for each of many calls.
        assert not torch.is_grad_enabled(), "the backward of a pipeline has no backward itself"
        (x,) = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            # [..., out_features] @ [out_features, in_features] -> [..., in_features]
            dx = (dy @ ctx.store.cast(ctx.linear, dy.dtype)).to(ctx.input_dtype)
        if any(ctx.needs_input_grad[1:3]):
            # As an output of the forward x would hold its graph until W, and with it the stage's
            # input.
            product = _Product(ctx.linear, x.detach(), dy)
            if not ctx.store.put(product):
                product.add()
        return dx, None, None, None, None
