"""Seconds of parts of a step, on the clock of the device that does the work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Times numbered blocks: by the wall clock on a CPU, by events on CUDA, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[int, float]] = []  # (block, seconds)
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []  # not yet read

    @property
    def is_behind(self) -> bool:
        """True if the device works behind the host, which has to wait before it can read."""
        return self._cuda

    @contextmanager
    def timing(self, block: int) -> Iterator[None]:
        """Time the context as a part of `block`."""
        if self._cuda:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((block, begin, end))
        else:
            began = time.perf_counter()
            yield
            self._spans.append((block, time.perf_counter() - began))

    def seconds(self) -> dict[int, float]:
        """Return the seconds of each block; on CUDA wait until the last block is done."""
        for block, begin, end in self._events:
            end.synchronize()
            self._spans.append((block, begin.elapsed_time(end) / 1e3))  # milliseconds -> seconds
        self._events.clear()
        total: dict[int, float] = {}
        for block, span in self._spans:
            total[block] = total.get(block, 0.0) + span
        return total
