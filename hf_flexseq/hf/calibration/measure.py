"""The cost model of a model on the machine at hand: measured once, and kept for the next run.

Small models are timed whole. Of a larger one, copies with one and with three layers are, which
tells the layers from what is around them. Bytes per token and memory stay those of the estimate:
they are arithmetic, not measurements.
"""

import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.analytic import ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.control import broadcast_object
from hf_flexseq.hf.calibration.probe import Probe, ProbeSpec
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.profiler.design import (
    ProbeLayout,
    ProbeShape,
    alone,
    choose_sizes,
    disjoint_blocks,
    fitting_shapes,
    hold_out_layouts,
)
from hf_flexseq.profiler.fit import Sample, fit_compute, fit_links
from hf_flexseq.profiler.measure import (
    AllToAllRun,
    CountingKernel,
    KernelRun,
    RingRun,
    measured_nics,
    median_seconds,
    ring_overlap,
)
from hf_flexseq.topology import Topology

logger = logging.getLogger(__name__)

SMALL = 50_000_000  # parameters of a model that is timed whole: a copy of it costs nothing
DEPTHS = (1, 3)  # layers of the copies of a larger one
EFFICIENT_HEAD_DIM = 64  # from which on attention takes as long as its arithmetic
# estimated seconds, and size, of a transfer that counts NICs
HOP_S, MOST_HOP_BYTES = 0.01, 1 << 28
MAX_ERROR = 0.5  # mean relative error on other micro-batches above which a fit makes no sense


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured: estimated seconds of all runs, rounds that count, micro-batches held
    out of the fit."""

    budget_s: float = 8.0
    rounds: int = 3
    held_out: int = 4


THOROUGH = Effort(budget_s=40.0, rounds=5, held_out=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A fitted model and how well it holds.

    errors: |predicted - measured| / measured of each micro-batch held out. latencies_s: (degree,
    seconds) that the all-to-alls of one layer take whatever they move, which the cost model leaves
    out. tokens: the most that a rank had in one whole micro-batch.
    """

    cost: CostModel
    errors: tuple[float, ...]
    latencies_s: tuple[tuple[int, float], ...]
    tokens: int

    @property
    def hold_out_mean(self) -> float:
        return float(np.mean(self.errors))

    @property
    def hold_out_p95(self) -> float:
        return float(np.percentile(self.errors, 95))

    def objection(self) -> str | None:
        """Why the fit makes no sense; None when it does."""
        if not self.cost.attention_s > 0:
            return "attention takes no measurable time"
        if not self.hold_out_mean <= MAX_ERROR:
            return (
                f"micro-batches held out of the fit are off by {self.hold_out_mean:.0%} on average"
            )
        return None

    def to_record(self) -> dict[str, Any]:
        """Plain JSON values: the cost model and the figures that say how good it is."""
        return {
            "cost_model": self.cost.to_record(),
            "hold_out": {
                "mean": self.hold_out_mean,
                "p95": self.hold_out_p95,
                "micro_batches": len(self.errors),
            },
            "latencies_s": [list(pair) for pair in self.latencies_s],
            "tokens": self.tokens,
        }


