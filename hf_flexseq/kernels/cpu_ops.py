"""Name torch's CPU flash kernel, and what its callers have in common."""

import torch

# (q, k, v, dropout, is_causal) -> out [1, H, n, D], lse [1, H, n]
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# (dout, q, k, v, out, lse, dropout, is_causal) -> dq, dk, dv
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
NO_DROPOUT = 0.0


def zeros_tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Return zeros in the shape [1, heads, tokens, D] of x and its dtype, tokens first in
    memory."""
    _, heads, tokens, head_dim = x.shape
    return x.new_zeros((1, tokens, heads, head_dim)).transpose(1, 2)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """View x [tokens, heads, D] as [1, heads, tokens, D], with the last dimension contiguous."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    # [tokens, heads, D] -> [heads, tokens, D] -> [1, heads, tokens, D]
    return x.transpose(0, 1).unsqueeze(0)


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Return x [1, heads, tokens, D] as contiguous [tokens, heads, D]: a view of what the kernel
    leaves."""
    return x.squeeze(0).transpose(0, 1).contiguous()
