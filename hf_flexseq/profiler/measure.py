"""Time the runs of a design on all ranks.

Runs take turns, one after the other, round by round, so that a busy moment spoils none of them.
Ranks start each run together. A rank's figure is the median over the rounds; the first round,
where memory is allocated and kernels are chosen, does not count.

    measure          everything a calibration needs: samples for the fit, seconds of the mixes,
                     overlap of transfers and attention, NICs of a node, the host's work
    median_seconds   the timing itself
    ring_overlap, measured_nics, first_contact_s
"""

import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import NO_MIXERS, Mixers, ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.profiler.bench import Bench, ProbeFactory
from hf_flexseq.profiler.design import (
    Design,
    LayersOfReach,
    ProbeShape,
    all_reaches,
    alone,
)
from hf_flexseq.profiler.fit import Sample
from hf_flexseq.profiler.host import small_shapes
from hf_flexseq.profiler.runs import REPEATS, HopRun, RingRun, Run
from hf_flexseq.topology import Topology

HOP_S = 0.01  # estimated seconds of the transfer that counts NICs
MOST_HOP_BYTES = 1 << 28  # and its bytes at most, which every rank has to allocate


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Everything that was measured, the same on every rank."""

    samples: tuple[Sample, ...]
    """Runs for the fit."""
    mix_seconds: tuple[tuple[float, ...], ...]
    """[mix][rank]: seconds of the micro-batches that test the fit."""
    overlap: float
    """Share of a transfer that attention hides, 0 to 1."""
    nics_per_node: int
    """Links between nodes that the ranks of a node have."""
    transfer_s: float
    """Seconds of a transfer between nodes that moves next to nothing."""
    small: tuple[Sample, ...]
    """Runs on next to no tokens, for the host's seconds."""
    contact_s: float | None
    """Seconds of a first message between two ranks beyond those of the next one; None where no
    two could be measured."""


def measure(
    design: Design,
    probes: ProbeFactory,
    shape: ModelShape,
    estimate: CostModel,
    communicator: Communicator,
    *,
    device: torch.device,
    rounds: int,
) -> Timings:
    """Make all runs of `design`, and return their seconds. Collective.

    shape: of the whole model. estimate: its cost model, which knows the bytes that are moved.
    rounds: timings of each run that count.
    """
    # Before anything else, for all runs connect ranks.
    contact_s = first_contact_s(communicator, device)
    topology = communicator.topology
    bench = Bench(design, probes, shape, estimate, communicator, device)

    exchanging = [shape.degree for shape in design.shapes if shape.strategy == "ulysses"]
    communicator.open_fast_blocks(exchanging)

    # 1. the design's own runs: those for the fit first, then the mixes
    shapes, runs = _runs_for_fit(design, bench, topology)
    for mix in design.mixes:
        runs.append(bench.whole_run(mix, max(design.depths)))
    seconds = median_seconds(runs, communicator, device, rounds)  # [run][rank]

    # 2. the mean over the ranks that had a part in a run
    samples = []
    for (probe_shape, layers), by_rank in zip(shapes, seconds[: len(shapes)], strict=True):
        sample = _sample(probe_shape, layers, by_rank)
        reaches = _reaches(design, probe_shape, layers)
        mixers = _mixers(design, probe_shape, layers)
        samples.append(replace(sample, reaches=reaches, mixers=mixers))

    # 3. the host, which few tokens show
    few_tokens = small_shapes(topology, estimate.ring_bytes is not None)
    small = _small_samples(bench, few_tokens, communicator, device, rounds)

    # 4. transfers beside attention, where rings are possible; and links between nodes
    overlap = estimate.ring_overlap
    if estimate.ring_bytes is not None and communicator.world_size > 1:
        overlap = ring_overlap(
            communicator,
            bench.kernel_run(design.sizes.sequence, all_reaches(shape)[0]),
            bytes_moved=bench.ring_bytes(design.sizes.sequence, communicator.world_size),
            device=device,
            rounds=rounds,
        )
    nics_per_node = 1
    transfer_s = 0.0
    if topology.nodes > 1:
        bandwidth = estimate.bandwidth(communicator.world_size, True)
        nics_per_node, transfer_s = measured_nics(
            communicator,
            bytes_moved=min(int(HOP_S * bandwidth), MOST_HOP_BYTES),
            device=device,
            rounds=rounds,
        )
    return Timings(
        samples=tuple(samples),
        mix_seconds=tuple(tuple(by_rank) for by_rank in seconds[len(shapes) :]),
        overlap=overlap,
        nics_per_node=nics_per_node,
        transfer_s=transfer_s,
        small=small,
        contact_s=contact_s,
    )


def _runs_for_fit(
    design: Design, bench: Bench, topology: Topology
) -> tuple[list[tuple[ProbeShape, int]], list[Run]]:
    """Return the shape of each run for the fit, with the layers of the copy that runs it, and the
    runs: parts of a layer first, then whole micro-batches."""
    shapes: list[tuple[ProbeShape, int]] = []
    runs: list[Run] = []
    for probe_shape in design.shapes:
        if probe_shape.strategy != "local":
            shapes.append((probe_shape, 1))
            runs.append(bench.layer_run(probe_shape))
    for layers in design.depths:
        for probe_shape in design.shapes:
            if probe_shape.strategy == "local":
                layout = alone(probe_shape.lengths, topology)
                shapes.append((probe_shape, layers))
                runs.append(bench.whole_run(layout, layers))
    return shapes, runs


