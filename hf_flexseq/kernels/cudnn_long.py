"""Attend over one long sequence with cuDNN, where FlashAttention-2 would and Hopper's tensor cores
are left half idle.

On an H100 torch's dense cuDNN operator computes 595 TFLOP/s forward and 508 backward on 8,192
tokens (32 heads of 128, causal), FlashAttention-2 315 and 280 (docs/gpus.md). Its log-sum-exp is
the natural one, in float32. In return every new shape takes about 0.1 s to prepare, so short calls
stay where they are. cuDNN's operator for packed sequences is slow, and gave wrong gradients.

The operator takes what another call has merged, too: its backward is a function of out, lse and
dout, as FlashAttention's is. What is taken for granted here is tried once for each kind of heads,
on the machine itself (`is_verified`): a forward, and a backward with the result that further keys
would have made, against the kernel that would run otherwise. A machine on which they differ, or on
which cuDNN cannot run, goes on without it.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.segments import Segments

logger = logging.getLogger(__name__)

# Products of pairs, heads and head size from which on a layer gains 10 ms and more.
WORTH = 5e11
GENERATION = 9  # of GPUs: Hopper
HEAD_DIMS = (64, 128)
TRIED_TOKENS = 1024
CLOSE = 2e-2  # relative difference of two kernels in 16 bits

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[[KernelCall], tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[[KernelCall, torch.Tensor, torch.Tensor, torch.Tensor], Tensors]


class Heads(NamedTuple):
    """What the operator is tried for, once each."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def is_worth_it(call: KernelCall) -> bool:
    """Tell whether cuDNN may serve a call, and would gain more than a new shape costs."""
    segments, q = call.segments, call.q
    if len(segments.q_lens) != 1 or q.device.type != "cuda" or call.softcap is not None:
        return False
    if segments.causal and (segments.window is not None or segments.max_q != segments.max_k):
        return False
    pairs = segments.max_q * segments.max_k / (2 if segments.causal else 1)
    if pairs * q.shape[1] * q.shape[2] < WORTH or q.shape[2] not in HEAD_DIMS:
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(q.device)[0] == GENERATION


def heads_of(call: KernelCall) -> Heads:
    """Return the kind of heads of a call."""
    return Heads(call.q.shape[1], call.k.shape[1], call.q.shape[2], call.q.dtype, call.q.device)


def forward(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend over one sequence: -> out [n, H, D], lse [H, n]."""
    out, lse, *_ = _attend(call)
    return out[0].transpose(0, 1), lse.view(lse.shape[1], lse.shape[2])


def backward(
    call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of one sequence: -> dq [n, H, D], dk and dv [m, Hkv, D]."""
    segments = call.segments
    seed, offset = _random_state(call.q.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _dense(dout),
        _dense(call.q),
        _dense(call.k),
        _dense(call.v),
        _dense(out),
        lse.contiguous().view(1, *lse.shape, 1),
        seed,
        offset,
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


def _attend(call: KernelCall) -> Tensors:
    """Return out [1, H, n, D], lse [1, H, n, 1], and what else the operator gives."""
    found: Tensors = torch.ops.aten._scaled_dot_product_cudnn_attention(
        _dense(call.q),
        _dense(call.k),
        _dense(call.v),
        None,  # no bias
        True,  # with the log-sum-exp
        0.0,  # no dropout
        call.segments.causal,
        False,  # no debug mask
        scale=call.scale,
    )
    return found


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return rows [n, heads, D] as the operator has them, [1, heads, n, D], a view."""
    return x.transpose(0, 1).unsqueeze(0)


@functools.cache
def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state of dropout's random numbers as a forward gives it, which nothing reads
    without dropout."""
    x = torch.zeros(64, 1, HEAD_DIMS[0], dtype=torch.bfloat16, device=device)
    segments = Segments([64], [64], causal=True, device=device)
    found = _attend(KernelCall(x, x, x, segments, 1.0))
    return found[6], found[7]


# ---- tried once


@functools.cache
def is_verified(heads: Heads, other: tuple[Forward, Backward]) -> bool:
    """Tell whether cuDNN computes on this machine what another kernel does; log if it does not.

    other: the forward and the backward of that kernel.
    """
    try:
        error = _largest_error(heads, *other)
    except RuntimeError as reason:
        logger.warning("long sequences: cuDNN cannot run here: %s", reason)
        return False
    if error > CLOSE:
        logger.warning("long sequences: cuDNN is not used, it differs by %.1e", error)
        return False
    logger.info("long sequences: cuDNN, which differs by %.1e from the kernel for others", error)
    return True


def _largest_error(heads: Heads, other_forward: Forward, other_backward: Backward) -> float:
    """Return the largest relative difference of a result, causal and not, where another call has
    read further keys."""
    generator = torch.Generator().manual_seed(0)
    n = TRIED_TOKENS

    def drawn(count: int) -> torch.Tensor:
        x = torch.randn(n, count, heads.head_dim, generator=generator)
        return x.to(heads.dtype).to(heads.device)

    q, dout = drawn(heads.query_heads), drawn(heads.query_heads)
    k, v = drawn(heads.kv_heads), drawn(heads.kv_heads)
    errors = []
    # ranks in a ring, and branches, read other numbers of keys
    for causal, keys in ((True, n), (False, n), (False, n // 4), (False, 3 * n)):
        segments = Segments([n], [keys], causal=causal, device=heads.device)
        own_k, own_v = (x.repeat(3, 1, 1)[:keys] for x in (k, v))
        call = KernelCall(q, own_k, own_v, segments, heads.head_dim**-0.5)
        out, lse = other_forward(call)
        found = forward(call)
        errors += [_difference(found[0], out), _difference(found[1], lse)]
        # as if another call had read keys that weigh as much: out' = out / 2, lse' = lse + log 2
        merged = (dout, out / 2, lse + torch.log(torch.tensor(2.0)).item())
        for mine, wanted in zip(
            backward(call, *merged), other_backward(call, *merged), strict=True
        ):
            errors.append(_difference(mine, wanted))
    return max(errors)


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative difference of two tensors of one shape; NaN is infinite."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    return error if error == error else float("inf")
