"""Planted faults: the device finds every one of them, and nothing in what is right."""

import re

import pytest
import torch

from hf_flexseq.kernels import choose
from hf_flexseq.kernels.fused_operations import TorchFused
from hf_flexseq.program import heads, ulysses
from tests.late_device.changes import on_a_side_stream
from tests.late_device.faults import FUSED, KINDS, layers, wrapped
from tests.late_device.install import ops
from tests.programs import ROOT


@pytest.fixture(autouse=True)
def like_a_gpu_of_few_rows(monkeypatch):
    """Heads come and go in pieces, and Triton's interpreter has no part in it."""
    monkeypatch.setitem(heads.PIECE_ROWS, "cuda", 1)
    monkeypatch.setattr(ulysses, "HEAD_PIECES", 2)
    monkeypatch.setattr(choose, "_fused_for_cuda", TorchFused)


def said_about(fault):
    """Return all that is raised and found with a fault in its place; empty if nothing is."""
    torch.cuda.set_sync_debug_mode("default" if fault.waits else "error")
    said = []
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        try:
            fault.run()
        except (RuntimeError, ValueError, AssertionError) as error:
            said.append(str(error))
    torch.cuda.set_sync_debug_mode("default")
    said += ops.findings()
    ops.forget_findings()
    return " ".join(said)


@pytest.mark.parametrize("kind", KINDS)
def test_every_planted_fault_is_found(kind):
    faults, words = KINDS[kind]
    assert len(faults) >= 5
    missed = {}
    for fault in faults:
        said = said_about(fault)
        if not re.search(words, said):
            missed[fault.place] = said
    print(f"{kind}: {len(faults) - len(missed)} of {len(faults)} found")
    assert not missed


def test_the_documentation_counts_them():
    planted = sum(len(faults) for faults, _ in KINDS.values())
    page = " ".join((ROOT / "docs/limits.md").read_text().split())
    assert f"{planted} planted faults of {len(KINDS)} kinds are found" in page


@pytest.mark.parametrize("name", FUSED)
def test_streams_that_wait_for_each_other_are_right(monkeypatch, name):
    torch.cuda.set_sync_debug_mode("error")
    change = on_a_side_stream(before=True, after=True)
    wrapped(TorchFused, name, change)(monkeypatch)
    layers(FUSED[name])()
