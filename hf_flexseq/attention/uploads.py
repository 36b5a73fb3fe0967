"""The integers of a micro-batch's programs on the device that runs them: index arrays, and the
lengths of kernel calls.

All that is new goes in one copy, from pinned memory, which the host does not wait for.
"""

import numpy as np
import torch

from hf_flexseq.kernels.segments import Segments, cumulative
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.program.tables import Tables

# Bytes of which each array begins at a multiple: kernels are compiled for such pointers.
ALIGNMENT = 16


class Uploads:
    """Tensors of the tables of a micro-batch."""

    def __init__(self, tables: Tables, device: torch.device) -> None:
        """tables: they may grow afterwards."""
        self._tables = tables
        self.device = device
        self.indices: list[torch.Tensor] = []
        """Index arrays by number: int64 [n] each."""
        self.segments: list[Segments] = []
        """Lengths of kernel calls by number."""

    def bring(self) -> None:
        """Copy to the device the index arrays and calls that are new in the tables."""
        indices = self._tables.indices[len(self.indices) :]
        calls = self._tables.calls[len(self.segments) :]
        segments = []
        for call in calls:
            segments.append(
                Segments(
                    call.q_lens,
                    call.k_lens,
                    causal=call.causal,
                    device=self.device,
                    window=call.window,
                )
            )
        if self.device.type == "cpu":
            self.indices += [torch.from_numpy(index) for index in indices]
        elif indices or segments:
            self._copy(indices, segments)
        self.segments += segments

    def _copy(self, indices: list[np.ndarray], segments: list[Segments]) -> None:
        """Copy index arrays, int64, and the cumulative lengths of kernel calls, int32, at once."""
        # 1. one buffer of bytes: first the int64, then the int32
        lengths = []
        for one in segments:
            lengths += [cumulative(one.q_lens), cumulative(one.k_lens)]
        # numpy views an array without numbers as bytes, torch does not
        parts = [torch.from_numpy(index.view(np.uint8)) for index in indices]
        parts += [length.view(torch.uint8) for length in lengths]
        sizes = [part.numel() for part in parts]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        host = torch.zeros(sum(padded), dtype=torch.uint8)
        for part, room in zip(parts, host.split(padded), strict=True):
            room[: part.numel()] = part
        buffer = to_device(host, self.device)
        # 2. views of it: uint8 [bytes] -> int64 [n] or int32 [sequences + 1]
        rooms = zip(buffer.split(padded), sizes, strict=True)
        views = [room[:size] for room, size in rooms]
        self.indices += [view.view(torch.int64) for view in views[: len(indices)]]
        cumulatives = [view.view(torch.int32) for view in views[len(indices) :]]
        for one, q, k in zip(segments, cumulatives[::2], cumulatives[1::2], strict=True):
            one.place(q, k)
