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
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.kernels.products import sum_dtype
from hf_flexseq.kernels.token_outputs import check_dtypes, token_outputs


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
    factors = -torch.ones_like(targets, dtype=sum_dtype(hidden.dtype))  # [T]
    if counts is not None:
        factors *= counts
    (log_probs,) = token_outputs(
        hidden,
        weight,
        bias,
        targets,
        with_entropy=False,
        d_log_probs=factors,
        smoothing=smoothing,
    )
    return (log_probs * factors).sum()


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
