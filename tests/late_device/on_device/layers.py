"""Attention layers on the device: nothing is found, and the host never waits."""

import pytest
import torch

from hf_flexseq.kernels import KernelCall, choose, cudnn_long
from hf_flexseq.kernels.fused import TorchFused
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from hf_flexseq.program import heads, ulysses
from tests.kernels.reference import Reference
from tests.late_device import scenarios
from tests.late_device.install import ops


@pytest.fixture(autouse=True)
def like_a_gpu_of_few_rows(monkeypatch):
    """Heads come and go in pieces."""
    monkeypatch.setitem(heads.PIECE_ROWS, "cuda", 1)
    monkeypatch.setattr(ulysses, "HEAD_PIECES", 2)


def waits_by_layer(name, **options):
    """How often the host has waited, layer by layer of each rank and after its backward."""
    counted = []

    def count():
        counted.append(ops.counts().get("host waits", 0))

    start = ops.counts().get("host waits", 0) + 1  # the hub's own wait, before it begins
    scenarios.run_layers(name, after_layer=count, **options)
    assert len(counted) == 3 * scenarios.RANKS
    return [number - start for number in counted]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", scenarios.MICRO_BATCHES)
def test_no_layer_makes_the_host_wait(monkeypatch, name, blocks):
    monkeypatch.setattr(choose, "_fused_for_cuda", TorchFused)
    torch.cuda.set_sync_debug_mode("error")
    assert waits_by_layer(name, blocks=blocks) == [0] * 12
    assert ops.counts()["copies to the device"] >= scenarios.RANKS


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ulysses", "balanced"])
def test_nor_does_one_with_triton_s_kernels(name):
    torch.cuda.set_sync_debug_mode("error")
    assert waits_by_layer(name) == [0] * 12


def test_one_long_sequence_is_left_to_cudnn_once_it_was_tried(monkeypatch):
    """A call is long here from two tokens on, and what is tried is short."""
    monkeypatch.setattr(cudnn_long, "WORTH", 1)
    monkeypatch.setattr(cudnn_long, "TRIED_TOKENS", 32)
    left, tried = [], cudnn_long._attend
    monkeypatch.setattr(cudnn_long, "_attend", lambda call: left.append(call) or tried(call))
    segments = Segments([37], [37], causal=True, device=scenarios.CUDA)
    q, k, v, dout = (
        torch.randn(37, heads, 64, device=scenarios.CUDA).bfloat16() for heads in (4, 2, 2, 4)
    )
    call = KernelCall(q, k, v, segments, 0.125)
    kernel = TorchVarlen()
    for times in (6, 1):  # at first it is tried, with four numbers of keys
        left.clear()
        out, lse = kernel.forward(call)
        found = (out, lse, *kernel.backward(call, dout, out, lse))
        assert len(left) == times
        torch.cuda.set_sync_debug_mode("error")  # from then on the host does not wait
    scenarios.check(*found)
    torch.cuda.set_sync_debug_mode("default")
    on_host = Segments([37], [37], causal=True, device=torch.device("cpu"))
    same_call = KernelCall(*(x.cpu() for x in (q, k, v)), on_host, 0.125)
    wanted = Reference().forward(same_call)
    wanted += Reference().backward(same_call, dout.cpu(), *wanted)
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.cpu().float(), exact.float(), rtol=2e-2, atol=2e-2)


def test_what_else_is_run_without_a_finding():
    torch.cuda.set_sync_debug_mode("error")
    scenarios.run_kernel()
    scenarios.run_inputs()
    scenarios.run_scan()
    scenarios.run_stopwatch()
    scenarios.run_nonfinite()
    scenarios.run_images()
