"""What the operations between kernel calls take, by torch and by Triton: launches and times."""

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_checks.fused import Sizes, Work, works
from gpu_checks.kernels import synchronize
from hf_flexseq.kernels.choose import choose_fused
from hf_flexseq.kernels.fused import Fused, TorchFused

REPEATS = 50  # of an operation that is timed, without a wait between them


class OperationTimes(NamedTuple):
    """What an operation takes by one implementation."""

    operation: str
    by: str  # name of the implementation
    launches: int | None  # kernels and copies; None on a CPU
    host_us: float  # microseconds until the host goes on
    done_us: float  # and until the device has done it


def operation_times(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, *, rounds: int
) -> Iterator[OperationTimes]:
    """Yield what every operation takes, by torch and by what else is chosen for the device."""
    found: list[Fused] = [TorchFused()]
    chosen = choose_fused(device)
    if chosen.name != found[0].name:
        found.append(chosen)
    for name, make in works(sizes, device, dtype).items():
        for fused in found:
            work = make()
            launched = launches(fused, work, device)
            host_us, done_us = microseconds(fused, work, device, rounds)
            yield OperationTimes(name, fused.name, launched, host_us, done_us)


def launches(fused: Fused, work: Work, device: torch.device) -> int | None:
    """Return how many kernels and copies an operation launches; None on a CPU."""
    work.run(fused)  # Triton compiles with the first one
    if device.type != "cuda":
        return None
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work.run(fused)
        synchronize(device)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def microseconds(
    fused: Fused, work: Work, device: torch.device, rounds: int
) -> tuple[float, float]:
    """Return the microseconds of an operation for the host, and until the device has done it:
    medians of the rounds, each of some operations without a wait between them."""
    host, done = [], []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(REPEATS):
            work.run(fused)
        host.append((time.perf_counter() - began) / REPEATS)
        synchronize(device)
        done.append((time.perf_counter() - began) / REPEATS)
    return 1e6 * statistics.median(host), 1e6 * statistics.median(done)
