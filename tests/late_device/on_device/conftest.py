"""What every test on the device finds."""

import pytest
import torch

from hf_flexseq.kernels import choose
from hf_flexseq.kernels.fused_operations import TorchFused
from tests.kernels.reference import Reference
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


# Of trainers whose steps have several micro-batches.
SETTINGS = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "cost_model": "estimate",
    "max_tokens_per_rank": 64,
    "seed": 1,
}


@pytest.fixture
def in_torch(monkeypatch):
    """Operations between kernel calls are torch's, as Triton's interpreter takes very long."""
    monkeypatch.setattr(choose, "_fused_for_cuda", TorchFused)


@pytest.fixture
def one_kernel(monkeypatch):
    """Both devices have the same kernel, for the same numbers up to rounding."""
    for name in ("cuda", "cpu"):
        monkeypatch.setitem(choose.CANDIDATES, name, (AnyCall(Reference()),))
