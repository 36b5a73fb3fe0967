"""Attend with the FlashAttention-2 that torch ships for CUDA, on packed sequences.

`torch.nn.attention.varlen` documents this kernel, but its backward belongs to autograd and takes
no merged output and log-sum-exp, and the private ops beneath it (`torch_attn::_varlen_attn`)
gained positional arguments between torch 2.11 and 2.13. So the aten ops below those are called,
with the arguments that every version from 2.11 on shares.

The kernel has habits at the edges, which are dealt with here:

* it refuses an empty launch, so a call in which no query has a key is answered here;
* it reports +inf instead of -inf as the log-sum-exp of a query without keys, which is mended;
* when no sequence has more than one query it takes a path for decoding that assumes exactly one
  query in each, which empty sequences break; a bound of two (it is only a bound) keeps it on the
  general path.

The slow obvious twin is reference.py; tests/kernels/test_cuda_kernels.py and scripts/gpu_check.py
compare the two.
"""

import torch

from hf_flexseq.kernels import lse_dtype
from hf_flexseq.kernels.segments import Segments

_DTYPES = (torch.bfloat16, torch.float16)
_OLDEST_CAPABILITY = (8, 0)  # Ampere
_MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 8  # head sizes are multiples of this
_NO_DROPOUT = 0.0


class TorchVarlen:
    """FlashAttention-2 as built into torch."""

    name = "torch_varlen"
    wide_gradients = False

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Say why this kernel cannot serve such inputs, or return None when it can."""
        if device.type == "cuda" and not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no FlashAttention"
        return flash2_limits(device, dtype, head_dim)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`: q [Tq, H, D], k and v [Tk, Hkv, D] -> out [Tq, H, D], lse
        [H, Tq]."""
        segments.check(q, k, v)
        if not segments.has_work():
            return nothing_to_read(q)
        # [Tq, H, D], [H, Tq], and what autograd would keep
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            rows_contiguous(q),
            rows_contiguous(k),
            rows_contiguous(v),
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            query_bound(segments),
            segments.max_k,
            _NO_DROPOUT,
            segments.causal,
            False,  # return no debug mask
            scale=scale,
        )
        return out, flash2_lse(lse, q, segments)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`: dout and out [Tq, H, D], lse [H, Tq] -> dq [Tq, H, D], dk and dv
        [Tk, Hkv, D]."""
        segments.check(q, k, v)
        if not segments.has_work():
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # The state of dropout's random numbers, which nothing reads without dropout.
        random_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            rows_contiguous(dout),
            rows_contiguous(q),
            rows_contiguous(k),
            rows_contiguous(v),
            rows_contiguous(out),
            lse.contiguous(),
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            query_bound(segments),
            segments.max_k,
            _NO_DROPOUT,
            segments.causal,
            random_state,
            unused,
            scale=scale,
        )
        return dq, dk, dv


# ---- shared by every build of FlashAttention-2


def flash2_limits(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why no FlashAttention-2 kernel can serve such inputs, and what to change; None when one
    can."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it has no {dtype}, only bfloat16 and float16; train with bf16=True"
    if head_dim % _HEAD_DIM_STEP or not _HEAD_DIM_STEP <= head_dim <= _MAX_HEAD_DIM:
        return (
            f"a head size of {head_dim} is not a multiple of {_HEAD_DIM_STEP} up to "
            f"{_MAX_HEAD_DIM}"
        )
    if torch.cuda.get_device_capability(device) < _OLDEST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    return None


def nothing_to_read(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [Tq, H, D] and lse [H, Tq] for q [Tq, H, D] when no query has a key."""
    tokens, heads, _ = q.shape
    lse = q.new_full((heads, tokens), -torch.inf, dtype=lse_dtype(q.dtype))
    return torch.zeros_like(q), lse


def query_bound(segments: Segments) -> int:
    """Return the bound on queries per sequence that the kernel is told: never 1, as the docstring
    of the module explains."""
    return max(segments.max_q, 2)


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, D] with a stride of 1 in the last dimension; the kernels take any
    other strides."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def flash2_lse(lse: torch.Tensor, q: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return the kernel's lse [H, Tq], changed in place to -inf for queries without keys.

    q: [Tq, H, D].
    """
    tokens, heads, _ = q.shape
    assert lse.shape == (heads, tokens), (
        f"the kernel's lse is {tuple(lse.shape)}, not [heads, tokens]"
    )
    if segments.has_keyless():
        lse.masked_fill_(lse == torch.inf, -torch.inf)
    return lse
