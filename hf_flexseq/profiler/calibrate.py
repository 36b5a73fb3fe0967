"""Measure what training a model costs on the machine at hand, and fit a `CostModel` to it.

1. design.py decides what is run.
2. measure.py runs it on all ranks, with copies of the model that the caller's `ProbeFactory`
   makes: the profiler itself does not know how a model is built.
3. fit.py turns the seconds into constants, on rank 0, and tells how far they are off on other
   micro-batches.

Bytes per token and memory stay those of the estimate: they are arithmetic, not measurements. So
does whether the device hides what the host does.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.profiler.bench import ProbeFactory
from hf_flexseq.profiler.design import Design, Effort, make_design, timed_bytes
from hf_flexseq.profiler.fit import fit_compute, fit_links, of_depth, relative_errors
from hf_flexseq.profiler.host import HostSeconds, fit_host
from hf_flexseq.profiler.measure import Timings, device_name, measure
from hf_flexseq.topology import Topology

MAX_ERROR = 0.5  # mean relative error on other micro-batches above which a fit makes no sense


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A fitted cost model and how well it holds."""

    cost: CostModel
    errors: tuple[float, ...]
    """|predicted - measured| / measured of each micro-batch held out of the fit."""
    latencies_s: tuple[tuple[int, float], ...]
    """(degree, seconds that the all-to-alls of one layer take whatever they move). The cost model
    has the mean of what is not the host's work."""
    ring_latencies_s: tuple[tuple[int, float], ...]
    """(degree, the same of the transfers of one layer in a ring)."""
    host: HostSeconds
    """What the host takes for launches, posts and messages, in one layer."""
    tokens: int
    """The most tokens that a rank had in one whole micro-batch."""

    @property
    def hold_out_mean(self) -> float:
        """Mean of the errors."""
        return float(np.mean(self.errors))

    @property
    def hold_out_p95(self) -> float:
        """95th percentile of the errors."""
        return float(np.percentile(self.errors, 95))

    def objection(self) -> str | None:
        """Say why the fit makes no sense, or return None when it does."""
        attention_s = self.cost.attention_s + sum(kind.attention_s for kind in self.cost.kinds)
        if self.cost.attention_share and not attention_s > 0:
            return "attention takes no measurable time"
        for kind in self.cost.recurrent:
            # A convolution takes so little that it may fit as nothing.
            if kind.kind != "convolution" and not kind.token_s > 0:
                return f"{kind.kind} layers take no measurable time"
        if not self.hold_out_mean <= MAX_ERROR:
            return (
                f"micro-batches held out of the fit are off by {self.hold_out_mean:.0%} on average"
            )
        return None

    def parts(self) -> dict[str, Any]:
        """Return all fields as plain JSON values; `from_parts` is the inverse."""
        return {
            "cost": self.cost.to_record(),
            "errors": list(self.errors),
            "latencies_s": [list(pair) for pair in self.latencies_s],
            "ring_latencies_s": [list(pair) for pair in self.ring_latencies_s],
            "host": asdict(self.host),
            "tokens": self.tokens,
        }

    @classmethod
    def from_parts(cls, parts: dict[str, Any]) -> "Calibration":
        """Return the calibration whose `parts` these are."""
        return cls(
            cost=CostModel.from_record(parts["cost"]),
            errors=tuple(parts["errors"]),
            latencies_s=tuple((degree, seconds) for degree, seconds in parts["latencies_s"]),
            ring_latencies_s=tuple(
                (degree, seconds) for degree, seconds in parts["ring_latencies_s"]
            ),
            host=HostSeconds(**parts["host"]),
            tokens=parts["tokens"],
        )

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values: the cost model and the figures that say how good it is."""
        return {
            "cost_model": self.cost.to_record(),
            "hold_out": {
                "mean": self.hold_out_mean,
                "p95": self.hold_out_p95,
                "micro_batches": len(self.errors),
            },
            "latencies_s": [list(pair) for pair in self.latencies_s],
            "ring_latencies_s": [list(pair) for pair in self.ring_latencies_s],
            "host": asdict(self.host),
            "tokens": self.tokens,
        }


def calibrate(
    probes: ProbeFactory,
    shape: ModelShape,
    estimate: CostModel,
    communicator: Communicator,
    *,
    device: torch.device,
    effort: Effort,
) -> Calibration:
    """Time copies of a model, and return `estimate` with the constants that were fitted to them.

    shape: sizes of the whole model. estimate: its cost model, for the communicator's topology.
    Collective; the result is the same on every rank. Raises ValueError, on all ranks, when the
    timings allow no fit at all.
    """
    topology = communicator.topology
    design = make_design(shape, estimate, topology, effort)
    timings = measure(
        design, probes, shape, estimate, communicator, device=device, rounds=effort.rounds
    )

    def fit() -> Calibration:
        return _fit(design, timings, shape, estimate, topology, name=device_name(device))

    return _on_rank_0(fit, communicator)


def _fit(
    design: Design,
    timings: Timings,
    shape: ModelShape,
    estimate: CostModel,
    topology: Topology,
    *,
    name: str,
) -> Calibration:
    """Fit the constants for the whole model, and test them on the mixes. name: of the device."""
    # 1. constants of one layer and of everything around the layers
    one_layer = [kind.one_layer(shape.layers) for kind in estimate.recurrent]
    compute = fit_compute(timings.samples, one_layer)
    links = fit_links(
        timings.samples, estimate, moved=timed_bytes(estimate, shape), overlap=timings.overlap
    )
    host = fit_host(timings.small, HostSeconds.of(estimate, shape.layers))

    # 2. the mixes, as predicted for the deepest copy, which ran them
    depth = max(design.depths)
    number = design.depths.index(depth)
    mixers = design.mixers[number]
    copy = of_depth(estimate, shape.layers, depth, without_attention=mixers.without_attention)
    copy = compute.fill(copy, depth, design.reaches[number], mixers)
    copy = host.fill(links.fill(copy, depth, host), depth)
    errors = relative_errors(copy, design.mixes, timings.mix_seconds, topology)

    # 3. the whole model
    cost = compute.fill(estimate, shape.layers, shape.reaches, shape.mixers)
    cost = links.fill(cost, shape.layers, host)
    cost = host.fill(cost, shape.layers)
    contact_s = estimate.contact_s if timings.contact_s is None else timings.contact_s
    cost = replace(
        cost,
        name=f"measured-{name}",
        nics_per_node=timings.nics_per_node,
        transfer_s=timings.transfer_s,
        contact_s=contact_s,
    )
    return Calibration(
        cost=cost,
        errors=errors,
        latencies_s=links.latencies_s,
        ring_latencies_s=links.ring_latencies_s,
        host=host,
        tokens=design.sizes.tokens,
    )


def _on_rank_0(function: Callable[[], Calibration], communicator: Communicator) -> Calibration:
    """Call `function` on rank 0, and return or raise its result on all ranks.

    Least squares may differ in their last bits between machines.
    """
    calibration, problem = None, ""
    if communicator.rank == 0:
        try:
            calibration = function()
        except ValueError as error:
            problem = str(error)
    parts = None if calibration is None else calibration.parts()
    parts, problem = communicator.host.broadcast_value((parts, problem))
    if parts is None:
        raise ValueError(problem)
    return Calibration.from_parts(parts)
