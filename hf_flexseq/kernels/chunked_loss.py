"""Compute LM head and cross-entropy in one: the summed loss and its gradients, without logits for
all tokens at once.

    for each chunk of tokens:
        logits = hidden @ weight.T + bias         [rows, V], in one buffer that all chunks share
        loss of each token = log(sum(exp(logits))) - logits[target]
        d logits = softmax - onehot(target)       in place; zero where the target is IGNORE_INDEX
        d hidden  = d logits @ weight
        d weight += d logits.T @ hidden
        d bias   += sum of d logits over rows

With label smoothing e the target is (1 - e) onehot + e / V, in the loss and in its gradient.

In shapes T is the tokens, C the width of the hidden states, V the vocabulary.

The gradients are finished in the forward and only scaled in the backward, so no logits are kept or
computed twice and the weight is read only while it is whole. There are two implementations:

    loop    the lines above, anywhere; 16-bit inputs are multiplied into float32 and accumulated in
            float32
    liger   LigerFusedLinearCrossEntropyFunction (liger_kernel >= 0.6.2) for 16 bits on CUDA, where
            it is installed

On one core, 2,048 tokens, 256 wide, 32,000 words, float32, forward and backward: plain 1.6 s and a
peak of 750 MiB, loop 1.2 s and 98 MiB.

Rejected: recomputing the logits in the backward, a third more work, with a weight that FSDP2 and
ZeRO-3 have taken away by then; chunks over the vocabulary, which need a second pass for the
softmax's denominator; torch's F.linear_cross_entropy, which is no faster on a CPU, rounds losses
of 16 bits (2,048 tokens were 0.05 to 0.4 percent off) and takes 0.3 ms to be called; and
compacting the tokens to those with a target, because counting them makes the host wait for the
device.

The slow reference, which makes all logits, is `full_sum` in tests/kernels/test_chunked_loss.py.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.kernels.products import addmm_into, factor_dtype, mm_into, sum_dtype

_CHUNK_BYTES = 64 * 2**20  # bytes of logits that exist at a time


def chunked_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Sum -log softmax(hidden @ weight.T + bias)[target] over tokens, as a scalar in nats.

    hidden [T, C], weight [V, C] and bias [V] of one dtype; targets [T] int64, those equal to
    IGNORE_INDEX count nothing. counts: [T] how often each token counts; None for once. smoothing:
    of labels. Only the loop knows these two. The result is float32, float64 for float64 inputs.
    Its backward works once: a second one raises RuntimeError. Raises ValueError when the dtypes
    differ, as the head by itself would.
    """
    check_dtypes(hidden, weight)
    if not torch.is_grad_enabled():
        # Autograd functions see requires_grad alone, and would compute all gradients for an
        # evaluation.
        hidden = hidden.detach()
        weight = weight.detach()
        if bias is not None:
            bias = bias.detach()
    if counts is None and not smoothing and reason_without_liger(hidden, weight) is None:
        return liger_sum(hidden, weight, bias, targets)
    return _Loop.apply(hidden, weight, bias, targets, counts, smoothing)