def _small_samples(
    bench: Bench,
    shapes: Sequence[ProbeShape],
    communicator: Communicator,
    device: torch.device,
    rounds: int,
) -> tuple[Sample, ...]:
    """Time runs on next to no tokens. Collective over the world."""
    runs = [bench.small_run(shape) for shape in shapes]
    seconds = median_seconds(runs, communicator, device, rounds)  # [run][rank]
    samples = []
    for shape, by_rank in zip(shapes, seconds, strict=True):
        sample = _sample(shape, 1, by_rank)
        samples.append(replace(sample, seconds=sample.seconds / REPEATS))
    return tuple(samples)


def _reaches(design: Design, shape: ProbeShape, layers: int) -> LayersOfReach:
    """Return the layers of a run that do not read all keys. layers: of the copy that runs it."""
    if shape.strategy == "local":
        return design.reaches[design.depths.index(layers)]
    return () if shape.reach.is_full else ((1, shape.reach),)


def _mixers(design: Design, shape: ProbeShape, layers: int) -> Mixers:
    """Return the recurrent layers of a run, and those without attention. layers: of the copy that
    runs it."""
    if shape.strategy == "local":
        return design.mixers[design.depths.index(layers)]
    return Mixers(((1, shape.recurrent),), 1) if shape.recurrent else NO_MIXERS


def _sample(shape: ProbeShape, layers: int, by_rank: Sequence[float]) -> Sample:
    """Make a sample with the mean seconds of the ranks that have such a group.

    by_rank: seconds of every rank.
    """
    working: list[float] = []
    for start in shape.starts:
        working.extend(by_rank[start : start + shape.degree])
    return Sample(
        strategy=shape.strategy,
        degree=shape.degree,
        layers=layers,
        lengths=shape.lengths,
        seconds=statistics.mean(working),
    )


# ---- timing


def median_seconds(
    runs: Sequence[Run], communicator: Communicator, device: torch.device, rounds: int
) -> list[list[float]]:
    """Time `runs`, the same list on every rank, and return [run][rank] median seconds.

    Collective over the world.
    """
    timed: list[list[float]] = [[] for _ in runs]  # [run][round]
    for _ in range(rounds + 1):
        for run, seconds in zip(runs, timed, strict=True):
            communicator.host.gather_ints([0])  # all start together
            seconds.append(_seconds(run, device))
    medians = [statistics.median(seconds[1:]) for seconds in timed]
    by_rank = communicator.host.gather_values(medians)  # [rank][run]
    return [list(of_run) for of_run in zip(*by_rank, strict=True)]


def _seconds(run: Run, device: torch.device) -> float:
    _finish(device)
    began = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    """Wait for the work that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ring_overlap(
    communicator: Communicator,
    compute: Run,
    *,
    bytes_moved: int,
    device: torch.device,
    rounds: int,
) -> float:
    """Measure the share, 0 to 1, of a transfer to the next rank that `compute` hides.

    Both run alone and together. The share is of the shorter one of the two. bytes_moved: by a
    rank in all transfers of a layer, of which one is timed. Collective over the world.
    """
    ring = RingRun(
        communicator, (0,), communicator.world_size, bytes_moved=bytes_moved, device=device
    )

    def transfer() -> None:
        ring.post().wait()

    def both() -> None:
        transfers = ring.post()
        compute()
        transfers.wait()

    by_run = median_seconds([compute, transfer, both], communicator, device, rounds)
    compute_s, transfer_s, both_s = (statistics.mean(by_rank) for by_rank in by_run)
    hidden = (compute_s + transfer_s - both_s) / min(compute_s, transfer_s)
    return min(max(hidden, 0.0), 1.0)


def measured_nics(
    communicator: Communicator, *, bytes_moved: int, device: torch.device, rounds: int
) -> tuple[int, float]:
    """Count the links between nodes that a node's ranks have, and time a transfer of one byte.

    A node's ranks that send all together take as many times as long as one of them alone as there
    are ranks to a link. Returns (links, seconds). Collective over the world; for two nodes and
    more.
    """
    runs = [
        HopRun(communicator, lone=True, bytes_moved=bytes_moved, device=device),
        HopRun(communicator, lone=False, bytes_moved=bytes_moved, device=device),
        HopRun(communicator, lone=True, bytes_moved=1, device=device),
    ]
    by_run = median_seconds(runs, communicator, device, rounds)  # [run][rank]
    lone_s, together_s, transfer_s = (max(by_rank) for by_rank in by_run)
    if lone_s < 2 * transfer_s:
        return 1, transfer_s  # too short to tell; nothing is routed over one NIC
    slowdown = max(1.0, (together_s - transfer_s) / (lone_s - transfer_s))
    ranks_per_node = communicator.topology.ranks_per_node
    return max(1, round(ranks_per_node / slowdown)), transfer_s


def first_contact_s(communicator: Communicator, device: torch.device) -> float | None:
    """Time a first message between two ranks, beyond the next one. Collective over the world.

    0 on a transport that connects all ranks at the start. None on one that does not, where all
    ranks are connected all the same: on one node, or with one rank on each.
    """
    topology = communicator.topology
    if not communicator.transport.capabilities.connects_lazily:
        return 0.0
    if topology.nodes == 1 or topology.ranks_per_node == 1:
        return None
    run = HopRun(communicator, lone=True, bytes_moved=1, device=device, shift=1)
    seconds = []
    for _ in range(2):
        communicator.host.gather_ints([0])  # all start together
        seconds.append(_seconds(run, device))
    first_s, next_s = (
        max(by_rank) for by_rank in zip(*communicator.host.gather_values(seconds), strict=True)
    )
    return max(0.0, first_s - next_s)


def device_name(device: torch.device) -> str:
    """Return the name of the processor, as it calls itself."""
    if device.type == "cuda":
        name: str = torch.cuda.get_device_name(device)
        return name
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
