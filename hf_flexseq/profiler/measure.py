"""Time the runs of a design on all ranks.

Runs take turns, one after the other, round by round, so that a busy moment spoils none of them.
Ranks start each run together. A rank's figure is the median over the rounds; the first round,
where memory is allocated and kernels are chosen, does not count.

    measure          everything a calibration needs: samples for the fit, seconds of the mixes,
                     overlap of transfers and computation, NICs of a node, rates of the host
    median_seconds   the timing itself
    ring_overlap, measured_nics, host_rates
"""

import logging
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hf_flexseq.cost import CostModel
from hf_flexseq.distributed.agreement import Attempt
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import RankGroup
from hf_flexseq.profiler.design import (
    Design,
    ExpertsShape,
    Layers,
    ProbeLayout,
    ProbeShape,
    RunShape,
    disjoint_blocks,
    in_groups,
)
from hf_flexseq.profiler.fit import Sample, Terms
from hf_flexseq.profiler.tower_runs import ImagesShape
from hf_flexseq.profiler.transfers import (
    AllToAllRun,
    ExchangeRun,
    HopRun,
    HostCopyRun,
    RingRun,
    own_group,
)

logger = logging.getLogger(__name__)

Run = Callable[[], object]

MORE_ROUNDS = 2  # times as many rounds of runs on next to no tokens, which take no time
HOP_S = 0.01  # estimated seconds of the transfer that counts NICs
MOST_HOP_BYTES = 1 << 28  # and its bytes at most, which every rank has to allocate
HOST_COPY_BYTES = 1 << 26  # of a copy to the host or back: a page of what is kept there
MATRIX = 512  # rows and columns of the matrices that are multiplied during a transfer


class Probe(Protocol):
    """A copy of the model, made to be timed."""

    def run(self, layout: ProbeLayout) -> Run:
        """Return a function that runs one micro-batch, forward and backward."""
        ...

    def run_experts(self, tokens: int, *, to_first: bool) -> Run:
        """Return a function that runs the experts of one layer, forward and backward, on so many
        tokens of this rank. Only of a model with experts over ranks. to_first: see
        `ExpertsShape`."""
        ...

    def run_tower(self, images: int, patches: int) -> Run:
        """Return a function that runs the vision tower on so many equal images, in one call. Only
        of a model with `ProbeFactory.image_sizes`. patches: of an image, one of these."""
        ...


class ProbeFactory(Protocol):
    """The maker of copies of a model; all that the profiler uses of the model itself."""

    @property
    def layers(self) -> Layers:
        """Number of layers of each type in the model."""
        ...

    def expert_layers(self, layers: Layers) -> int:
        """Count the layers with experts over ranks in such a copy."""
        ...

    @property
    def image_sizes(self) -> Sequence[int]:
        """Patches of the images that the model's tower can be run on, ascending, each four times
        those before; none without a tower, or where it cannot be run."""
        ...

    @property
    def expert_group(self) -> RankGroup:
        """The expert group of this rank. Only of a model with experts over ranks."""
        ...

    def __call__(self, layers: Layers, *, with_experts: bool = True) -> Probe:
        """Make a copy with so many layers of each type. with_experts: False to leave out experts
        over ranks."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Everything that was measured, the same on every rank."""

    samples: tuple[Sample, ...]
    """Runs for the fit."""
    mix_seconds: tuple[tuple[float, ...], ...]
    """[mix][rank]: seconds of the micro-batches that test the fit."""
    image_seconds: tuple[float, ...]
    """Seconds of the runs of the tower that test the fit, on the mean of the ranks; none where it
    fails."""
    overlap: float
    """Share of a transfer that computation hides, 0 to 1."""
    nics_per_node: int
    """Links between nodes that the ranks of a node have."""
    transfer_s: float
    """Seconds of a transfer between nodes that moves next to nothing."""
    host_rates: tuple[float, float]
    """Bytes/s of a rank to the memory of its host, and from it, while all ranks copy."""


