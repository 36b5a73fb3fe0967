"""Attention layers on the device: nothing is found, and the host never waits."""

import pytest
import torch

from hf_flexseq.kernels import choose, cudnn_long
from hf_flexseq.kernels.cudnn_long import long_sequences
from hf_flexseq.kernels.fused_operations import TorchFused
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from hf_flexseq.program import heads, ulysses
from tests.late_device import scenarios
from tests.late_device.install import ops


@pytest.fixture(autouse=True)
def like_a_gpu_of_few_rows(monkeypatch):
    """Heads come and go in pieces."""
    monkeypatch.setitem(heads.PIECE_ROWS, "cuda", 1)
    monkeypatch.setattr(ulysses, "HEAD_PIECES", 2)


@pytest.fixture(autouse=True)
def nothing_is_known_of_cudnn():
    for cached in (cudnn_long.is_verified, cudnn_long._operator):
        cached.cache_clear()


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


@pytest.mark.parametrize("name", ["ulysses", "zigzag", "hybrid"])
def test_layers_with_long_sequences_are_run_without_a_finding(name, monkeypatch):
    """Heads of 8 are too small for cuDNN on a GPU, though not for what stands in for it."""
    monkeypatch.setattr(cudnn_long, "LONG", 4)
    monkeypatch.setattr(TorchVarlen, "_left_to_cudnn", lambda _, call: long_sequences(call))
    monkeypatch.setattr(choose, "_fused_for_cuda", TorchFused)
    forward, left = cudnn_long.forward, []
    monkeypatch.setattr(cudnn_long, "forward", lambda call: left.append(call) or forward(call))
    torch.cuda.set_sync_debug_mode("error")
    assert waits_by_layer(name) == [0] * 12
    assert left


def test_what_else_is_run_without_a_finding():
    torch.cuda.set_sync_debug_mode("error")
    scenarios.run_kernel()
    scenarios.run_inputs()
    scenarios.run_scan()
    scenarios.run_stopwatch()
    scenarios.run_nonfinite()
    scenarios.run_images()
