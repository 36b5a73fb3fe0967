"""Peaks of a device's memory in parts of a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hf_flexseq.cost.peak import Peak

Read = Callable[[], tuple[int, int]]
"""Returns the bytes that are allocated, and the most that were since the run began."""


class Peaks:
    """Notes the peak of numbered blocks that hold more than all before them. The device's own
    count goes on: it is read and never reset, since the user may read it, too."""

    def __init__(self, read: Read | None) -> None:
        """read: None for a device that reports no peak."""
        self._read = read
        self.found: dict[int, Peak] = {}
        """The peak of each block that has set a new one."""

    @contextmanager
    def watching(self, block: int) -> Iterator[None]:
        """Note the peak inside the context as the peak of `block`, without waiting for the
        device."""
        if self._read is None:
            yield
            return
        before, former = self._read()
        yield
        after, most = self._read()
        if most > former:
            self.found[block] = Peak(before, most, after)


def peaks_of(device: torch.device) -> Peaks:
    """Return a recorder of a device's peaks, which only CUDA reports."""
    if device.type != "cuda":
        return Peaks(None)
    return Peaks(
        lambda: (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    )
