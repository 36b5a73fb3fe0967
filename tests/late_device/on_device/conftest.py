"""What every test on the device finds."""

import pytest
import torch

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
