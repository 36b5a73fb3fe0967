"""LM head and cross-entropy in one: the summed loss and its gradients, without logits for all
tokens at once.

    for each chunk of tokens:
        logits = hidden @ weight.T + bias                    [rows, V], in one buffer that all
                                                             chunks share
        loss of each token = log(sum(exp(logits))) - logits[target]
        logits become their own gradient: softmax - onehot(target), zero rows where the target is
        IGNORE_INDEX
        d hidden = that @ weight,  d weight += that.T @ hidden,  d bias += its sum over rows

The gradients are finished in the forward and only scaled in the backward, so no logits are kept or
computed twice and the weight is read only while it is whole. Three implementations have this
signature:

    loop    the lines above, anywhere; 16-bit inputs are multiplied into float32 and accumulated in
            float32
    torch   F.linear_cross_entropy (torch >= 2.13) for 32 and 64 bits, where it is exact (6e-15 in
            float64)
    liger   LigerFusedLinearCrossEntropyFunction (liger_kernel >= 0.6.2) on CUDA, where it is
            installed

On one core, 2,048 tokens, 256 wide, 32,000 words, float32, forward and backward: plain 1.6 s and a
peak of 750 MiB, loop 1.2 s and 98 MiB, torch 1.2 s and 98 MiB.

Rejected: recomputing the logits in the backward, a third more work, with a weight that FSDP2 and
ZeRO-3 have taken away by then; chunks over the vocabulary, which need a second pass for the
softmax's denominator; torch's own choice of chunks, which are so small that 32,000 words took 2.7
s instead of 1.2 s; and compacting the tokens to those with a target, because counting them makes
the host wait for the device.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from hf_flexseq.config import IGNORE_INDEX

_CHUNK_BYTES = 64 * 2**20

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]


class Backend(NamedTuple):
    """An implementation, and why it is the one."""

    name: str
    sum: Sum
    why: str


def chunked_cross_entropy_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T + bias)[target], as a scalar in nats.

    hidden [T, C], weight [V, C] and bias [V] of one dtype; targets [T] int64, those equal to
    IGNORE_INDEX count nothing. The result is float32, float64 for float64 inputs. Its backward
    works once: a second one raises RuntimeError. Raises ValueError when the dtypes differ, as the
    head by itself would.
    """
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden states in {hidden.dtype} meet a head in {weight.dtype}; cast "
            f"one, or use autocast"
        )
    if not torch.is_grad_enabled():
        # Autograd functions see requires_grad alone, and would compute all gradients for an
        # evaluation.
        hidden, weight, bias = (
            hidden.detach(),
            weight.detach(),
            None if bias is None else bias.detach(),
        )
    return choose_backend(hidden, weight).sum(hidden, weight, bias, targets)


def choose_backend(hidden: torch.Tensor, weight: torch.Tensor) -> Backend:
    """Which implementation serves hidden [T, C] and weight [V, C], and why not the others."""
    if hidden.dtype.itemsize == 2:
        why_not_liger = _why_not_liger(hidden, weight)
        if why_not_liger is None:
            return Backend("liger", liger_sum, "16-bit on CUDA, and liger_kernel is installed")
        # torch's loss of 2,048 bfloat16 tokens was 0.05 to 0.4 percent off: it adds the chunks up
        # in bfloat16.
        return Backend(
            "loop",
            loop_sum,
            f"F.linear_cross_entropy rounds 16-bit losses; liger: {why_not_liger}",
        )
    if hasattr(nn, "LinearCrossEntropyOptions"):
        return Backend("torch", torch_sum, f"torch {torch.__version__} has F.linear_cross_entropy")
    return Backend(
        "loop", loop_sum, f"torch {torch.__version__} has no chunked F.linear_cross_entropy"
    )


def _why_not_liger(hidden: torch.Tensor, weight: torch.Tensor) -> str | None:
    if hidden.device.type != "cuda":
        return f"it runs on CUDA, not on {hidden.device.type}"
    if weight.requires_grad and not hidden.requires_grad:
        return "it drops the weight's gradient when the hidden states need none"
    return None if _liger_function() else "liger_kernel is not installed"


@functools.cache
def _liger_function():
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction,
        )
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyFunction


def chunk_rows(width: int, vocab: int, itemsize: int) -> int:
    """How many tokens [C = width] get their logits [V = vocab] of `itemsize` bytes at a time.

    64 MiB of logits, but no fewer than a quarter of the weight's own size: every chunk reads the
    whole weight and adds to its whole gradient, which fewer rows would not pay for.
    """
    return max(_CHUNK_BYTES // (vocab * itemsize), width // 4, 1)


def torch_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """`chunked_cross_entropy_sum` by torch; for 32 and 64 bits."""
    rows = chunk_rows(hidden.shape[1], weight.shape[0], hidden.dtype.itemsize)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
    return F.linear_cross_entropy(
        hidden,
        weight,
        targets,
        linear_bias=bias,
        reduction="sum",
        ignore_index=IGNORE_INDEX,
        options=options,
    )


def liger_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """`chunked_cross_entropy_sum` by Liger; for 16 bits on CUDA."""
    # By position, as autograd functions are called: no class weights, no z-loss, no smoothing;
    # sum; no softcap, no z-loss returned; gradients accumulated in float32, because many chunks
    # add up to one weight gradient.
    rest = (None, IGNORE_INDEX, 0.0, 0.0, "sum", None, False, torch.float32)
    return _liger_function().apply(hidden, weight, targets, bias, *rest)[0]


def loop_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """`chunked_cross_entropy_sum` by a loop; anywhere."""
    return _Loop.apply(hidden, weight, bias, targets)


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets):
        chunks = _Chunks(hidden, weight, bias, ctx.needs_input_grad)
        for start in range(0, hidden.shape[0], chunks.logits.shape[0]):
            chunks.run(hidden, targets, start)
        ctx.save_for_backward(*chunks.gradients(hidden, weight, bias))
        return chunks.losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        # In place: the weight's gradient is the largest tensor here. A second backward finds a
        # saved tensor that has been modified, and raises.
        return *(
            None if grad is None else grad.mul_(grad_loss) for grad in ctx.saved_tensors
        ), None


class _Chunks:
    """The buffers of one call, and the arithmetic of a chunk."""

    def __init__(self, hidden, weight, bias, needs):
        self.dtype = torch.float32 if hidden.dtype.itemsize == 2 else hidden.dtype
        # CUDA multiplies 16-bit numbers into float32; elsewhere they are widened first.
        self.factor_dtype = hidden.dtype if hidden.device.type == "cuda" else self.dtype
        self.weight, self.bias = weight.to(self.factor_dtype), bias
        tokens, (vocab, width) = hidden.shape[0], weight.shape
        rows = min(chunk_rows(width, vocab, self.dtype.itemsize), max(tokens, 1))
        self.logits = hidden.new_empty(rows, vocab, dtype=self.dtype)
        self.losses = hidden.new_empty(tokens, dtype=self.dtype)
        self.d_hidden = torch.empty_like(hidden) if needs[0] else None
        self.d_weight = torch.zeros_like(weight, dtype=self.dtype) if needs[1] else None
        self.d_bias = torch.zeros_like(bias, dtype=self.dtype) if needs[2] else None

    def run(self, hidden, targets, start):
        """Losses and gradients of the tokens from `start` on, as many as the buffer holds."""
        chunk = slice(start, start + self.logits.shape[0])
        rows = hidden[chunk].to(self.factor_dtype)  # [rows, C]
        counts = targets[chunk, None] != IGNORE_INDEX  # [rows, 1]
        index = targets[chunk, None].masked_fill(~counts, 0)  # [rows, 1]
        logits = _mm(rows, self.weight.t(), out=self.logits[: rows.shape[0]])  # [rows, V]
        if self.bias is not None:
            logits += self.bias
        logits -= logits.amax(1, keepdim=True)
        picked = logits.gather(1, index)  # [rows, 1]
        total = logits.exp_().sum(1, keepdim=True)  # [rows, 1]
        self.losses[chunk] = (total.log() - picked).masked_fill_(~counts, 0).squeeze(1)
        if self.d_hidden is not None or self.d_weight is not None or self.d_bias is not None:
            counts = counts.to(self.dtype)
            d_logits = logits.mul_(counts / total).scatter_add_(1, index, -counts)
            self.add_gradients(chunk, rows, d_logits)

    def add_gradients(self, chunk, rows, d_logits):
        """Of the tokens in `chunk`, from their hidden states [rows, C] and the logits' gradient
        [rows, V]."""
        factor = d_logits.to(self.factor_dtype)
        if self.d_hidden is not None:
            self.d_hidden[chunk] = factor @ self.weight
        if self.d_weight is not None:
            _addmm(factor.t(), rows, out=self.d_weight)
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0)

    def gradients(self, hidden, weight, bias):
        """d hidden, d weight and d bias in the dtypes of what they belong to; None where not
        needed."""
        pairs = ((self.d_hidden, hidden), (self.d_weight, weight), (self.d_bias, bias))
        return [None if grad is None else grad.to(of.dtype) for grad, of in pairs]


def _mm(a, b, *, out):
    """out = a @ b, where 16-bit factors may have a float32 product."""
    return (
        torch.mm(a, b, out=out)
        if a.dtype == out.dtype
        else torch.mm(a, b, out_dtype=out.dtype, out=out)
    )


def _addmm(a, b, *, out):
    """out += a @ b, where 16-bit factors may have a float32 product."""
    return (
        out.addmm_(a, b)
        if a.dtype == out.dtype
        else torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    )
