"""Attention over sequences that this rank holds whole: varlen kernel calls without transfers.

One call is best where the rank has nothing else to do. Beside other zones the sequences are dealt
to a few calls of about equal work, so that every wait for a transfer has something to hide under.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

import torch

from hf_flexseq.attention.weave import END, ZoneSteps
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.segments import Segments

Tensors = tuple[torch.Tensor, ...]


class Piece(NamedTuple):
    """Sequences next to each other that one call takes."""

    rows: slice
    segments: Segments


class LocalZone:
    """The group of this rank alone."""

    __slots__ = ("kernel", "pieces", "rows")

    def __init__(
        self,
        rows: slice,
        lengths: Sequence[int],
        kernel: Kernel,
        device: torch.device,
        *,
        pieces: int = 1,
    ) -> None:
        """pieces: the most calls to make."""
        self.rows, self.kernel = rows, kernel
        self.pieces = tuple(_pieces(lengths, pieces, device))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Tensors]]:
        """q [t, H, D], k, v [t, Hkv, D] -> out [t, H, D], and what `backward` needs."""
        outs, lses = [], []
        for place, (rows, segments) in enumerate(self.pieces):
            # the first one under the first transfers of other zones
            yield place / len(self.pieces)
            out, lse = self.kernel.forward(q[rows], k[rows], v[rows], segments, scale=scale)
            outs.append(out)
            lses.append(lse)
        out = _joined(outs, 0)
        return out, (q, k, v, out, _joined(lses, 1))

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> ZoneSteps[Tensors]:
        q, k, v, out, lse = saved
        grads = []
        for place, (rows, segments) in enumerate(self.pieces):
            # the last one under the last gradients that other zones return
            yield (place + 1) / len(self.pieces)
            tensors = (x[rows] for x in (dout, q, k, v, out))
            grads.append(self.kernel.backward(*tensors, lse[:, rows], segments, scale=scale))
        return tuple(_joined(parts, 0) for parts in zip(*grads, strict=True))

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> ZoneSteps[Tensors]:  # type: ignore[no-untyped-def]
        """`backward` from this rank's rows and the last of what `forward` left."""
        return self.backward(dout, (q, k, v, out, lse), scale)


class NoZone:
    """A rank that works in no group, and stands by with rows that belong to others: see
    `remap.py`."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = slice(0, 0)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> ZoneSteps[tuple[torch.Tensor, Tensors]]:
        """Tensors without rows -> a result without rows."""
        yield END
        return q, (k, v, q.new_empty(0))

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> ZoneSteps[Tensors]:
        yield END
        return dout, saved[0], saved[1]

    def backward_of_rows(self, q, k, v, out, dout, lse, scale: float) -> ZoneSteps[Tensors]:  # type: ignore[no-untyped-def]
        return self.backward(dout, (k, v, lse), scale)


def _pieces(lengths: Sequence[int], most: int, device: torch.device) -> Iterator[Piece]:
    """Sequences in their order, cut where one begins in another of `most` equal parts of all pairs
    of tokens."""
    pairs = [n * n for n in lengths]
    parts = [before * most // sum(pairs) for before in accumulate(pairs[:-1], initial=0)]
    start = 0
    for _, members in groupby(zip(parts, lengths, strict=True), key=itemgetter(0)):
        part = [n for _, n in members]
        stop = start + sum(part)
        yield Piece(slice(start, stop), Segments(part, part, causal=True, device=device))
        start = stop


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)
