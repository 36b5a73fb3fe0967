"""Operators that torch has for CUDA alone: FlashAttention, cuDNN's dense attention, products of
16-bit factors into float32 sums, and gradients of convolutions. Each checks what the real one asks
for, and says which memory it uses.

FlashAttention and cuDNN compute what the project's reference kernel does.
"""

import os

import torch

from tests.kernels import cudnn
from tests.kernels.launch import Launch
from tests.kernels.reference import Reference

ops = torch.ops.late_device
_library = torch.library.Library("aten", "IMPL")
MATH = 0  # of torch's scaled_dot_product_attention: the implementation in plain operations


def register():
    """Register all of them for the device."""
    for name, function in {
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_cudnn_attention": _cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
        "_fused_sdp_choice": lambda *args, **options: MATH,
        "convolution_backward": _convolution_backward,
        "mm.dtype": _mm,
        "mm.dtype_out": _mm_out,
        "addmm.dtype": _addmm,
        "addmm.dtype_out": _addmm_out,
    }.items():
        _library.impl(name, function, "CUDA")


# ---- FlashAttention


def _flash_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug_mask, *, scale=None, **options
):
    """q [Tq, H, D], k and v [Tk, Hkv, D] -> out [Tq, H, D], lse [H, Tq] and three more."""
    ops.touch("flash_attention_forward", [q, k, v, cu_q, cu_k], [])
    call = _call(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, scale, options)
    with torch.no_grad():
        out, lse = Reference().forward(call)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    state = torch.zeros(2, dtype=torch.uint64)
    results = (out.contiguous(), lse.contiguous(), state, torch.zeros(0), torch.zeros(0))
    return _made("flash_attention_forward", results)


def _flash_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, state, unused, *,
    scale=None, **options,
):  # fmt: skip
    """dout and out [Tq, H, D], lse [H, Tq] -> dq [Tq, H, D], dk and dv [Tk, Hkv, D]."""
    ops.touch("flash_attention_backward", [dout, q, k, v, out, lse, cu_q, cu_k], [])
    assert dout.dtype == out.dtype == q.dtype, (dout.dtype, out.dtype, q.dtype)
    assert lse.dtype == torch.float32, lse.dtype
    assert lse.is_contiguous(), "lse is not contiguous"
    assert dout.stride(-1) == out.stride(-1) == 1, "rows are not contiguous"
    assert state.is_cuda, state.device
    call = _call(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, scale, options)
    with torch.no_grad():
        gradients = Reference().backward(call, *(ops.cpu(x) for x in (dout, out, lse)))
    return _made("flash_attention_backward", gradients)


def _call(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, scale, options):
    """Check the arguments by FlashAttention-2's rules, and return the call on the host's views."""
    _check_factors(q, k, v, most=256)
    assert v.stride(-1) == 1, "rows are not contiguous"
    assert dropout == 0, dropout
    assert options.get("alibi_slopes") is None
    assert options.get("seqused_k") is None
    window = (options.get(f"window_size_{side}") for side in ("left", "right"))
    window = (-1 if size is None else size for size in window)
    launch = Launch(ops.cpu(cu_q), ops.cpu(cu_k), max_q, max_k, causal, scale, *window)
    return launch.call(*map(ops.cpu, (q, k, v)))


def _check_factors(q, k, v, *, most):
    """Refuse what no kernel of 16 bits takes; heads are the last dimension but one or two."""
    assert q.dtype in (torch.bfloat16, torch.float16), q.dtype
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert k.shape == v.shape, (k.shape, v.shape)
    assert q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    assert q.shape[-1] % 8 == 0, q.shape
    assert q.shape[-1] <= most, q.shape


def _made(name, results):
    """Return tensors of the device over results of the host."""
    made = tuple(ops.cuda(x.contiguous()) for x in results)
    ops.touch(name, [], list(made))
    return made


# ---- cuDNN


