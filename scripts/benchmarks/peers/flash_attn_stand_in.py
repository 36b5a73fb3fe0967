"""A stand-in for `flash_attn` on torch's CPU kernel, so that libraries that import it run here.

`install()` registers the package; libraries that are imported afterwards find it. Names, order of
arguments, shapes and results are those of flash-attn 2.7; dropout, windows, softcap and alibi are
refused. All is computed as hf_flexseq does it on the CPU (`hf_flexseq/kernels/cpu_flash.py`): the
same kernel, packed rows cut as cheaply, and for 16-bit inputs the backward in float32. So a
comparison is about what lies around the kernel.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from hf_flexseq.kernels import lse_dtype

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Tensors = tuple[torch.Tensor, ...]


def install() -> None:
    """Put the package where `import flash_attn` finds it. Raises RuntimeError beside a real
    one."""
    if "flash_attn" in sys.modules:
        raise RuntimeError("flash_attn is already imported")
    package = ModuleType("flash_attn")
    interface = ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        module.__spec__ = ModuleSpec(module.__name__, loader=None)
        sys.modules[module.__name__] = module
    package.__version__ = "2.7.4"
    package.flash_attn_interface = interface
    for function in (flash_attn_func, flash_attn_varlen_func):
        setattr(package, function.__name__, function)
    for function in (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    ):
        setattr(interface, function.__name__, function)


# ---- a batch: q [B, n, H, D], k and v [B, m, Hkv, D], lse [B, H, n]


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
):
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, n, H, D] -> [B, H, n, D]
    out, lse = _attend((q, k, v), causal, softmax_scale)
    return out.transpose(1, 2), lse, None, None  # [B, H, n, D] -> [B, n, H, D]


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
):
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    # [B, n, H, D] -> [B, H, n, D]
    tensors = [x.transpose(1, 2) for x in _widened(dout, q, k, v, out)]
    gradients = _gradients((*tensors, softmax_lse), causal, softmax_scale)
    for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
        buffer.copy_(gradient.transpose(1, 2))  # [B, H, n, D] -> [B, n, H, D]


# ---- packed sequences: q [Tq, H, D], k and v [Tk, Hkv, D], lse [H, Tq], cu_seqlens [seqs + 1]


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    tokens, heads, _ = q.shape
    out = torch.empty_like(q)  # [tokens, heads, D]
    lse = q.new_empty(heads, tokens, dtype=lse_dtype(q.dtype))
    parts = _parts(cu_seqlens_q, (q, out), cu_seqlens_k, (k, v))
    lse_parts = _lse_parts(cu_seqlens_q, lse)
    for (q_i, out_i, k_i, v_i), lse_i in zip(parts, lse_parts, strict=True):
        new_out, new_lse = _attend((q_i, k_i, v_i), causal, softmax_scale)
        out_i.copy_(new_out)
        lse_i.copy_(new_lse)
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    rng_state=None,
    zero_tensors=False,
):
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    dout, q, k, v, out = _widened(dout, q, k, v, out)
    parts = _parts(cu_seqlens_q, (dout, q, out, dq), cu_seqlens_k, (k, v, dk, dv))
    lse_parts = _lse_parts(cu_seqlens_q, softmax_lse)
    for (dout_i, q_i, out_i, dq_i, k_i, v_i, dk_i, dv_i), lse_i in zip(
        parts, lse_parts, strict=True
    ):
        new_dq, new_dk, new_dv = _gradients(
            (dout_i, q_i, k_i, v_i, out_i, lse_i), causal, softmax_scale
        )
        dq_i.copy_(new_dq)
        dk_i.copy_(new_dk)
        dv_i.copy_(new_dv)


# ---- with gradients


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **others):
    """Attend within a batch: q [B, n, H, D], k and v [B, m, Hkv, D] -> out [B, n, H, D]."""
    assert not dropout_p, "no dropout here"
    return _Attention.apply(q, k, v, None, softmax_scale or q.shape[-1] ** -0.5, causal)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
):
    """Attend within packed sequences: q [T, H, D], k and v [T, Hkv, D] -> out [T, H, D]."""
    assert cu_seqlens_q is cu_seqlens_k, "only of sequences over themselves here"
    scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    return _Attention.apply(q, k, v, cu_seqlens_q, scale, options.get("causal", False))


class _Attention(torch.autograd.Function):
    """Attention within a batch, or within packed sequences where there are `cu_seqlens`."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, scale, causal):
        packed = ()
        attend = _flash_attn_forward
        if cu_seqlens is not None:
            packed = (cu_seqlens, cu_seqlens, None, None)
            attend = _flash_attn_varlen_forward
        out, lse, _, _ = attend(q, k, v, *packed, 0.0, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed = packed
        ctx.scale = scale
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        differentiate = _flash_attn_varlen_backward if ctx.packed else _flash_attn_backward
        differentiate(
            *(dout.contiguous(), q, k, v, out, lse),
            *(dq, dk, dv),
            *ctx.packed,
            *(0.0, ctx.scale, ctx.causal),
        )
        return dq, dk, dv, None, None, None


# ---- the kernel, on tensors [B, heads, n, D]


def _attend(tensors: Tensors, causal: bool, scale: float) -> Sequence[torch.Tensor]:
    """Return out [B, heads, n, D] and lse [B, heads, n] of q, k, v."""
    _check(tensors, causal, tensors[0].shape[2], tensors[1].shape[2])
    return FORWARD(*tensors, 0.0, causal, scale=scale)


def _gradients(tensors: Tensors, causal: bool, scale: float) -> Sequence[torch.Tensor]:
    """Return dq, dk, dv, each [B, heads, n, D], of dout, q, k, v, out, lse."""
    _check(tensors[:5], causal, tensors[1].shape[2], tensors[2].shape[2])
    return BACKWARD(*tensors, 0.0, causal, scale=scale)


def _check(tensors: Tensors, causal: bool, queries: int, keys: int) -> None:
    assert all(x.stride(-1) == 1 for x in tensors), "the kernel reads heads as contiguous"
    assert not causal or queries == keys, f"causal attention of {queries} queries over {keys} keys"


def _parts(
    cu_seqlens_q: torch.Tensor,
    query_tensors: Tensors,
    cu_seqlens_k: torch.Tensor,
    key_tensors: Tensors,
) -> Iterator[Tensors]:
    """Yield for every sequence its part of each tensor as a view.

    Tensors are [tokens, heads, D] of all sequences, parts [1, heads, n, D] of one.
    """
    views = []
    for x in query_tensors:
        rows = x.transpose(0, 1).unsqueeze(0)  # [tokens, heads, D] -> [1, heads, tokens, D]
        views.append(rows.split(_lengths(cu_seqlens_q), dim=2))
    for x in key_tensors:
        rows = x.transpose(0, 1).unsqueeze(0)  # [tokens, heads, D] -> [1, heads, tokens, D]
        views.append(rows.split(_lengths(cu_seqlens_k), dim=2))
    return zip(*views, strict=True)


def _lse_parts(cu_seqlens: torch.Tensor, lse: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return every sequence's part [1, heads, n] of the log-sum-exp [heads, tokens], as views."""
    return lse.unsqueeze(0).split(_lengths(cu_seqlens), dim=2)


def _widened(*tensors: torch.Tensor) -> Tensors:
    """Return 16-bit tensors in float32, others as they are, in their shapes."""
    return tuple(x.to(lse_dtype(x.dtype)) for x in tensors)


def _lengths(cu_seqlens: torch.Tensor) -> list[int]:
    """Return the tokens of each sequence."""
    return cu_seqlens.diff().tolist()


def _refuse(
    dropout_p: float, window: tuple[int, int], softcap: float | None, alibi_slopes: object
) -> None:
    unknown = {
        "dropout": dropout_p,
        "window": window != (-1, -1),
        "softcap": softcap,
        "alibi": alibi_slopes,
    }
    assert not any(unknown.values()), f"plain attention only, not {unknown}"
