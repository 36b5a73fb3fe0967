"""Errors of every attention kernel that serves the device, in 16 bits, forward and backward,
against the plain float32 softmax. The largest may be twice that of the same softmax written
plainly in 16 bits. On a GPU with cases of its own, and with cuDNN.
"""

from typing import NamedTuple

import pytest
import torch

from hf_flexseq.kernels import cudnn_long
from hf_flexseq.kernels.capabilities import CallKind
from hf_flexseq.kernels.choose import CANDIDATES
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from tests.device import DEVICE
from tests.kernels.reference import Reference
from tests.kernels.test_kernels import dense, random_inputs, run

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128


class Case(NamedTuple):
    """A packed call."""

    q_lens: list[int]
    """Queries of each sequence."""
    k_lens: list[int]
    """Keys of each sequence."""
    causal: bool
    window: int | None = None
    softcap: float | None = None


LENGTHS = [1, 0, 17, 1021, 128, 64, 2053]
HALOED = [n + 300 for n in LENGTHS]  # with keys that no query reads within a window of 130
CASES = {
    "causal": Case(LENGTHS, LENGTHS, True),
    "causal, with earlier keys": Case(LENGTHS, [n + 100 for n in LENGTHS], True),
    "rectangles, some without queries or keys": Case(LENGTHS, [5, 33, 0, 509, 4096, 1, 0], False),
    "one query at most": Case([1, 0, 1], [300, 7, 64], False),
    "window of 130": Case(LENGTHS, LENGTHS, True, window=130),
    "window of 130, with keys that none reads": Case(LENGTHS, HALOED, True, window=130),
    "window of 1": Case(LENGTHS, LENGTHS, True, window=1),
    "softcap": Case(LENGTHS, LENGTHS, True, softcap=2.0),
    "softcap, window of 130": Case(LENGTHS, HALOED, True, window=130, softcap=2.0),
}
SHORT_CASES = {  # on a CPU
    "causal": Case([1, 0, 61], [1, 0, 61], True),
    "rectangles": Case([5, 0, 9], [0, 7, 33], False),
    "window": Case([1, 0, 61], [1, 0, 70], True, window=10),
    "softcap, window": Case([1, 0, 61], [1, 0, 70], True, window=10, softcap=2.0),
}


@pytest.mark.on_device
@pytest.mark.parametrize("name", CASES if DEVICE.type == "cuda" else SHORT_CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", CANDIDATES[DEVICE.type], ids=lambda kernel: kernel.name)
def test_errors_are_at_most_twice_those_of_a_plain_softmax(kernel, dtype, name):
    case = CASES[name] if DEVICE.type == "cuda" else SHORT_CASES[name]
    needs = {"window": case.window is not None, "softcap": case.softcap is not None}
    refusal = kernel.reason_unsupported(CallKind(DEVICE, dtype, HEAD_DIM, **needs))
    if refusal:
        pytest.skip(refusal)
    assert within_bounds(kernel, case, dtype), name


@pytest.mark.on_device
@pytest.mark.skipif(DEVICE.type != "cuda", reason="cuDNN runs on GPUs")
def test_cudnn_computes_what_another_kernel_does():
    heads = cudnn_long.Heads(HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16)
    other = TorchVarlen()
    assert cudnn_long.is_verified(heads, DEVICE, (other.launch_forward, other.launch_backward))


def test_a_wrong_kernel_is_found():
    class Wrong(CpuFlash):
        def forward(self, call):
            return super().forward(call._replace(scale=call.scale * 1.1))

    assert not within_bounds(Wrong(), SHORT_CASES["causal"])


def within_bounds(kernel, case, dtype=torch.bfloat16):
    """Whether out, dq, dk, dv and the log-sum-exp of a call are as close as they must be."""
    segments = Segments(
        case.q_lens, case.k_lens, causal=case.causal, device=DEVICE, window=case.window
    )
    inputs = random_inputs(segments, (HEADS, KV_HEADS), HEAD_DIM, dtype)
    out, lse, *grads = run(kernel, *inputs, segments, case.softcap)
    exact = [x.float() for x in inputs]
    true_out, true_lse, *true_grads = run(Reference(), *exact, segments, case.softcap)
    plain, _, *plain_grads = dense(*inputs, segments, case.softcap)
    are_close = []
    for mine, its, true in zip(
        (out, *grads), (plain, *plain_grads), (true_out, *true_grads), strict=True
    ):
        are_close.append(error_of(mine, true) <= 2 * error_of(its, true))
    # The log-sum-exp is float32 in both, so it only differs by the order of its sums; -inf must be
    # where it should.
    return all(are_close) and torch.allclose(lse, true_lse, rtol=1e-4, atol=1e-4)


def error_of(got, true):
    """The largest difference of two tensors of one shape."""
    return (got.float() - true).abs().max().item()
