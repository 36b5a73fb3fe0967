"""Merge two partial results of attention, each over its own keys, into one over all keys.

A partial result is normalised over its own keys and brings the log-sum-exp of its scores. With

    lse = log(exp(lse_a) + exp(lse_b))
    out = out_a + (out_b - out_a) * sigmoid(lse_b - lse_a)

`out` is the softmax over both sets of keys and `lse` its log-sum-exp (Ring Attention, arXiv
2310.01889; FlashAttention-2, arXiv 2307.08691, section 3.1). The sigmoid is exp(lse_b - lse), the
weight of the second result. It is at most 1, so nothing overflows, and it takes five operations
where the two weights take nine.
"""

import torch


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Replace out [..., D] and lse [...] by the result over their keys and a part's.

    part_out: [..., D] in any floating dtype. out, lse, part_lse: float32 or float64, all of one
    dtype. Of the leading dimensions heads or tokens may come first, as long as all four tensors
    agree. A result over no keys has out = 0 and lse = -inf and changes nothing.
    """
    # Of two results over no keys the difference is NaN: any weight does, for both are 0.
    difference = (part_lse - lse).nan_to_num_()
    weight = difference.sigmoid_().unsqueeze(-1)  # [...] -> [..., 1]
    out.lerp_(part_out.to(out.dtype), weight)
    torch.logaddexp(lse, part_lse, out=lse)
