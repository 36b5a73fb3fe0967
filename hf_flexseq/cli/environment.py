"""`env`: installed versions, the machine's devices, and the attention kernels of each: the kernel
that it would use, why the others do not serve, and the capabilities of each."""

import platform
from argparse import Namespace
from typing import TYPE_CHECKING

from hf_flexseq import __version__
from hf_flexseq.base.versions import installed, untested

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch", "transformers", "accelerate", "deepspeed",
    "trl", "peft", "datasets",
    "highspy", "numpy", "matplotlib",
    "flash-attn", "flash-attn-3", "flash-attn-4", "triton",
    "fla-core", "causal-conv1d", "mamba-ssm", "liger-kernel",
)  # fmt: skip
HEAD_DIM = 128  # of the heads that kernels are asked about


def env(options: Namespace) -> None:
    """Print versions, devices and kernels."""
    print(f"hf_flexseq {__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        print(f"{package} {installed(package) or 'not installed'}{_tested(package)}")
    for line in _devices():
        print(line)


def _tested(package: str) -> str:
    """Return the tested versions, if the installed one is outside of them."""
    versions = untested(package)
    return "" if versions is None else f" (tested: {versions})"


def _devices() -> list[str]:
    """Return lines that name this machine's devices and their attention kernels.

    Kernels are asked for bfloat16 (on the CPU float32) and a head size of 128.
    """
    try:
        import torch
    except ModuleNotFoundError:
        return ["no torch: only planning works here"]

    cpu = torch.device("cpu")
    lines = [f"cpu: {torch.get_num_threads()} threads", *_kernels(cpu, torch.float32)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        lines += _kernels(torch.device("cuda", index), torch.bfloat16)
        lines += _scans(torch.device("cuda", index), torch.bfloat16)
    return lines


def _kernels(device: "torch.device", dtype: "torch.dtype") -> list[str]:
    """Return lines about a device's kernels: the choice with reasons, and their capabilities."""
    from hf_flexseq.kernels.capabilities import CallKind
    from hf_flexseq.kernels.choose import capabilities, explain

    calls = CallKind(device, dtype, HEAD_DIM)
    lines = [f"  kernel {line}" for line in explain(calls)]
    return [*lines, *(f"  guaranteed by {line}" for line in capabilities(calls))]


def _scans(device: "torch.device", dtype: "torch.dtype") -> list[str]:
    """Return lines that name the scans of recurrent layers on a device, and why not the others."""
    from hf_flexseq.kernels.scans.choose import GATED_DELTA, KIMI_DELTA, MAMBA2, explain

    lines = []
    for kind in (GATED_DELTA, KIMI_DELTA, MAMBA2):
        lines += [f"  scan {kind}, {line}" for line in explain(kind, device, dtype, HEAD_DIM)]
    return lines
