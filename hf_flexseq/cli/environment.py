"""`env`: what is installed, which devices there are, and which attention kernel each would use."""

import platform
from argparse import Namespace
from importlib import metadata

from hf_flexseq import __version__

PACKAGES = (
    "torch", "transformers", "accelerate", "deepspeed",
    "trl", "peft", "datasets", "flash-attn", "pulp",
    "highspy", "numpy", "matplotlib",
)  # fmt: skip
HEAD_DIM = 128  # of the heads that kernels are asked about


def env(options: Namespace) -> None:
    """Print versions, devices and kernels."""
    print(f"hf_flexseq {__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        print(f"{package} {_version(package)}")
    for line in _devices():
        print(line)


def _version(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    """Return lines that name this machine's devices and their attention kernels.

    Kernels are asked for bfloat16 (on the CPU float32) and a head size of 128.
    """
    try:
        import torch
    except ModuleNotFoundError:
        return ["no torch: only planning works here"]
    from hf_flexseq.kernels.choose import explain

    lines = [f"cpu: {torch.get_num_threads()} threads"]
    lines += [f"  kernel {line}" for line in explain(torch.device("cpu"), torch.float32, HEAD_DIM)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        lines += [
            f"  kernel {line}"
            for line in explain(torch.device("cuda", index), torch.bfloat16, HEAD_DIM)
        ]
    return lines
