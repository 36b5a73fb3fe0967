"""Figures of the device that a rank computes on, which an estimate starts from."""

import logging
import platform
from dataclasses import replace
from pathlib import Path

import torch

from hf_flexseq.cost.devices import DEVICES, DeviceSpec
from hf_flexseq.memory.machine import total_bytes

logger = logging.getLogger(__name__)


def device_spec(device: torch.device, ranks_per_node: int) -> DeviceSpec:
    """Return the figures of the device that a rank computes on, with the memory it really has.

    An unknown GPU gets the arithmetic of an A100, with a warning.
    """
    memory_bytes = device_memory_bytes(device, ranks_per_node)
    if device.type != "cuda":
        return replace(DEVICES["CPU"], memory_bytes=memory_bytes)

    name = torch.cuda.get_device_properties(device).name
    spec = _known_gpu(name)
    if spec is None:
        logger.warning("no figures for %s; its speed is taken to be an A100's", name)
        spec = DEVICES["A100-80GB"]
    return replace(spec, name=name, memory_bytes=memory_bytes)


def device_memory_bytes(device: torch.device, ranks_per_node: int) -> float:
    """Return the bytes of a rank's device; ranks of a node share the memory of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return total_bytes() / ranks_per_node


def _known_gpu(device_name: str) -> DeviceSpec | None:
    """Find the figures of a GPU by the name that CUDA gives it, such as NVIDIA A100-SXM4-80GB."""
    for name, spec in DEVICES.items():
        if all(part in device_name for part in name.split("-")):
            return spec
    return None


def device_name(device: torch.device) -> str:
    """Return the name of the processor, as it calls itself."""
    if device.type == "cuda":
        name: str = torch.cuda.get_device_name(device)
        return name
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
