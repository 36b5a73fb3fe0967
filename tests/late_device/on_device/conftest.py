"""What every test on the device finds."""

import pytest
import torch

from hf_flexseq.kernels import choose
from hf_flexseq.kernels.fused import TorchFused
from hf_flexseq.kernels.reference import Reference
from tests.late_device.install import ops


@pytest.fixture(autouse=True)
def no_findings_are_left():
    """The device knows nothing, and every finding that a test does not expect fails it."""
    torch.cuda.synchronize()
    ops.forget_findings()
    ops.reset_counts()
    yield
    torch.cuda.set_sync_debug_mode("default")
    left = list(ops.findings())
    ops.forget_findings()
    torch.cuda.synchronize()
    assert not left


class AnyCall:
    """A kernel that serves every call."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __getattr__(self, name):
        return getattr(self._kernel, name)

    def reason_unsupported(self, calls):
        return None


@pytest.fixture
def in_torch(monkeypatch):
    """Operations between kernel calls are torch's, as Triton's interpreter takes very long."""
    monkeypatch.setattr(choose, "_fused_for_cuda", TorchFused)


@pytest.fixture
def one_kernel(monkeypatch):
    """Both devices have the same kernel, for the same numbers up to rounding."""
    for name in ("cuda", "cpu"):
        monkeypatch.setitem(choose.CANDIDATES, name, (AnyCall(Reference()),))
