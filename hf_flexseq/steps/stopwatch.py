"""Seconds of parts of a step, on the clock of the device that does the work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Times named blocks: by the wall clock on a CPU, by events of the stream on CUDA, without
    waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[int, float]] = []
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self, name: int) -> Iterator[None]:
        """Time the block as `name`."""
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            began = time.perf_counter()
            yield
            self._spans.append((name, time.perf_counter() - began))

    def seconds(self) -> dict[int, float]:
        """Seconds by name; on CUDA waits until the last block is done."""
        for name, begin, end in self._events:
            end.synchronize()
            self._spans.append((name, begin.elapsed_time(end) / 1e3))
        self._events.clear()
        total: dict[int, float] = {}
        for name, span in self._spans:
            total[name] = total.get(name, 0.0) + span
        return total
