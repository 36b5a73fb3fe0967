"""Figures of a GPU, found by the name that CUDA gives it."""

from types import SimpleNamespace

import pytest
import torch

from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.memory.device import device_spec

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "speed_of"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 9090", "A100-80GB"),
    ],
)
def test_a_gpu_has_the_figures_of_its_name_or_those_of_an_a100_and_its_own_memory(
    name, speed_of, monkeypatch, caplog
):
    properties = SimpleNamespace(name=name, total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    spec = device_spec(CUDA, 8)
    known = DEVICES[speed_of]
    assert spec.memory_bytes == 24 << 30
    assert (spec.flops, spec.memory_rate) == (known.flops, known.memory_rate)
    assert (f"no figures for {name}" in caplog.text) == ("RTX" in name)
