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
gradients: the backward computes every chunk's logits a second time, and keeps log(sum(exp(z))) and
H, two numbers per token. Where the gradients at the log-probabilities are known beforehand, as in
`chunked_loss.py`, the forward finishes all gradients. Rejected: keeping the logits, which chunks
avoid.

The reference implementation, which makes all logits, is `plain_figures` in
tests/hf/test_own_losses.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.kernels.products import addmm_into, factor_dtype, mm_into, sum_dtype

_CHUNK_BYTES = 64 * 2**20  # bytes of logits that exist at a time


def token_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    with_entropy: bool = True,
    with_means: bool = False,
    d_log_probs: torch.Tensor | None = None,
    smoothing: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Return the log-probability of each token's target, with `with_entropy` the entropy of its
    distribution, and with `with_means` the mean of all its log-probabilities, each [T] in nats,
    and 0 where the target is IGNORE_INDEX.

    hidden [T, C], weight [V, C] and bias [V] of one dtype; targets [T] int64. The results are
    float32, float64 for float64 inputs. Raises ValueError when the dtypes differ, as the head by
    itself would.

    d_log_probs: the gradients [T] that the log-probabilities will get, but for one factor, where
    they are known and the other results will get none. Only then may the entropy be left out, and
    labels be smoothed: a log-probability is (1 - smoothing) l + smoothing m.
    """
    if d_log_probs is None:
        assert with_entropy, "the backward needs it"
        assert not smoothing, "the backward does not smooth"
    check_dtypes(hidden, weight)
    found: tuple[torch.Tensor, ...] = _TokenOutputs.apply(
        hidden, weight, bias, targets, with_entropy, with_means, d_log_probs, smoothing
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
        with_entropy: bool,
        with_means: bool,
        known: torch.Tensor | None,
        smoothing: float,
    ) -> tuple[torch.Tensor, ...]:
        """hidden [T, C], weight [V, C], bias [V] or None, targets [T], known gradients [T] or None
        -> one to three of [T]."""
        needs_grad = ctx.needs_input_grad if known is not None else (False, False, False)
        head = HeadChunks(hidden, weight, bias, needs_grad)
        log_probs = hidden.new_empty(hidden.shape[0], dtype=head.dtype)
        entropy = torch.empty_like(log_probs)
        means = torch.empty_like(log_probs)
        log_sums = torch.empty_like(log_probs)  # log(sum(exp(logits)))
        if known is not None and known.numel():
            # gradients of one size whatever the divisor of the loss is, which 16 bits hold
            known = known / known.abs().amax().clamp_min(torch.finfo(known.dtype).tiny)
        for chunk, logits in head.logits():
            counts = targets[chunk, None] != IGNORE_INDEX  # [rows, 1]
            index = targets[chunk, None].masked_fill(~counts, 0)  # [rows, 1]
            # the largest logit is moved to 0: l = z[target] - log(sum(exp(z)))
            largest = logits.amax(1, keepdim=True)  # [rows, 1]
            logits -= largest
            picked = logits.gather(1, index)  # [rows, 1]
            if with_means:
                means[chunk] = logits.mean(1)
            if smoothing:
                picked.lerp_(logits.mean(1, keepdim=True), smoothing)
            exponentials = logits.exp() if with_entropy else logits.exp_()  # [rows, V]
            total = exponentials.sum(1, keepdim=True)  # [rows, 1]
            log_total = total.log()
            if with_entropy:
                spread = log_total - logits.mul_(exponentials).sum(1, keepdim=True) / total
                entropy[chunk] = spread.masked_fill_(~counts, 0).squeeze(1)
            if known is not None and head.needs_gradients:
                of_target = known[chunk, None].masked_fill(~counts, 0).to(head.dtype)  # [rows, 1]
                d_logits = exponentials.mul_(-of_target / total)  # [rows, V]
                if smoothing:
                    d_logits += of_target * (smoothing / d_logits.shape[1])
                head.add(chunk, d_logits.scatter_add_(1, index, (1 - smoothing) * of_target))
            if with_means:
                mean = means[chunk, None] - log_total  # [rows, 1]
                means[chunk] = mean.masked_fill_(~counts, 0).squeeze(1)
            log_probs[chunk] = (picked - log_total).masked_fill_(~counts, 0).squeeze(1)
            log_sums[chunk] = (largest + log_total).squeeze(1)
        ctx.is_finished = known is not None
        if known is None:
            ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy)
        else:
            ctx.save_for_backward(known, *head.gradients())
        found = (log_probs, entropy, means)
        return tuple(x for x, y in zip(found, (True, with_entropy, with_means), strict=True) if y)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        d_log_probs: torch.Tensor,
        d_entropy: torch.Tensor | None = None,
        d_means: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Each [T] -> d hidden [T, C], d weight [V, C], d bias [V], and None for the others."""
        if ctx.is_finished:
            known, *finished = ctx.saved_tensors
            factor = _factor(d_log_probs, known)
            # In place: the weight's gradient is the largest tensor here.
            grads = [None if grad is None else grad.mul_(factor) for grad in finished]
            return (*grads, *(None,) * 5)
        assert d_entropy is not None, "an entropy is left out only where gradients are known"
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
        return (*head.gradients(), *(None,) * 5)


def _factor(found: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the number, a scalar, that makes `found` of `known`, each [T]. The host does not wait
    for it, as it would for `known[largest]`."""
    if not known.numel():
        return found.sum()  # 0, without tokens
    largest = known.abs().argmax(0, keepdim=True)  # [1]
    divisor = known.gather(0, largest).squeeze(0)
    return torch.where(divisor == 0, 0, found.gather(0, largest).squeeze(0) / divisor)


# ---- chunks


def check_dtypes(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ValueError unless hidden [T, C] and weight [V, C] have one dtype."""
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden states in {hidden.dtype} meet a head in {weight.dtype}; cast one, or use "
            "autocast"
        )


def chunk_rows(width: int, vocab: int, itemsize: int) -> int:
    """Return how many tokens get their logits at a time.

    They make 64 MiB of logits, but no fewer than a quarter of the weight's own size: every chunk
    reads the whole weight and adds to its whole gradient, which fewer rows would not pay for.
    width: C. vocab: V. itemsize: bytes of a logit.
    """
    return max(_CHUNK_BYTES // (vocab * itemsize), width // 4, 1)


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
