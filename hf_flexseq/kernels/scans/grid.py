"""Rows of tokens as chunks that recurrent layers go through, and back.

    rows     segment after segment, [tokens, ...]
    chunks   of `CHUNK` tokens each, the last one of a segment filled up with zeros

Segments do not see each other, so the first chunks of all are computed together, then the second
ones, and so on. Chunks are numbered in this order, the segments with the most chunks first in
each step, so that a step is a range of chunks, and its states are the first ones of all:

    segments of 5, 9 and 2 tokens, chunks of 4      chunks 0 1 2 | 3 4 | 5
    (1, 0, 2 by their number of chunks)             segment 1 0 2 | 1 0 | 1
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_flexseq.kernels.upload import to_device

# Tokens of a chunk: work within chunks grows with it, that from chunk to chunk with one over it.
CHUNK = 64


class ChunkStep(NamedTuple):
    """Chunks that are computed together, one of each segment that has any left."""

    chunks: slice | torch.Tensor
    """Their numbers."""
    active: int
    """Number of these: the first segments, in the order of their number of chunks."""


class ChunkGrid:
    """The chunks of the segments of a micro-batch."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, *, computes: bool = True
    ) -> None:
        """Number the chunks. lengths: tokens of each segment, in the order of the rows. computes:
        False to make and keep tensors alone, where a scan computes a few chunks at a time."""
        self.chunk = CHUNK
        self.computes = computes
        self.device = device
        self.tokens = sum(lengths)
        counts = -(-np.array(lengths, dtype=np.int64) // CHUNK)  # chunks of each segment
        self.counts = counts
        self.chunks = int(counts.sum())
        # place of each segment, those with the most chunks first
        self._place = np.argsort(np.argsort(-counts, kind="stable"))
        self._slots = self._make_slots(lengths)
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._steps_of: dict[tuple[int, ...], tuple[ChunkStep, ...]] = {}

    def _first_chunks(self) -> np.ndarray:
        """Return the number of the first chunk of each step, [steps + 1]."""
        most = int(self.counts.max(initial=0))
        active = (self.counts[:, None] > np.arange(most)).sum(axis=0)  # [steps]
        return np.concatenate((np.zeros(1, dtype=np.int64), active.cumsum()))

    def _make_slots(self, lengths: Sequence[int]) -> torch.Tensor | None:
        """Return each row's place in all chunks, [tokens]; None if rows are chunks already."""
        tokens = np.array(lengths, dtype=np.int64)
        if len(tokens) == 1 and tokens[0] % CHUNK == 0:
            return None
        segment = np.repeat(np.arange(len(tokens)), tokens)  # [tokens]
        starts = tokens.cumsum() - tokens
        within = np.arange(self.tokens) - starts[segment]
        chunk = self._first_chunks()[within // CHUNK] + self._place[segment]
        slots = chunk * CHUNK + within % CHUNK
        return to_device(torch.from_numpy(slots), self.device)

    def steps(self, chosen: Sequence[int]) -> tuple[ChunkStep, ...]:
        """Return the steps through the chunks of chosen segments.

        A step has the states of the first `active` segments, in the order of `order`.
        """
        key = tuple(chosen)
        if key not in self._steps_of:
            self._steps_of[key] = tuple(self._make_steps(key))
        return self._steps_of[key]

    def _make_steps(self, chosen: tuple[int, ...]) -> Iterator[ChunkStep]:
        firsts = self._first_chunks()
        segments = np.array(chosen, dtype=np.int64)[self._order(chosen)]
        for step in range(int(self.counts[segments].max(initial=0))):
            active = segments[self.counts[segments] > step]
            numbers = firsts[step] + self._place[active]
            first, last = int(numbers[0]), int(numbers[-1])
            if last - first == len(numbers) - 1:
                yield ChunkStep(slice(first, last + 1), len(numbers))
            else:
                index = to_device(torch.from_numpy(numbers), self.device)
                yield ChunkStep(index, len(numbers))

    def index(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return an index array int64 [n] on the device, copied once per micro-batch."""
        key = tuple(numbers)
        if key not in self._indices:
            host = torch.tensor(key, dtype=torch.int64)
            self._indices[key] = to_device(host, self.device)
        return self._indices[key]

    def order(self, chosen: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of chosen segments in the order of steps, and the inverse, [n] each,
        on the device."""
        order = self._order(chosen)
        return self.index(order.tolist()), self.index(np.argsort(order).tolist())

    def _order(self, chosen: Sequence[int]) -> np.ndarray:
        """Return the places of chosen segments, those with the most chunks first, [n]."""
        return np.argsort(self._place[np.array(chosen, dtype=np.int64)])

    def to_chunks(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows as chunks padded with zeros: [tokens, H, ...] -> [chunks, H, CHUNK, ...]."""
        if self._slots is not None:
            slots = x.new_zeros(self.chunks * self.chunk, *x.shape[1:])
            x = slots.index_copy(0, self._slots, x)
        # [chunks x CHUNK, H, ...] -> [chunks, CHUNK, H, ...] -> [chunks, H, CHUNK, ...]
        return x.view(self.chunks, self.chunk, *x.shape[1:]).transpose(1, 2)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return chunks as rows: [chunks, H, CHUNK, ...] -> [tokens, H, ...]."""
        slots = x.transpose(1, 2).flatten(0, 1)  # [chunks x CHUNK, H, ...]
        if self._slots is None:
            return slots
        return slots.index_select(0, self._slots)
