"""Stand-ins on the CPU for torch's dense cuDNN operator, with its shapes and layouts, and for a
build of FlashAttention that leaves long sequences to it."""

import contextlib
from unittest import mock

import torch
import torch.distributed.tensor  # it looks operators up that are replaced here
import torch.utils.flop_counter  # registers operators by name: torch's own, not the stand-ins

from hf_flexseq.kernels import KernelCall, cudnn_long
from hf_flexseq.kernels.cuda_flash import FLASH2, CudaFlash
from hf_flexseq.kernels.segments import Segments
from tests.kernels.reference import Reference

CPU = torch.device("cpu")
NAME = "_scaled_dot_product_cudnn_attention"


def rows(x):
    """[1, heads, n, D] -> [n, heads, D]"""
    assert x.shape[0] == 1
    return x[0].transpose(0, 1)


def is_by_token(*tensors):
    """Whether plans serve many lengths: by torch, only where rows [1, heads, n, D] follow each
    other in memory."""
    return OPERATOR["by token"] and all(rows(x).is_contiguous() for x in tensors)


OPERATOR = {"by token": False}


def attend(q, k, v, bias, with_lse, dropout, causal, debug, *, scale):
    assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
    assert not causal or q.shape[2] == k.shape[2]
    segments = Segments([q.shape[2]], [k.shape[2]], causal=causal, device=CPU)
    out, lse = Reference().forward(KernelCall(rows(q), rows(k), rows(v), segments, scale))
    if is_by_token(q, k, v):
        lse = lse.t().contiguous().t()
    out = out.transpose(0, 1).unsqueeze(0)
    return out, lse[None, :, :, None], None, None, 0, 0, "seed", "offset", None


def gradients(
    dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, n, m, dropout, causal, *, scale
):  # fmt: skip
    assert (seed, offset, bias, cu_q, cu_k, dropout) == ("seed", "offset", None, None, None, 0.0)
    assert (n, m) == (q.shape[2], k.shape[2])
    assert lse.shape == (1, q.shape[1], n, 1)
    laid_out = lse[0, :, :, 0].t() if is_by_token(q, k, v, out) else lse[0, :, :, 0]
    assert laid_out.is_contiguous(), "the log-sum-exp is laid out as for the other way"
    segments = Segments([n], [m], causal=causal, device=CPU)
    call = KernelCall(rows(q), rows(k), rows(v), segments, scale)
    grads = Reference().backward(call, rows(dout), rows(out), lse[0, :, :, 0])
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in grads)


@contextlib.contextmanager
def operators(*, by_token=False):
    """Let the stand-ins be torch's operators; by_token: whether plans serve many lengths."""
    cached = (cudnn_long._operator, cudnn_long.is_verified)
    for function in cached:
        function.cache_clear()
    with (
        mock.patch.object(torch.ops.aten, NAME, attend),
        mock.patch.object(torch.ops.aten, NAME + "_backward", gradients),
        mock.patch.dict(OPERATOR, {"by token": by_token}),
        mock.patch.dict("os.environ"),
        mock.patch.object(cudnn_long, "TRIED_TOKENS", (200, 130)),  # the reference is slow
    ):
        yield
    for function in cached:
        function.cache_clear()


class Everything:
    """A set of all kinds of heads."""

    def __contains__(self, heads):
        return True


class Split(CudaFlash):
    """FlashAttention that the reference computes, with what it launches: how many sequences each
    launch of its own has, and the lengths of those that were left to cuDNN."""

    name = "split"
    capabilities = FLASH2

    def __init__(self):
        super().__init__()
        self._cudnn_heads = Everything()
        self.launches = []

    def launch_forward(self, call):
        self.launches.append(len(call.segments.q_lens))
        return Reference().forward(call)

    def launch_backward(self, call, dout, out, lse):
        assert lse.is_contiguous()
        return Reference().backward(call, dout, out, lse)
