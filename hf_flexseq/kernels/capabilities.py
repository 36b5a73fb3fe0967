"""The capabilities of attention kernels, and the reasons why one cannot serve a call.

Every kernel declares its `KernelCapabilities`. `choose_kernel` asks them for a reason against a
call, and `flexseq env` prints them. Each kernel answers in its own module if a package is
installed or an operator exists.

Rejected: trying a kernel and catching its error. Most unsupported calls fail silently, with a
log-sum-exp of +inf or a wrong gradient.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class CallKind(NamedTuple):
    """Calls of one kind, which a kernel is asked to serve."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    window: bool = False
    """True if queries do not read keys that are too far before them."""
    softcap: bool = False
    """True if scores are capped."""

    def __str__(self) -> str:
        """Name the kind of the calls in one phrase."""
        text = f"{self.dtype} with head size {self.head_dim}"
        if self.window:
            text += ", sliding windows"
        if self.softcap:
            text += ", a softcap"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCapabilities:
    """Capabilities of a kernel, for every call that it serves."""

    device: str
    """Type of the device that it runs on."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of queries, keys and values."""
    oldest: int = 0
    """Lowest major compute capability of a GPU: 8 is Ampere."""
    newest: int | None = None
    """Highest major compute capability of a GPU. None: any."""
    most_head_dim: int | None = None
    """Largest head size. None: any."""
    head_dim_step: int = 1
    """Head sizes are multiples of this."""
    keyless_lse: float = -torch.inf
    """Log-sum-exp of a query without keys in the code beneath; `Kernel` always returns -inf."""
    wide_gradients: bool
    """True if gradients of 16-bit inputs are float32, False if they have the inputs' dtype."""
    softcap: bool = False
    """True if scores may be capped, in forward and backward."""

    def reason_unsupported(self, calls: CallKind) -> str | None:
        """Return why such calls are not supported and what to change; None if they are."""
        return (
            self._device_reason(calls.device)
            or self._dtype_reason(calls.dtype)
            or self._head_dim_reason(calls.head_dim)
            or self._generation_reason(calls.device)
            or self._softcap_reason(calls)
        )

    def _device_reason(self, device: torch.device) -> str | None:
        if device.type == self.device:
            return None
        return f"it runs on {self.device}, not on {device.type}"

    def _dtype_reason(self, dtype: torch.dtype) -> str | None:
        if dtype in self.dtypes:
            return None
        reason = f"it has no {_short(dtype)}, only {self._dtypes_text()}"
        if torch.bfloat16 in self.dtypes and dtype.is_floating_point:
            reason += "; train with bf16=True"
        return reason

    def _head_dim_reason(self, head_dim: int) -> str | None:
        is_small_enough = self.most_head_dim is None or head_dim <= self.most_head_dim
        if is_small_enough and head_dim > 0 and head_dim % self.head_dim_step == 0:
            return None
        return f"a head size of {head_dim} is not {self._head_dims_text()}"

    def _generation_reason(self, device: torch.device) -> str | None:
        if not self.oldest:
            return None
        major, minor = torch.cuda.get_device_capability(device)
        if major >= self.oldest and (self.newest is None or major <= self.newest):
            return None
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {major}.{minor}, not {self._generations_text()}"

    def _softcap_reason(self, calls: CallKind) -> str | None:
        if calls.softcap and not self.softcap:
            return "it has no softcap; install flash-attn 2.7 or newer"
        return None

    # ---- in words

    def text(self) -> str:
        """Return all capabilities in one line."""
        parts = [self._dtypes_text(), f"head size {self._head_dims_text()}"]
        if self.oldest:
            parts.append(f"compute capability {self._generations_text()}")
        parts.append(self._keyless_text())
        parts.append(self._gradients_text())
        parts.append("softcap" if self.softcap else "no softcap")
        return "; ".join(parts)

    def _dtypes_text(self) -> str:
        return ", ".join(_short(dtype) for dtype in self.dtypes)

    def _head_dims_text(self) -> str:
        if self.head_dim_step == 1:
            text = "any number"
        else:
            text = f"a multiple of {self.head_dim_step}"
        if self.most_head_dim is not None:
            text += f" up to {self.most_head_dim}"
        return text

    def _generations_text(self) -> str:
        if self.newest is None:
            return f"{self.oldest}.0 or newer"
        return f"{self.oldest}.0 to {self.newest}.x"

    def _keyless_text(self) -> str:
        if self.keyless_lse == -torch.inf:
            return "lse -inf without keys"
        return f"lse -inf without keys (mended from {self.keyless_lse:+})"

    def _gradients_text(self) -> str:
        if self.wide_gradients:
            return "16-bit inputs get float32 gradients"
        return "gradients in the inputs' dtype"


def _short(dtype: torch.dtype) -> str:
    """Return a dtype's name: bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
