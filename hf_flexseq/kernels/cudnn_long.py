"""Attend over long sequences with cuDNN, where FlashAttention-2 would and Hopper's tensor cores
are left half idle.

On an H100 torch's dense cuDNN operator computes 595 TFLOP/s forward and 508 backward on 8,192
tokens (32 heads of 128, causal), FlashAttention-2 315 and 280 (docs/limits.md). Its log-sum-exp is
the natural one, in float32. It takes one sequence. So a call's long sequences, which come first
in its rows (`planner/make.py`), have a call each, and all others share one FlashAttention-2 call.

cuDNN prepares a plan for every new shape, in about 0.1 s, and torch keeps all of them. With
TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1, which is set here unless the user has set it, a plan serves all
lengths up to the next power of two. It then wants contiguous rows, and the log-sum-exp token by
token; a small call shows which of the two ways torch has taken (`_Operator`).

The operator takes another call's merged results, too: its backward is a function of out, lse and
dout, as FlashAttention's is. These assumptions are tested once for each kind of heads, on the
machine itself (`is_verified`), before the first step: forwards, and backwards with the result
that further keys would have made, against the kernel that would run otherwise. A machine on which
they differ, or on which cuDNN cannot run, does without it.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.segments import Segments

logger = logging.getLogger(__name__)

# Tokens from which on a sequence is a call of its own; `cost/kernels.py` prices it so.
LONG = 2500
GENERATION = 9  # of GPUs: Hopper
HEAD_DIMS = (64, 128)
# Both below the same power of two, so that one plan may have to serve them.
TRIED_TOKENS = (1000, 700)
CLOSE = 2e-2  # relative difference of two kernels in 16 bits
AVOID_RECOMPILE = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[[KernelCall], tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[[KernelCall, torch.Tensor, torch.Tensor, torch.Tensor], Tensors]


class Heads(NamedTuple):
    """The kind of heads in a call; the operator is tried once for each."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


def heads_of(call: KernelCall) -> Heads:
    """Return the kind of heads of a call."""
    return Heads(call.q.shape[1], call.k.shape[1], call.q.shape[2], call.q.dtype)


def long_sequences(call: KernelCall) -> int:
    """Return how many sequences at the beginning of a call are long, and such as cuDNN takes."""
    segments = call.segments
    if segments.window is not None or call.softcap is not None:
        return 0
    if torch.are_deterministic_algorithms_enabled():
        return 0
    count = 0
    for q_len, k_len in zip(segments.q_lens, segments.k_lens, strict=True):
        # its causal mask begins at the first key, FlashAttention's ends at the last
        if min(q_len, k_len) < LONG or (segments.causal and q_len != k_len):
            break
        count += 1
    return count