def measure(
    design: Design,
    probes: ProbeFactory,
    terms: Terms,
    communicator: Communicator,
    *,
    device: torch.device,
    rounds: int,
) -> Timings:
    """Make all runs of `design`, and return their seconds. Collective.

    terms: count the bytes that are moved. rounds: timings of each run that count.
    """
    topology = communicator.topology
    communicator.open_fast_blocks(design.degrees)
    copies = {_key(layers): probes(layers, with_experts=False) for layers in design.copies}
    deepest = copies[_key(design.copies[0])]
    if terms.experts is not None:
        deepest = probes(design.copies[0])

    def run_of(shape: RunShape) -> Run:
        if isinstance(shape, ImagesShape):
            return deepest.run_tower(shape.images, shape.patches)
        if isinstance(shape, ExpertsShape):
            return _experts_run(shape, deepest, probes, terms, communicator, device)
        if shape.layers:
            return copies[_key(shape.layers)].run(in_groups(shape, topology))
        kind = AllToAllRun if shape.strategy == "ulysses" else RingRun
        ranks = own_group(communicator, disjoint_blocks(topology, shape.degree))
        return kind(communicator, ranks, terms.bytes_moved(shape), device)

    # 1. runs on many tokens, and the mixes in the same rounds; then those on few, in more rounds
    shapes, images = design.shapes, design.images
    if images and not _tower_runs(design, deepest, communicator):
        shapes = tuple(shape for shape in shapes if not isinstance(shape, ImagesShape))
        images = ()
    many = [shape for shape in shapes if not shape.has_few_tokens]
    few = [shape for shape in shapes if shape.has_few_tokens]
    tests = [*(deepest.run(mix) for mix in design.mixes), *map(run_of, images)]
    of_many = median_seconds([*tests, *map(run_of, many)], communicator, device, rounds)
    of_few = median_seconds([*map(run_of, few)], communicator, device, MORE_ROUNDS * rounds)
    of_tests = of_many[: len(tests)]
    seconds = [*of_many[len(tests) :], *of_few]  # [run][rank]

    # 2. the mean over the ranks that had a part in a run
    samples = []
    for shape, by_rank in zip((*many, *few), seconds, strict=True):
        working = by_rank
        if isinstance(shape, ProbeShape):
            blocks = disjoint_blocks(topology, shape.degree)
            working = [by_rank[rank] for ranks in blocks for rank in ranks]
        samples.append(Sample(shape=shape, seconds=statistics.mean(working)))

    # 3. transfers during computation, and links between nodes
    overlap = terms.estimate.ring_overlap
    if terms.estimate.ring_bytes is not None and communicator.world_size > 1:
        bytes_moved = int(terms.passed_on * design.sequence)
        overlap = ring_overlap(communicator, bytes_moved, device=device, rounds=rounds)
    nics_per_node, transfer_s = 1, 0.0
    if topology.nodes > 1:
        nics_per_node, transfer_s = measured_nics(
            communicator, terms.estimate, device=device, rounds=rounds
        )
    return Timings(
        samples=tuple(samples),
        mix_seconds=tuple(tuple(by_rank) for by_rank in of_tests[: len(design.mixes)]),
        image_seconds=tuple(map(statistics.mean, of_tests[len(design.mixes) :])),
        overlap=overlap,
        nics_per_node=nics_per_node,
        transfer_s=transfer_s,
        host_rates=host_rates(communicator, device=device, rounds=rounds),
    )


def _tower_runs(design: Design, copy: Probe, communicator: Communicator) -> bool:
    """Tell if the tower of a copy runs on all images of `design`, on every rank. Collective."""
    with Attempt() as running:
        for shape in (*design.images, *design.shapes):
            if isinstance(shape, ImagesShape):
                copy.run_tower(shape.images, shape.patches)()
    own = None if running.error is None else repr(running.error)
    reasons = [one for one in communicator.cpu_group.gather_values(own) if one is not None]
    if reasons and communicator.rank == 0:
        logger.warning("the vision tower cannot be timed: %s", reasons[0])
    return not reasons