def measure(
    spec: ProbeSpec,
    shape: ModelShape,
    estimate: CostModel,
    communicator: Communicator,
    *,
    device: torch.device,
    effort: Effort,
) -> Calibration:
    """Time copies of the model and fit `estimate`'s constants to them. Collective; the same result
    on every rank.

    Raises ValueError, on all ranks, when the timings allow no fit at all.
    """
    rings = estimate.ring_bytes is not None
    depths = probe_depths(shape)
    sizes = choose_sizes(
        _counted(estimate, shape),
        communicator.topology,
        layers=shape.layers,
        depths=depths,
        rounds=effort.rounds + 1,
        budget_s=effort.budget_s,
    )
    mixes = hold_out_layouts(sizes.tokens, communicator.topology, rings, effort.held_out)
    bench = _Bench(spec, shape, estimate, communicator, device)
    samples, held_out_s = bench.time(
        fitting_shapes(sizes, communicator.topology, rings), mixes, effort.rounds
    )
    shared = rings and communicator.world_size > 1
    overlap = bench.overlap(sizes.sequence, effort.rounds) if shared else estimate.ring_overlap
    nics, transfer_s = _nics(estimate, communicator, device, effort.rounds)

    def fit() -> Calibration:
        compute = fit_compute(samples)
        links = fit_links(samples, estimate, layers=shape.layers, overlap=overlap)
        depth = max(depths)
        part = links.fill(compute.fill(_of_depth(estimate, shape.layers, depth), depth), depth)
        return Calibration(
            cost=replace(
                links.fill(compute.fill(estimate, shape.layers), shape.layers),
                name=f"measured-{device_name(device)}",
                nics_per_node=nics,
                transfer_s=transfer_s,
            ),
            errors=_errors(part, mixes, held_out_s, communicator),
            latencies_s=links.latencies_s,
            tokens=sizes.tokens,
        )

    return _on_rank_0(fit, communicator)


def probe_depths(shape: ModelShape) -> tuple[int, ...]:
    """How many layers the timed copies of a model have."""
    return (shape.layers,) if shape.params <= SMALL or shape.layers <= max(DEPTHS) else DEPTHS


