"""Copies to a device start from pinned memory, and do not wait. Without CUDA: what would be called
is noted instead."""

import pytest
import torch

from hf_flexseq.kernels.upload import to_device

CUDA = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch):
    """What `to_device` calls: (method, device, non_blocking)."""
    noted = []

    def pin_memory(x):
        noted.append(("pin_memory",))
        return x

    def to(x, device, *, non_blocking=False):
        noted.append(("to", device, non_blocking))
        return x

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return noted


def test_a_copy_to_cuda_is_pinned_first(calls):
    to_device(torch.arange(3), CUDA)
    assert calls == [("pin_memory",), ("to", CUDA, True)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_pinned_for_other_devices(calls, device):
    to_device(torch.arange(3), torch.device(device))
    assert calls == [("to", torch.device(device), True)]


def test_a_tensor_of_the_device_is_not_pinned(calls):
    to_device(torch.empty(3, device="meta"), CUDA)  # `meta` stands for a device
    assert ("pin_memory",) not in calls


def test_a_tensor_that_is_there_already_is_returned_as_it_is():
    x = torch.arange(3)
    assert to_device(x, torch.device("cpu")) is x
