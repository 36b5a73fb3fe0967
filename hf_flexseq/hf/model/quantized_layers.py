"""Linear layers that bitsandbytes has quantized (QLoRA). `StandIn` runs in their place on tensors
without memory, and keeps for its backward what the quantized one keeps: bitsandbytes needs
numbers.

bitsandbytes is recognised by the modules of its classes, and imported by transformers alone.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.utils.quantization_config import BitsAndBytesConfig

FOUR_BITS, EIGHT_BITS = "Linear4bit", "Linear8bitLt"  # names of classes


def is_quantized(module: nn.Module) -> bool:
    """Tell if a module is a linear layer of bitsandbytes, not an adapter around one."""
    kind = type(module)
    of_bitsandbytes = kind.__module__.partition(".")[0] == "bitsandbytes"
    return of_bitsandbytes and kind.__name__ in (FOUR_BITS, EIGHT_BITS)


def outlier_threshold(config: PreTrainedConfig) -> float:
    """Return the size above which bitsandbytes takes a number for an outlier, whose column it
    computes in 16 bits for all tokens of the call; 0.0 for a model without layers of 8 bits."""
    quantization = getattr(config, "quantization_config", None)
    if not isinstance(quantization, BitsAndBytesConfig) or not quantization.load_in_8bit:
        return 0.0
    return float(quantization.llm_int8_threshold)


class StandIn(nn.Module):
    """Runs in place of a quantized layer, whose arithmetic it does on whole weights."""

    def __init__(self, layer: Any) -> None:
        """layer: of bitsandbytes."""
        super().__init__()
        self.compute_dtype = getattr(layer, "compute_dtype", None)
        self.keeps_input = type(layer).__name__ == EIGHT_BITS
        shape = (layer.out_features, layer.in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if layer.bias is not None:
            bias = torch.empty(layer.out_features, dtype=torch.float32)
            self.bias = nn.Parameter(bias, requires_grad=layer.bias.requires_grad)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of its input."""
        computed = hidden.to(self.compute_dtype or hidden.dtype)
        weight = self.weight.to(computed.dtype)
        product: torch.Tensor = _Product.apply(computed, weight, self.keeps_input)
        if self.bias is not None:
            product = product + self.bias.to(product.dtype)
        return product.to(hidden.dtype)


class _Product(torch.autograd.Function):
    """A product with a weight that is made for it, and is not kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, keeps_input: bool
    ) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        ctx.shape = weight.shape
        # not saved for the backward, so that checkpointed layers keep it, too
        ctx.hidden = hidden if keeps_input else None
        return F.linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """[..., out_features] -> [..., in_features]."""
        return gradient @ gradient.new_empty(ctx.shape), None, None
