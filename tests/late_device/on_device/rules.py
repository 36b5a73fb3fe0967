"""Rules of the device that no planted fault of the package breaks (`planted.py`): parts of a
tensor, copies beside their source, early questions, and every way in which a host waits."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.late_device.install import ops

CUDA = torch.device("cuda")


@contextmanager
def found(words):
    """Expect a finding."""
    with pytest.raises(RuntimeError, match=words):
        yield
    ops.forget_findings()


def ones(*shape):
    return torch.ones(shape, device=CUDA)


def test_a_copy_of_the_host_s_is_not_seen_on_the_device():
    host = torch.zeros(3)
    device = host.to(CUDA)
    host.fill_(7)
    assert device.tolist() == [0, 0, 0]


def test_parts_of_a_tensor_are_told_apart():
    x = torch.zeros(6, 4, dtype=torch.bfloat16, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x[:, :2] += 1
    x.index_add_(0, torch.tensor([0, 3], device=CUDA), x.new_ones(2, 4))
    rows = torch.tensor([1, 2, 4, 5], device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    x[[0, 3]] += 0
    with torch.cuda.stream(side):
        x[:, 2:][1:3].add_(1)
        x.index_select(0, rows)
        with found("missing wait"):
            x[:, 3:] * 2
    torch.cuda.synchronize()


def test_numpy_does_not_get_around_it():
    host = torch.zeros(3).pin_memory()
    host.to(CUDA, non_blocking=True)
    with found("pinned source changed"):
        host.numpy()[:] = np.ones(3)
        torch.cuda.synchronize()


def test_what_is_asked_for_is_late():
    event = torch.cuda.Event()
    ones(3)
    event.record()
    assert not event.query()
    assert event.query()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x[torch.tensor([0])],
        lambda x: x[[0]],
        lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64, device=CUDA)),
        lambda x: torch.ones(3).to(CUDA),
        lambda x: torch.ones(3).to(CUDA, non_blocking=True),  # not pinned
        lambda x: torch.tensor([1.0], device=CUDA),
        lambda x: torch.equal(x, x),
    ],
)
def test_the_host_waits(wait):
    x = ones(3)
    wait(x)
    assert ops.counts()["host waits"] >= 1
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="host wait"):
        wait(x)
    torch.cuda.set_sync_debug_mode("error")
    with found("host wait"):
        wait(x)