def check_dtypes(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError unless hidden [T, C] and weight [V, C] have one dtype."""
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden states in {hidden.dtype} meet a head in {weight.dtype}; cast one, or use "
            "autocast"
        )


def reason_without_liger(hidden: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Return why the loop serves hidden [T, C] and weight [V, C], or None if Liger does."""
    if hidden.dtype.itemsize != 2:
        return f"Liger is for 16 bits, not for {hidden.dtype}"
    if hidden.device.type != "cuda":
        return f"Liger runs on CUDA, not on {hidden.device.type}"
    if weight.requires_grad and not hidden.requires_grad:
        return "Liger drops the weight's gradient when the hidden states need none"
    if _liger_function() is None:
        return "liger_kernel is not installed"
    return None


@functools.cache
def _liger_function() -> Any:
    """Return Liger's autograd function, or None where the package is not installed."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction,
        )
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyFunction


def chunk_rows(width: int, vocab: int, itemsize: int) -> int:
    """Return how many tokens get their logits at a time.

    They make 64 MiB of logits, but no fewer than a quarter of the weight's own size: every chunk
    reads the whole weight and adds to its whole gradient, which fewer rows would not pay for.
    width: C. vocab: V. itemsize: bytes of a logit.
    """
    return max(_CHUNK_BYTES // (vocab * itemsize), width // 4, 1)


def liger_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Compute `chunked_cross_entropy_sum` with Liger, for 16 bits on CUDA."""
    loss, *_ = _liger_function().apply(  # by position, as autograd functions are called
        hidden,
        weight,
        targets,
        bias,
        None,  # no class weights
        IGNORE_INDEX,
        0.0,  # no z-loss
        0.0,  # no label smoothing
        "sum",
        None,  # no softcap
        False,  # return no z-loss
        torch.float32,  # accumulate in it: many chunks add up to one weight gradient
    )
    return loss


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        counts: torch.Tensor | None,
        smoothing: float,
    ) -> torch.Tensor:
        """hidden [T, C], weight [V, C], bias [V] or None, targets and counts [T] -> scalar."""
        head = HeadChunks(hidden, weight, bias, ctx.needs_input_grad)
        losses = hidden.new_empty(hidden.shape[0], dtype=head.dtype)
        for chunk, logits in head.logits():
            # 1. losses: log(sum(exp(logits))) - logits[target], with the largest logit moved to 0
            has_target = targets[chunk, None] != IGNORE_INDEX  # [rows, 1]
            index = targets[chunk, None].masked_fill(~has_target, 0)  # [rows, 1]
            factors = has_target.to(head.dtype)  # [rows, 1]
            if counts is not None:
                factors *= counts[chunk, None]
            logits -= logits.amax(1, keepdim=True)
            picked = logits.gather(1, index)  # [rows, 1]
            if smoothing:
                picked.lerp_(logits.mean(1, keepdim=True), smoothing)
            total = logits.exp_().sum(1, keepdim=True)  # [rows, 1]
            found = (total.log() - picked).masked_fill_(~has_target, 0)  # [rows, 1]
            if counts is not None:
                found *= factors
            losses[chunk] = found.squeeze(1)

            # 2. gradients: softmax - onehot(target), in place of the exponentials
            if head.needs_gradients:
                d_logits = logits.mul_(factors / total)  # [rows, V]
                if smoothing:
                    d_logits -= factors * (smoothing / d_logits.shape[1])
                d_logits.scatter_add_(1, index, (smoothing - 1) * factors)
                head.add(chunk, d_logits)
        ctx.save_for_backward(*head.gradients())
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad_loss, a scalar -> d hidden [T, C], d weight [V, C], d bias [V], and None thrice."""
        # In place: the weight's gradient is the largest tensor here. A second backward finds a
        # saved tensor that has been modified, and raises.
        grads: list[torch.Tensor | None] = []
        for grad in ctx.saved_tensors:
            grads.append(None if grad is None else grad.mul_(grad_loss))
        return (*grads, None, None, None)


class HeadChunks:
    """A head over chunks of tokens: their logits, in one buffer, and the gradients of the head and
    its inputs, summed over chunks."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs_grad: Sequence[bool],
    ) -> None:
        """hidden [T, C], weight [V, C], bias [V] or None. needs_grad: of these three."""
        self.hidden = hidden
        self.weight = weight
        self.bias = bias
        # Sums are made in `dtype`, of factors that may be narrower (products.py).
        self.dtype = sum_dtype(hidden.dtype)
        self.factor_dtype = factor_dtype(hidden.dtype, hidden.device)
        self.weight_factor = weight.to(self.factor_dtype)
        self.d_hidden: torch.Tensor | None = None
        self.d_weight: torch.Tensor | None = None
        self.d_bias: torch.Tensor | None = None
        if needs_grad[0]:
            self.d_hidden = torch.empty_like(hidden)
        if needs_grad[1]:
            self.d_weight = torch.zeros_like(weight, dtype=self.dtype)
        if needs_grad[2]:
            self.d_bias = torch.zeros_like(bias, dtype=self.dtype)
        self.needs_gradients = any(needs_grad[:3])

    def logits(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield chunks of tokens with their logits [rows, V], in one buffer that all of them
        share."""
        tokens = self.hidden.shape[0]
        vocab, width = self.weight.shape
        rows = min(chunk_rows(width, vocab, self.dtype.itemsize), max(tokens, 1))
        buffer = self.hidden.new_empty(rows, vocab, dtype=self.dtype)
        for start in range(0, tokens, rows):
            chunk = slice(start, start + rows)
            hidden = self._factor(chunk)
            logits = mm_into(buffer[: hidden.shape[0]], hidden, self.weight_factor.t())
            if self.bias is not None:
                logits += self.bias
            yield chunk, logits

    def _factor(self, chunk: slice) -> torch.Tensor:
        """Return the hidden states of a chunk as a factor, [rows, C]."""
        return self.hidden[chunk].to(self.factor_dtype)

    def add(self, chunk: slice, d_logits: torch.Tensor) -> None:
        """Add the gradients of a chunk's tokens, d_logits [rows, V]."""
        factor = d_logits.to(self.factor_dtype)
        if self.d_hidden is not None:
            self.d_hidden[chunk] = factor @ self.weight_factor  # [rows, V] x [V, C] -> [rows, C]
        if self.d_weight is not None:
            # [V, rows] x [rows, C] -> [V, C]
            addmm_into(self.d_weight, factor.t(), self._factor(chunk))
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0)  # [rows, V] -> [V]

    def gradients(self) -> list[torch.Tensor | None]:
        """Return d hidden [T, C], d weight [V, C], d bias [V] in the inputs' dtypes, or None."""
        pairs = (
            (self.d_hidden, self.hidden),
            (self.d_weight, self.weight),
            (self.d_bias, self.bias),
        )
        grads: list[torch.Tensor | None] = []
        for grad, like in pairs:
            if grad is None or like is None:
                grads.append(None)
            else:
                grads.append(grad.to(like.dtype))
        return grads
