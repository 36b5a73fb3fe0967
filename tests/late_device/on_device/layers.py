"""Attention layers on the device: nothing is found, and the host never waits."""

import pytest
import torch

from hf_flexseq.kernels import cudnn_long
from hf_flexseq.kernels.cudnn_long import long_sequences
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from hf_flexseq.program import heads, ulysses
from tests.late_device import scenarios
from tests.late_device.install import ops
from tests.late_device.scenarios import TOPOLOGY
from tests.published.zeppelin.gainful_passes import Always


@pytest.fixture(autouse=True)
def like_a_gpu_of_few_rows(monkeypatch):
    """Heads come and go in pieces."""
    monkeypatch.setitem(heads.PIECE_ROWS, "cuda", 1)
    monkeypatch.setattr(ulysses, "HEAD_PIECES", 2)


@pytest.fixture(autouse=True)
def nothing_is_known_of_cudnn():
    for cached in (cudnn_long.is_verified, cudnn_long._operator):
        cached.cache_clear()


def waits(run, *args, parts, **options):
    """How often the host has waited, at each of `parts` places of all ranks that a run shows."""
    counted = []

    def count():
        counted.append(ops.counts().get("host waits", 0))

    start = ops.counts().get("host waits", 0) + 1  # the hub's own wait, before it begins
    run(*args, **options, after=count)
    assert len(counted) == parts
    return [number - start for number in counted]


def assert_no_layer_waits(name, **options):
    """After any of two layers of four ranks, and after their backward."""
    torch.cuda.set_sync_debug_mode("error")
    assert waits(scenarios.run_layers, name, parts=12, **options) == [0] * 12


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", scenarios.MICRO_BATCHES)
def test_no_layer_makes_the_host_wait(name, blocks, in_torch):
    assert_no_layer_waits(name, blocks=blocks)
    assert ops.counts()["copies to the device"] >= scenarios.RANKS


def test_later_layers_copy_nothing_that_the_first_one_has_copied(in_torch):
    copies = []
    for layers in (1, 3):
        ops.reset_counts()
        scenarios.run_layers("nested", layers=layers)
        copies.append(ops.counts()["copies to the device"])
    assert copies[0] == copies[1]


SEEN_BOTH_WAYS = {sequence: ((0, length),) for sequence, length in enumerate(scenarios.LENGTHS)}
SPECIAL = [("ulysses", {"sees": SEEN_BOTH_WAYS}), ("nested", {"passes": Always(TOPOLOGY)})]
for name in scenarios.MICRO_BATCHES:
    for is_saved in (True, False):
        options = {"save_attention_output": is_saved, "checkpointed": True}
        SPECIAL.append((name, options))


@pytest.mark.parametrize(("name", "options"), SPECIAL)
def test_nor_do_checkpointed_layers_passes_and_blocks(name, options, in_torch):
    assert_no_layer_waits(name, **options)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_chunks_of_a_pipeline_never_wait(ranks, checkpointed, in_torch):
    torch.cuda.set_sync_debug_mode("error")
    parts = 2 * len(scenarios.CHUNKS) * ranks
    found = waits(scenarios.run_chunks, ranks, parts=parts, checkpointed=checkpointed)
    assert found == [0] * parts


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ulysses", "balanced"])
def test_nor_does_one_with_triton_s_kernels(name):
    assert_no_layer_waits(name)


@pytest.mark.parametrize("name", ["ulysses", "zigzag", "hybrid"])
def test_layers_with_long_sequences_are_run_without_a_finding(name, monkeypatch, in_torch):
    """Heads of 8 are too small for cuDNN on a GPU, though not for what stands in for it."""
    monkeypatch.setattr(cudnn_long, "LONG", 4)
    monkeypatch.setattr(TorchVarlen, "_left_to_cudnn", lambda _, call: long_sequences(call))
    forward, left = cudnn_long.forward, []
    monkeypatch.setattr(cudnn_long, "forward", lambda call: left.append(call) or forward(call))
    assert_no_layer_waits(name)
    assert left


def test_what_else_is_run_without_a_finding():
    torch.cuda.set_sync_debug_mode("error")
    scenarios.run_kernel()
    scenarios.run_inputs()
    scenarios.run_scan()
    scenarios.run_stopwatch()
    scenarios.run_nonfinite()
    scenarios.run_images()