def _experts_run(
    shape: ExpertsShape,
    copy: Probe,
    probes: ProbeFactory,
    terms: Terms,
    communicator: Communicator,
    device: torch.device,
) -> Run:
    """Return a run of the experts of one layer of a copy, or of its exchanges alone."""
    assert terms.experts is not None, "only experts over ranks are run alone"
    if shape.computes:
        tokens = shape.tokens[communicator.rank % len(shape.tokens)]
        return copy.run_experts(tokens, to_first=shape.to_first)
    return ExchangeRun(probes.expert_group, terms.experts.bytes_moved(shape), device)


def _key(layers: Layers) -> frozenset[object]:
    """Return what tells copies apart."""
    return frozenset(layers.items())


# ---- timing


def median_seconds(
    runs: Sequence[Run], communicator: Communicator, device: torch.device, rounds: int
) -> list[list[float]]:
    """Time `runs` on every rank: [run][rank] median seconds. Collective over the world."""
    timed: list[list[float]] = [[] for _ in runs]  # [run][round]
    for _ in range(rounds + 1):
        for run, seconds in zip(runs, timed, strict=True):
            communicator.cpu_group.gather_ints([0])  # all start together
            _finish(device)
            began = time.perf_counter()
            run()
            _finish(device)
            seconds.append(time.perf_counter() - began)
    medians = [statistics.median(seconds[1:]) for seconds in timed]
    by_rank = communicator.cpu_group.gather_values(medians)  # [rank][run]
    return [list(of_run) for of_run in zip(*by_rank, strict=True)]


def _finish(device: torch.device) -> None:
    """Wait for the work that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ring_overlap(
    communicator: Communicator, bytes_moved: int, *, device: torch.device, rounds: int
) -> float:
    """Measure the share, 0 to 1, of a transfer of `bytes_moved` to the next rank that computation
    of about the same seconds hides. Collective over the world."""
    ranks = range(communicator.world_size)
    ring = RingRun(communicator, ranks, bytes_moved * (len(ranks) - 1), device)
    matrix = torch.ones(MATRIX, MATRIX, device=device)
    products = 1

    def compute() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def transfer() -> None:
        ring.post().wait()

    def both() -> None:
        transfers = ring.post()
        compute()
        transfers.wait()

    def mean_seconds(*runs: Run) -> list[float]:
        return [statistics.mean(s) for s in median_seconds(runs, communicator, device, rounds)]

    one_s, transfer_s = mean_seconds(compute, transfer)
    products = max(1, round(transfer_s / one_s))
    compute_s, transfer_s, both_s = mean_seconds(compute, transfer, both)
    hidden = (compute_s + transfer_s - both_s) / min(compute_s, transfer_s)
    return min(max(hidden, 0.0), 1.0)


def measured_nics(
    communicator: Communicator, estimate: CostModel, *, device: torch.device, rounds: int
) -> tuple[int, float]:
    """Count the links between nodes that a node's ranks have, and time a transfer of one byte.

    A node's ranks that send all together take as many times as long as one of them alone as there
    are ranks to a link. Returns (links, seconds). estimate: how fast they are, about. Collective
    over the world; for two nodes and more.
    """
    bandwidth = estimate.bandwidth(communicator.world_size, True)
    bytes_moved = min(int(HOP_S * bandwidth), MOST_HOP_BYTES)
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


def host_rates(
    communicator: Communicator, *, device: torch.device, rounds: int
) -> tuple[float, float]:
    """Measure the bytes/s of a rank to the memory of its host, and from it: of the slowest rank,
    while all copy. Collective over the world."""
    runs = [HostCopyRun(HOST_COPY_BYTES, device, out=out) for out in (True, False)]
    out_s, back_s = map(max, median_seconds(runs, communicator, device, rounds))
    return HOST_COPY_BYTES / out_s, HOST_COPY_BYTES / back_s


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
