"""The integers of a micro-batch's programs on the device that runs them: index arrays, and the
lengths of kernel calls.

They are copied from pinned memory, which the host does not wait for, ahead of the first layer that
reads them.
"""

import torch

from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.program.tables import Tables


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
        self.indices += [to_device(torch.from_numpy(index), self.device) for index in indices]
        for call in calls:
            segments = Segments(
                call.q_lens,
                call.k_lens,
                causal=call.causal,
                device=self.device,
                window=call.window,
            )
            if self.device.type != "cpu":
                _ = segments.cu_seqlens_q, segments.cu_seqlens_k  # copied when asked for
            self.segments.append(segments)
