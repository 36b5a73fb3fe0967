"""Merge two partial results of attention, each over its own keys, into one over all keys.

A partial result is normalised over its own keys and brings the log-sum-exp of its scores. With

    lse = log(exp(lse_a) + exp(lse_b))
    out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

`out` is the softmax over both sets of keys and `lse` its log-sum-exp (Ring Attention, arXiv
2310.01889; FlashAttention-2, arXiv 2307.08691, section 3.1). The weights are 1 at most and sum to
1, so nothing overflows.
"""

import torch


def merge_partials(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [..., D] and lse [...] over the keys of both partial results.

    out_a, out_b: [..., D] in any floating dtype. lse_a, lse_b: [...] in float32 or float64, which
    is the dtype of the result. Of the leading dimensions heads or tokens may come first, as long
    as all four tensors agree. A partial result over no keys has out = 0 and lse = -inf and changes
    nothing; at least one of the two must have read a key, else the result is NaN.
    """
    lse = torch.logaddexp(lse_a, lse_b)  # [...]
    weight_a = (lse_a - lse).exp().unsqueeze(-1)  # [...] -> [..., 1]
    weight_b = (lse_b - lse).exp().unsqueeze(-1)
    return out_a * weight_a + out_b * weight_b, lse  # [..., D], [...]