def _cudnn_forward(
    q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None
):  # fmt: skip
    """q [1, H, n, D], k and v [1, Hkv, m, D] -> out [1, H, n, D], lse [1, H, n, 1] and seven
    more."""
    ops.touch("cudnn_attention", [q, k, v], [])
    given = _dense(q, k, v)
    with torch.no_grad():
        out, lse, *_ = cudnn.attend(*given, bias, with_lse, dropout, causal, debug, scale=scale)
    state = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    made = [ops.cuda(x) for x in (out, lse, *state, torch.zeros(0))]
    ops.touch("cudnn_attention", [], made)
    out, lse, seed, offset, mask = made
    return out, lse, None, None, q.shape[2], k.shape[2], seed, offset, mask


def _cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout, causal, *,
    scale=None,
):  # fmt: skip
    """dout and out [1, H, n, D], lse [1, H, n, 1] -> dq [1, H, n, D], dk and dv [1, Hkv, m, D]."""
    ops.touch("cudnn_attention_backward", [dout, q, k, v, out, lse, seed, offset], [])
    assert dout.dtype == out.dtype == q.dtype, (dout.dtype, out.dtype, q.dtype)
    assert lse.dtype == torch.float32, lse.dtype
    given = (ops.cpu(dout), *_dense(q, k, v), ops.cpu(out), ops.cpu(lse))
    random = ("seed", "offset", bias, None, None, max_q, max_k)
    with torch.no_grad():
        gradients = cudnn.gradients(*given, *random, dropout, causal, scale=scale)
    return _made("cudnn_attention_backward", gradients)


def _dense(q, k, v):
    """Return the host's views, of which one plan serves many lengths where the user asks for it;
    torch asks the environment once."""
    cudnn.OPERATOR["by token"] = os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1"
    _check_factors(q, k, v, most=128)
    return map(ops.cpu, (q, k, v))


# ---- convolutions


def _convolution_backward(dout, x, weight, bias_sizes, *options):
    """Compute the gradients of x, weight and bias, None for those not asked for. In three
    dimensions torch's own operator looks for a kernel by the device of its inputs."""
    asked = options[-1]  # one bool for each of the three
    ops.touch("convolution_backward", [dout, x, weight], [])
    given = (ops.cpu(tensor) for tensor in (dout, x, weight))
    gradients = torch.ops.aten.convolution_backward(*given, bias_sizes, *options)
    wanted = [x for x, is_asked in zip(gradients, asked, strict=True) if is_asked]
    made = iter(_made("convolution_backward", wanted))
    return tuple(next(made) if is_asked else None for is_asked in asked)


# ---- products


def _product(a, b, dtype):
    """a [m, k] @ b [k, n] of the host's views -> [m, n] in a wider dtype."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    is_wider = dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16)
    assert dtype == a.dtype or is_wider, (a.dtype, dtype)
    return ops.cpu(a).to(dtype) @ ops.cpu(b).to(dtype)


def _mm(a, b, out_dtype):
    ops.touch("mm", [a, b], [])
    return _made("mm", [_product(a, b, out_dtype)])[0]


def _mm_out(a, b, out_dtype, *, out):
    assert out.dtype == out_dtype, (out.dtype, out_dtype)
    ops.touch("mm", [a, b], [out])
    ops.cpu(out).copy_(_product(a, b, out_dtype))
    return out


def _addmm(total, a, b, out_dtype, *, beta=1, alpha=1):
    ops.touch("addmm", [total, a, b], [])
    return _made("addmm", [beta * ops.cpu(total) + alpha * _product(a, b, out_dtype)])[0]


def _addmm_out(total, a, b, out_dtype, *, beta=1, alpha=1, out):
    assert out.dtype == total.dtype == out_dtype, (out.dtype, total.dtype, out_dtype)
    ops.touch("addmm", [total, a, b], [out])
    ops.cpu(out).copy_(beta * ops.cpu(total) + alpha * _product(a, b, out_dtype))
    return out
