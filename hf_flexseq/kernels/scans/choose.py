"""Choose a recurrent layer's scan for a device, and state why the others do not serve.

    fla        flash-linear-attention's kernels, on CUDA
    chunked    torch's operations, everywhere and for all kinds

The first one without a reason against it is taken, as among attention kernels
(`kernels/choose.py`); there is always one.
"""

import functools
import re
from importlib import metadata, util

import torch

from hf_flexseq.kernels.choose import log_once, reason_without_triton

GATED_DELTA, KIMI_DELTA, MAMBA2 = "gated_delta", "kimi_delta", "mamba2"
FLA, CHUNKED = "fla", "chunked"

PACKAGE = "fla-core"
OLDEST = (0, 6)  # its functions take lengths on the host, and values with more heads than keys
MOST_KEYS = 256  # channels of a key
# From the first version to below the second one Triton compiles a backward of fla-core wrongly
# for Hopper; fla-core raises an error in that backward.
WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))


def choose_scan(kind: str, device: torch.device, dtype: torch.dtype, key_channels: int) -> str:
    """Return which scan runs a kind of layer: `FLA` or `CHUNKED`.

    dtype: of queries, keys and values. key_channels: of a key. On CUDA the choice is logged once
    at INFO, with the reasons.
    """
    reason = reason_without_fla(kind, device, dtype, key_channels)
    if device.type == "cuda":
        log_once("scans of recurrent layers", tuple(explain(kind, device, dtype, key_channels)))
    return FLA if reason is None else CHUNKED


def explain(kind: str, device: torch.device, dtype: torch.dtype, key_channels: int) -> list[str]:
    """List one line per scan, in order of preference: chosen, not needed, or the reason."""
    reason = reason_without_fla(kind, device, dtype, key_channels)
    if reason is None:
        return [f"{FLA}: chosen", f"{CHUNKED}: not needed"]
    return [f"{FLA}: {reason}", f"{CHUNKED}: chosen"]


def reason_without_fla(
    kind: str, device: torch.device, dtype: torch.dtype, key_channels: int
) -> str | None:
    """Return why flash-linear-attention cannot run such a scan, and what to change, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if key_channels > MOST_KEYS:
        return f"its keys have at most {MOST_KEYS} channels, not {key_channels}"
    return _reason_not_installed() or reason_without_triton() or _reason_of_compiler(device)


@functools.cache
def _reason_not_installed() -> str | None:
    """Return why the installed flash-linear-attention cannot be used; None if it can."""
    newest = f'install it with pip install "{PACKAGE}>={OLDEST[0]}.{OLDEST[1]}"'
    if util.find_spec("fla") is None:
        return f"flash-linear-attention is not installed; {newest}"
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"flash-linear-attention has no package {PACKAGE}; {newest}"
    numbers = tuple(int(number) for number in version.split(".")[:2])
    if numbers < OLDEST:
        return f"{PACKAGE} {version} is too old; {newest}"
    return None


def _reason_of_compiler(device: torch.device) -> str | None:
    """Say why the installed Triton cannot compile the package for a device; None when it can."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    version = metadata.version("triton")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    first, fixed = WRONG_ON_HOPPER
    if not first <= numbers < fixed:
        return None
    wanted = ".".join(map(str, fixed))
    return (
        f"Triton {version} compiles a backward of {PACKAGE} wrongly for Hopper; install Triton "
        f"{wanted} or newer"
    )
