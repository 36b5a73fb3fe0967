"""Attention over sequences that this rank holds whole: one varlen kernel call."""

from collections.abc import Sequence

import torch

from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.segments import Segments

Tensors = tuple[torch.Tensor, ...]


class LocalZone:
    """The group of this rank alone."""

    __slots__ = ("kernel", "rows", "segments")

    def __init__(self, rows: slice, lengths: Sequence[int], kernel: Kernel, device: torch.device) -> None:
        self.rows, self.kernel = rows, kernel
        self.segments = Segments(lengths, lengths, causal=True, device=device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, Tensors]:
        """q [t, H, D], k, v [t, Hkv, D] -> out [t, H, D], and what `backward` needs."""
        out, lse = self.kernel.forward(q, k, v, self.segments, scale=scale)
        return out, (q, k, v, out, lse)

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> Tensors:
        q, k, v, out, lse = saved
        return self.kernel.backward(dout, q, k, v, out, lse, self.segments, scale=scale)

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> Tensors:  # type: ignore[no-untyped-def]
        """`backward` from this rank's rows and the last of what `forward` left."""
        return self.backward(dout, (q, k, v, out, lse), scale)


class NoZone:
    """A rank that works in no group, and stands by with rows that belong to others: see `remap.py`."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = slice(0, 0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, Tensors]:
        """Tensors without rows -> a result without rows."""
        return q, (k, v, q.new_empty(0))

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> Tensors:
        return dout, saved[0], saved[1]

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> Tensors:  # type: ignore[no-untyped-def]
        return dout, k, v
