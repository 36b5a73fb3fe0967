"""Compute LM head, log-probabilities of targets and entropies in one, with gradients for any
weights of both, without logits for all tokens at once.

    z = hidden @ weight.T + bias            [rows, V] for a chunk of tokens
    p = softmax(z)
    log-probability  l = log p[target]      entropy  H = -sum(p * log p)
    mean  m = mean(log p), for smoothed labels

    d l / d z = onehot(target) - p          d H / d z = -p * (log p + H)
    d m / d z = 1 / V - p

In shapes T is the tokens, C the width of the hidden states, V the vocabulary.

Most losses of these outputs are known only after the forward, which therefore cannot finish the
gradients as the chunked loss does (`chunked_loss.py`): the backward computes every chunk's logits
a second time, and keeps log(sum(exp(z))) and H, two numbers per token. A loss whose gradients at
the log-probabilities are known beforehand has all gradients finished in the forward. Rejected:
keeping the logits, which chunks avoid.

The reference implementation, which makes all logits, is `plain_figures` in
tests/hf/test_own_losses.py.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.kernels.chunked_loss import HeadChunks, check_dtypes


def token_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    with_means: bool = False,
    d_log_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the log-probability of each token's target and the entropy of its distribution, and
    with `with_means` the mean of all its log-probabilities, each [T] in nats, and 0 where the
    target is IGNORE_INDEX.

    hidden [T, C], weight [V, C] and bias [V] of one dtype; targets [T] int64. The results are
    float32, float64 for float64 inputs. Raises ValueError when the dtypes differ, as the head by
    itself would.

    d_log_probs: the gradients [T] that the log-probabilities will get, but for one factor, where
    they are known and the other results will get none.
    """
    check_dtypes(hidden, weight)
    found: tuple[torch.Tensor, ...] = _TokenOutputs.apply(
        hidden, weight, bias, targets, with_means, d_log_probs
    )
    return found


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        with_means: bool,
        known: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """hidden [T, C], weight [V, C], bias [V] or None, targets [T], known gradients [T] or None
        -> two or three of [T]."""
        needs_grad = ctx.needs_input_grad if known is not None else (False, False, False)
        head = HeadChunks(hidden, weight, bias, needs_grad)
        log_probs = hidden.new_empty(hidden.shape[0], dtype=head.dtype)
        entropy = torch.empty_like(log_probs)
        means = torch.empty_like(log_probs)
        log_sums = torch.empty_like(log_probs)  # log(sum(exp(logits)))
        if known is not None:
            # gradients of one size whatever the divisor of the loss is, which 16 bits hold
            known = known / known.abs().amax().clamp_min(torch.finfo(known.dtype).tiny)
        for chunk, logits in head.logits():
            counts = targets[chunk, None] != IGNORE_INDEX  # [rows, 1]
            index = targets[chunk, None].masked_fill(~counts, 0)  # [rows, 1]
            # the largest logit is moved to 0: l = z[target] - log(sum(exp(z)))
            largest = logits.amax(1, keepdim=True)  # [rows, 1]
            logits -= largest
            picked = logits.gather(1, index)  # [rows, 1]
            mean = logits.mean(1, keepdim=True) if with_means else None  # [rows, 1]
            exponentials = logits.exp()  # [rows, V]
            total = exponentials.sum(1, keepdim=True)  # [rows, 1]
            log_total = total.log()
            spread = log_total - logits.mul_(exponentials).sum(1, keepdim=True) / total
            if known is not None:
                of_target = known[chunk, None].masked_fill(~counts, 0).to(head.dtype)  # [rows, 1]
                d_logits = exponentials.mul_(-of_target / total)  # [rows, V]
                head.add(chunk, d_logits.scatter_add_(1, index, of_target))
            picked = (picked - log_total).masked_fill_(~counts, 0)
            if mean is not None:
                means[chunk] = (mean - log_total).masked_fill_(~counts, 0).squeeze(1)
            log_probs[chunk] = picked.squeeze(1)
            entropy[chunk] = spread.masked_fill_(~counts, 0).squeeze(1)
            log_sums[chunk] = (largest + log_total).squeeze(1)
        ctx.is_finished = known is not None
        if known is None:
            ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy)
        else:
            ctx.save_for_backward(known, *head.gradients())
        return (log_probs, entropy, means) if with_means else (log_probs, entropy)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_log_probs: torch.Tensor,
        d_entropy: torch.Tensor,
        d_means: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Each [T] -> d hidden [T, C], d weight [V, C], d bias [V], and None thrice."""
        if ctx.is_finished:
            known, *finished = ctx.saved_tensors
            factor = _factor(d_log_probs, known)
            # In place: the weight's gradient is the largest tensor here.
            grads = [None if grad is None else grad.mul_(factor) for grad in finished]
            return (*grads, None, None, None)
        hidden, weight, bias, targets, log_sums, entropy = ctx.saved_tensors
        head = HeadChunks(hidden, weight, bias, ctx.needs_input_grad)
        for chunk, logits in head.logits():
            # d logits = d l * (onehot - p) - d H * p * (log p + H) + d m * (1 / V - p), 0 without
            # a target
            counts = targets[chunk, None] != IGNORE_INDEX  # [rows, 1]
            index = targets[chunk, None].masked_fill(~counts, 0)  # [rows, 1]
            of_target = d_log_probs[chunk, None].masked_fill(~counts, 0)  # [rows, 1]
            of_entropy = d_entropy[chunk, None].masked_fill(~counts, 0)  # [rows, 1]
            logits -= log_sums[chunk, None]  # log p
            p = logits.exp()  # [rows, V]
            d_logits = logits.add_(entropy[chunk, None]).mul_(of_entropy).add_(of_target)
            of_mean = None
            if d_means is not None:
                of_mean = d_means[chunk, None].masked_fill(~counts, 0)  # [rows, 1]
                d_logits.add_(of_mean)
            d_logits = d_logits.mul_(p).neg_().scatter_add_(1, index, of_target)  # [rows, V]
            if of_mean is not None:
                d_logits.add_(of_mean / d_logits.shape[1])
            head.add(chunk, d_logits)
        return (*head.gradients(), None, None, None)


def _factor(found: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the number, a scalar, that makes `found` of `known`, each [T]. The host does not wait
    for it, as it would for `known[largest]`."""
    largest = known.abs().argmax(0, keepdim=True)  # [1]
    divisor = known.gather(0, largest).squeeze(0)
    return torch.where(divisor == 0, 0, found.gather(0, largest).squeeze(0) / divisor)
