"""Ulysses inside a stage: its ranks share every chunk's tokens, and exchange them for heads around the carry.

A rank holds its part of the chunk's row. Around attention the parts become whole again, for a share of the heads
(`attention/ulysses.py`); there the chunk is worked on as on a stage of one rank, and the carry holds keys and values
of these heads alone. Ring strategies do not fit: their blocks are causal squares, a chunk is a rectangle over its
prefix.

A rank without a part in a chunk, because that has fewer tokens than ranks, holds a dummy token instead, which has no
target and attends to itself: no gradient comes back to it, and every exchange happens.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import torch

from hf_flexseq.attention.local import Tensors
from hf_flexseq.attention.ulysses import HeadShare, UlyssesZone, repeat_heads, sum_heads
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan import Group
from hf_flexseq.shard import Zone, contiguous_part

IGNORED = -100  # the label of a token without a target


class ZoneAttention(Protocol):
    """A part of the chunk's row."""

    rows: slice

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, Tensors]: ...

    def backward(self, dout: torch.Tensor, saved: Tensors, scale: float) -> Tensors: ...


class Sharing(NamedTuple):
    """Ranks that share every chunk of a stage, contiguous, and the place of this rank among them."""

    communicator: Communicator
    ranks: tuple[int, ...]
    index: int

    def part(self, tokens: int) -> tuple[int, int]:
        """[start, stop) of a row of `tokens` that this rank holds."""
        return contiguous_part(tokens, self.index, len(self.ranks))


def own_columns(columns: Mapping[str, torch.Tensor], sharing: Sharing | None) -> dict[str, torch.Tensor]:
    """This rank's part of a chunk's columns [1, t], or a dummy token."""
    if sharing is None:
        return dict(columns)
    part = slice(*sharing.part(columns["input_ids"].shape[1]))
    if part.stop > part.start:
        return {name: value[:, part] for name, value in columns.items()}
    return {name: value.new_full((1, 1), IGNORED if name == "labels" else 0) for name, value in columns.items()}


class SharedChunk(UlyssesZone):
    """This rank's part in a chunk. inner: the chunk's zones as a rank alone would have them."""

    __slots__ = ("_saved", "inner")

    def __init__(self, tokens: int, inner: Sequence[ZoneAttention], sharing: Sharing, kernel: Kernel) -> None:
        start, stop = sharing.part(tokens)
        group = Group(ranks=sharing.ranks, sequences=(0,), strategy="ulysses")
        zone = Zone(group=group, index=sharing.index, lengths=(tokens,), slices=(), start=0, stop=stop - start)
        super().__init__(zone, sharing.communicator, kernel, torch.device("cpu"))
        self.inner = tuple(inner)
        self._saved: list[int] = []  # how many tensors each of them keeps

    def _attend(
        self, qh: torch.Tensor, kh: torch.Tensor, vh: torch.Tensor, share: HeadShare, scale: float
    ) -> tuple[torch.Tensor, Tensors]:
        kr, vr = (repeat_heads(x, share) for x in (kh, vh))
        results = [zone.forward(qh[zone.rows], kr[zone.rows], vr[zone.rows], scale) for zone in self.inner]
        self._saved = [len(saved) for _, saved in results]
        return torch.cat([out for out, _ in results]), tuple(x for _, saved in results for x in saved)

    def _attend_backward(self, doh: torch.Tensor, kept: Tensors, share: HeadShare, scale: float) -> Tensors:
        doh, gradients = doh.contiguous(), []
        tensors = iter(kept)
        for zone, count in zip(self.inner, self._saved, strict=True):
            gradients.append(zone.backward(doh[zone.rows], tuple(islice(tensors, count)), scale))
        dq, dk, dv = (torch.cat(parts) for parts in zip(*gradients, strict=True))
        return dq, sum_heads(dk, share), sum_heads(dv, share)