def forward(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend over one sequence: -> out [n, H, D], lse [H, n]."""
    out, lse, *_ = _attend(call, _operator(call.q.device))
    return out[0].transpose(0, 1), lse[0, :, :, 0].contiguous()


def backward(
    call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of one sequence: -> dq [n, H, D], dk and dv [m, Hkv, D]."""
    segments = call.segments
    operator = _operator(call.q.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        operator.dense(dout),
        operator.dense(call.q),
        operator.dense(call.k),
        operator.dense(call.v),
        operator.dense(out),
        operator.dense_lse(lse),
        operator.seed,
        operator.offset,
        None,  # no bias
        None,
        None,  # no cumulative lengths
        segments.max_q,
        segments.max_k,
        0.0,  # no dropout
        segments.causal,
        scale=call.scale,
    )
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
    return dq, dk, dv


class _Operator(NamedTuple):
    """A device's operator: its tensors' layout, and its arguments besides a call's tensors."""

    by_token: bool
    """True if its log-sum-exps are in memory token by token, and its rows have to be contiguous;
    False if they are head by head, and rows have any strides."""
    seed: torch.Tensor
    offset: torch.Tensor
    """State of dropout's random numbers as a forward gives it, which nothing reads without."""

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows [n, heads, D] as the operator has them, [1, heads, n, D]; a view, unless
        they have to be contiguous and are not."""
        rows = x.contiguous() if self.by_token else x
        return rows.transpose(0, 1).unsqueeze(0)

    def dense_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """Return a log-sum-exp [H, n] as the operator has it, [1, H, n, 1]."""
        laid_out = lse.t().contiguous().t() if self.by_token else lse.contiguous()
        return laid_out.unsqueeze(0).unsqueeze(3)


@functools.cache
def _operator(device: torch.device) -> _Operator:
    """Return the operator, with the layout seen in a small call: two heads of 64 tokens."""
    x = torch.zeros(64, 2, HEAD_DIMS[0], dtype=torch.bfloat16, device=device)
    segments = Segments([64], [64], causal=True, device=device)
    unknown = torch.empty(0)
    found = _attend(KernelCall(x, x, x, segments, 1.0), _Operator(False, unknown, unknown))
    by_token = found[1].stride(2) != 1  # of lse [1, 2, 64, 1]
    return _Operator(by_token, seed=found[6], offset=found[7])


def _attend(call: KernelCall, operator: _Operator) -> Tensors:
    """Return out [1, H, n, D], lse [1, H, n, 1], and the operator's other results."""
    found: Tensors = torch.ops.aten._scaled_dot_product_cudnn_attention(
        operator.dense(call.q),
        operator.dense(call.k),
        operator.dense(call.v),
        None,  # no bias
        True,  # with the log-sum-exp
        0.0,  # no dropout
        call.segments.causal,
        False,  # no debug mask
        scale=call.scale,
    )
    return found


# ---- tried once


@functools.cache
def is_verified(heads: Heads, device: torch.device, other: tuple[Forward, Backward]) -> bool:
    """Tell whether cuDNN is faster on this device and agrees with another kernel; log if it does
    not.

    other: the forward and the backward of that kernel.
    """
    if device.type != "cuda" or heads.head_dim not in HEAD_DIMS:
        return False
    if torch.cuda.get_device_capability(device)[0] != GENERATION:
        return False
    os.environ.setdefault(AVOID_RECOMPILE, "1")  # torch reads it in its first call of cuDNN
    setting = f"{AVOID_RECOMPILE}={os.environ[AVOID_RECOMPILE]}"
    try:
        error = _largest_error(heads, device, *other)
    except RuntimeError as reason:
        logger.warning("long sequences: cuDNN cannot run here with %s: %s", setting, reason)
        return False
    if error > CLOSE:
        logger.warning("long sequences: cuDNN is not used with %s: %.1e off", setting, error)
        return False
    logger.info("long sequences: cuDNN, which differs by %.1e from the kernel for others", error)
    return True


def _largest_error(
    heads: Heads, device: torch.device, other_forward: Forward, other_backward: Backward
) -> float:
    """Return the largest relative difference of a result, causal and not, where another call has
    read further keys."""
    generator = torch.Generator().manual_seed(0)
    most, fewer = TRIED_TOKENS

    def drawn(count: int) -> torch.Tensor:
        x = torch.randn(most, count, heads.head_dim, generator=generator)
        return x.to(heads.dtype).to(device)

    all_q, all_dout = drawn(heads.query_heads), drawn(heads.query_heads)
    k, v = drawn(heads.kv_heads), drawn(heads.kv_heads)
    errors = []
    # ranks in a ring, and branches, read other numbers of keys; a plan has to serve more tokens
    # than it was made with, and fewer
    squares = ((most, most), (most, most // 4), (most, 3 * most), (fewer, most))
    of_causal = ((True, fewer, fewer), (True, most, most))
    for causal, n, keys in (*of_causal, *((False, *square) for square in squares)):
        segments = Segments([n], [keys], causal=causal, device=device)
        own_k, own_v = (x.repeat(3, 1, 1)[:keys] for x in (k, v))
        q, dout = all_q[:n], all_dout[:n]
        call = KernelCall(q, own_k, own_v, segments, heads.head_dim**-0.5)
        out, lse = other_forward(call)
        found = forward(call)
        errors += [difference(found[0], out), difference(found[1], lse)]
        # as if another call had read keys that weigh as much: out' = out / 2, lse' = lse + log 2
        merged = (dout, out / 2, lse + torch.log(torch.tensor(2.0)).item())
        for mine, wanted in zip(
            backward(call, *merged), other_backward(call, *merged), strict=True
        ):
            errors.append(difference(mine, wanted))
    return max(errors)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative difference of two tensors of one shape; NaN is infinite."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    return error if error == error else float("inf")