class _Bench:
    """Copies of the model of some depths, and everything that is timed with them."""

    def __init__(
        self,
        spec: ProbeSpec,
        shape: ModelShape,
        estimate: CostModel,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self.spec, self.shape, self.communicator, self.device = spec, shape, communicator, device
        self.probes = {
            layers: Probe(spec, layers, communicator, device) for layers in probe_depths(shape)
        }
        ring_bytes = estimate.ring_bytes or 0.0
        self.bytes_per_token = {
            "ulysses": estimate.all_to_all_bytes / shape.layers,
            "zigzag": ring_bytes / shape.layers,
        }
        self.kernel = choose_kernel(device, spec.compute_dtype, shape.head_dim)
        self.forwards = self._forwards_per_backward()

    def _forwards_per_backward(self) -> int:
        """How often attention runs forward for one backward: checkpointing may repeat it."""
        counting = CountingKernel(self.kernel)
        layout = alone((8,), self.communicator.topology)
        next(iter(self.probes.values())).run(layout, counting)()
        return counting.forwards // counting.backwards

    def _kernel_run(self, tokens: int) -> KernelRun:
        heads = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        options = {
            "forwards": self.forwards,
            "dtype": self.spec.compute_dtype,
            "device": self.device,
        }
        return KernelRun(self.kernel, tokens, heads=heads, **options)

    def _layer_run(self, shape: ProbeShape) -> Callable[[], None]:
        """One layer's attention, or its transfers."""
        if shape.strategy == "kernel":
            return self._kernel_run(*shape.lengths)
        starts, share = (
            disjoint_blocks(self.communicator.topology, shape.degree),
            shape.lengths[0] / shape.degree,
        )
        bytes_per_token = self.bytes_per_token[shape.strategy]
        if shape.strategy == "ulysses":
            moved = int(bytes_per_token * share)
            return AllToAllRun(
                self.communicator, starts, shape.degree, bytes_moved=moved, device=self.device
            )
        moved = int(bytes_per_token * share * (shape.degree - 1))
        return RingRun(
            self.communicator, starts, shape.degree, bytes_moved=moved, device=self.device
        )

    def time(
        self, shapes: Sequence[ProbeShape], mixes: Sequence[ProbeLayout], rounds: int
    ) -> tuple[list[Sample], list[list[float]]]:
        """The timed samples of `shapes`, by every depth, and [mix][rank] seconds of `mixes` by the
        deepest copy."""
        local = [shape for shape in shapes if shape.strategy == "local"]
        todo = [
            (shape, 1, self._layer_run(shape)) for shape in shapes if shape.strategy != "local"
        ]
        for layers, probe in self.probes.items():
            for shape in local:
                layout = alone(shape.lengths, self.communicator.topology)
                todo.append((shape, layers, probe.run(layout, self.kernel)))
        deepest = self.probes[max(self.probes)]
        runs = [run for _, _, run in todo] + [deepest.run(mix, self.kernel) for mix in mixes]
        seconds = median_seconds(runs, self.communicator, self.device, rounds)
        samples = [
            _sample(shape, layers, by_rank, self.communicator.topology)
            for (shape, layers, _), by_rank in zip(todo, seconds, strict=False)
        ]
        return samples, seconds[len(todo) :]

    def overlap(self, tokens: int, rounds: int) -> float:
        """See `ring_overlap`: one layer's attention beside the keys and values of as many
        tokens."""
        moved = int(self.bytes_per_token["zigzag"] * tokens) * (self.communicator.world_size - 1)
        compute = self._kernel_run(tokens)
        return ring_overlap(
            self.communicator, compute, bytes_moved=moved, device=self.device, rounds=rounds
        )


def _nics(
    estimate: CostModel, communicator: Communicator, device: torch.device, rounds: int
) -> tuple[int, float]:
    """See `measured_nics`. On one node there is none to count."""
    topology = communicator.topology
    if topology.nodes == 1:
        return 1, 0.0
    moved = min(int(HOP_S * estimate.bandwidth(topology.world_size, True)), MOST_HOP_BYTES)
    return measured_nics(communicator, bytes_moved=moved, device=device, rounds=rounds)


def _sample(
    shape: ProbeShape, layers: int, by_rank: Sequence[float], topology: Topology
) -> Sample:
    """The mean over the ranks that have such a group."""
    starts = disjoint_blocks(topology, shape.degree)
    seconds = mean(s for start in starts for s in by_rank[start : start + shape.degree])
    return Sample(
        strategy=shape.strategy,
        degree=shape.degree,
        layers=layers,
        lengths=shape.lengths,
        seconds=seconds,
    )


def _counted(estimate: CostModel, shape: ModelShape) -> CostModel:
    """The estimate by which work is counted: small heads take as long as larger ones, exponentials
    being the most."""
    return replace(
        estimate, attention_s=estimate.attention_s * max(1.0, EFFICIENT_HEAD_DIM / shape.head_dim)
    )


def _of_depth(estimate: CostModel, layers: int, depth: int) -> CostModel:
    """The bytes of a model of `depth` layers, from those of one of `layers`."""
    share = depth / layers
    return replace(
        estimate,
        all_to_all_bytes=estimate.all_to_all_bytes * share,
        ring_bytes=None if estimate.ring_bytes is None else estimate.ring_bytes * share,
        query_bytes=estimate.query_bytes * share,
    )


def _errors(
    cost: CostModel,
    mixes: Sequence[ProbeLayout],
    seconds: Sequence[Sequence[float]],
    communicator: Communicator,
) -> tuple[float, ...]:
    """Relative errors of predicted micro-batches; the slowest rank's seconds count."""
    predicted = [
        lockstep_ns(cost, [mix.micro_batch], mix.lengths, communicator.topology)[0] / 1e9
        for mix in mixes
    ]
    return tuple(abs(p - max(s)) / max(s) for p, s in zip(predicted, seconds, strict=True))


def _on_rank_0(function: Callable[[], Calibration], communicator: Communicator) -> Calibration:
    """What it returns or raises there, on all ranks: least squares may differ in their last bits
    between machines."""
    result: Calibration | str | None = None
    if communicator.rank == 0:
        try:
            result = function()
        except ValueError as error:
            result = str(error)
    result = broadcast_object(communicator, result)
    if isinstance(result, Calibration):
        return result
    raise ValueError(result)


def device_name(device: torch.device) -> str:
    """The processor, as it calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
