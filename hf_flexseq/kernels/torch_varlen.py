"""The FlashAttention-2 that torch ships for CUDA, on packed sequences.

`torch.nn.attention.varlen` documents this kernel, but its backward belongs to autograd and takes
no merged output and log-sum-exp, and the private ops beneath it (`torch_attn::_varlen_attn`)
gained positional arguments between torch 2.11 and 2.13. So the aten ops below those are called,
with the arguments that every version from 2.11 on shares.

What the kernel does at the edges, and what is done about it:

* it refuses an empty launch, so a call in which no query has a key is answered here;
* it reports +inf instead of -inf as the log-sum-exp of a query without keys;
* when no sequence has more than one query it takes a path for decoding that assumes exactly one
  query in each, which empty sequences break; a bound of two (it is only a bound) keeps it on the
  general path.
"""

import torch

from hf_flexseq.kernels import Segments, lse_dtype

_DTYPES = (torch.bfloat16, torch.float16)
_OLDEST_CAPABILITY = (8, 0)  # Ampere
_MAX_HEAD_DIM = 256


class TorchVarlen:
    """FlashAttention-2 as built into torch."""

    name = "torch_varlen"
    wide_gradients = False

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this kernel cannot serve such inputs; None when it can."""
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
        """See `Kernel.forward`."""
        segments.check(q, k, v)
        if not segments.has_work():
            return nothing_to_read(q)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *map(rows_contiguous, (q, k, v)),
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            query_bound(segments),
            segments.max_k,
            0.0,  # dropout
            segments.causal,
            False,  # no debug mask
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
        """See `Kernel.backward`."""
        segments.check(q, k, v)
        if not segments.has_work():
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        no_dropout_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *map(rows_contiguous, (dout, q, k, v, out)),
            lse.contiguous(),
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            query_bound(segments),
            segments.max_k,
            0.0,  # dropout
            segments.causal,
            no_dropout_state,
            torch.empty(0, device=q.device),
            scale=scale,
        )
        return dq, dk, dv


# ---- what every build of FlashAttention-2 has in common


def flash2_limits(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no FlashAttention-2 kernel can serve such inputs, and what to change; None when one
    can."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it has no {dtype}, only bfloat16 and float16; train with bf16=True"
    if head_dim % 8 or not 8 <= head_dim <= _MAX_HEAD_DIM:
        return f"a head size of {head_dim} is not a multiple of 8 up to {_MAX_HEAD_DIM}"
    if torch.cuda.get_device_capability(device) < _OLDEST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    return None


def nothing_to_read(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out [Tq, H, D] and lse [H, Tq] when no query has a key."""
    return torch.zeros_like(q), q.new_full(
        (q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype(q.dtype)
    )


def query_bound(segments: Segments) -> int:
    """The bound on queries per sequence that the kernel is told: never 1, see the module's
    docstring."""
    return max(segments.max_q, 2)


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but the last, which must be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flash2_lse(lse: torch.Tensor, q: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The kernel's log-sum-exp with -inf for queries without keys. lse [H, Tq], changed in
    place."""
    assert lse.shape == (q.shape[1], q.shape[0]), (
        f"the kernel's lse is {tuple(lse.shape)}, not [heads, tokens]"
    )
    return lse.masked_fill_(lse == torch.inf, -torch.inf) if segments.has_keyless() else lse
