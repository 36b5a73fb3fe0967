"""Measure what training a model costs on this machine, and fit a `CostModel` to it.

1. design.py decides what is run.
2. measure.py runs it on all ranks, with copies of the model from the caller's `ProbeFactory`.
3. fit.py turns the seconds into constants, on rank 0, and measures their error on other
   micro-batches.

Bytes per token and memory stay those of the estimate: they are arithmetic, not measurements. So
does whether the device hides what the host does, and the seconds of a first message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.activations import Activations
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.profiler.design import Effort, make_design
from hf_flexseq.profiler.fit import ExpertTerms, Terms, fit, price, relative_errors
from hf_flexseq.profiler.measure import ProbeFactory, device_name, measure
from hf_flexseq.profiler.tower_runs import tower_errors

MAX_ERROR = 0.5  # mean relative error on other micro-batches above which a fit makes no sense


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A fitted cost model and how well it holds."""

    cost: CostModel
    errors: tuple[float, ...]
    """|predicted - measured| / measured of each micro-batch held out of the fit."""
    tokens: int
    """Tokens of a rank in the largest micro-batch of the deepest copy."""
    tower_errors: tuple[float, ...] = ()
    """The same of each run of the tower that was held out; none where it was not timed."""

    @property
    def median_error(self) -> float:
        """Median of the errors."""
        return float(np.median(self.errors))

    def objection(self) -> str | None:
        """Return why the fit makes no sense, or None if it does."""
        attention_s = self.cost.attention_s + sum(kind.attention_s for kind in self.cost.kinds)
        if self.cost.attention_share and not attention_s > 0:
            return "attention takes no measurable time"
        for kind in self.cost.recurrent:
            # A convolution takes so little that it may fit as nothing.
            if kind.kind != "convolution" and not kind.token_s > 0:
                return f"{kind.kind} layers take no measurable time"
        if self.cost.experts is not None and not self.cost.experts.token_s > 0:
            return "experts take no measurable time"
        if self.tower_errors:
            assert self.cost.tower is not None, "a tower was timed"
            if not self.cost.tower.patch_s + self.cost.tower.pair_s > 0:
                return "the vision tower takes no measurable time"
            mean = float(np.mean(self.tower_errors))
            if not mean <= MAX_ERROR:
                return f"images held out of the fit are off by {mean:.0%} on average"
        mean = float(np.mean(self.errors))
        if not mean <= MAX_ERROR:
            return f"micro-batches held out of the fit are off by {mean:.0%} on average"
        return None

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values: the cost model and how far it is off."""
        record: dict[str, Any] = {
            "cost_model": self.cost.to_record(),
            "hold_out": {"median": self.median_error, "errors": list(self.errors)},
            "tokens": self.tokens,
        }
        if self.tower_errors:
            record["hold_out"]["tower"] = list(self.tower_errors)
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Calibration":
        """Return the calibration whose `to_record` this is."""
        return cls(
            cost=CostModel.from_record(record["cost_model"]),
            errors=tuple(record["hold_out"]["errors"]),
            tokens=record["tokens"],
            tower_errors=tuple(record["hold_out"].get("tower", ())),
        )


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
    model = probes.layers
    sizes = _image_sizes(probes, communicator)
    design = make_design(model, shape, estimate, topology, effort, image_sizes=sizes)
    terms = Terms.of(
        estimate, shape, _expert_terms(estimate, probes), one_image_size=len(sizes) == 1
    )
    timings = measure(design, probes, terms, communicator, device=device, rounds=effort.rounds)

    images = design.images if timings.image_seconds else ()

    def fitted() -> Calibration:
        seconds = fit(timings.samples, terms)
        measured = replace(
            estimate,
            name=f"measured-{device_name(device)}",
            ring_overlap=timings.overlap,
            all_to_all_overlap=timings.overlap,
            nics_per_node=timings.nics_per_node,
            transfer_s=timings.transfer_s,
            activations=_with_rates(estimate.activations, *timings.host_rates),
        )
        copy = _evenly(price(seconds, measured, model, design.copies[0], terms.experts))
        return Calibration(
            cost=price(seconds, measured, model, model, terms.experts),
            errors=relative_errors(copy, design.mixes, timings.mix_seconds, topology),
            tokens=design.tokens,
            tower_errors=tower_errors(copy, images, timings.image_seconds),
        )

    return _on_rank_0(fitted, communicator)


def _image_sizes(probes: ProbeFactory, communicator: Communicator) -> Sequence[int]:
    """Return the patches of the images that the tower can be run on, on all ranks; none where it
    cannot be run on one of them. Collective."""
    of_ranks = communicator.cpu_group.gather_values(list(probes.image_sizes))
    return of_ranks[0] if all(sizes == of_ranks[0] for sizes in of_ranks) else ()


def _expert_terms(estimate: CostModel, probes: ProbeFactory) -> ExpertTerms | None:
    """Return the terms of a model's experts; None where every rank computes its own."""
    if estimate.experts is None:
        return None
    layers = probes.expert_layers(probes.layers)
    return ExpertTerms(
        ranks=estimate.experts.ranks,
        layer_bytes=estimate.experts.exchanged_bytes / layers,
        layers_of=probes.expert_layers,
    )


def _evenly(cost: CostModel) -> CostModel:
    """Return the cost model of a copy, whose tokens go to all experts alike."""
    if cost.experts is None:
        return cost
    return replace(cost, experts=replace(cost.experts, imbalance=1.0))


def _with_rates(
    activations: Activations | None, out_rate: float, back_rate: float
) -> Activations | None:
    """Return activations with these bytes/s of a rank to its host and from it."""
    if activations is None:
        return None
    return replace(activations, out_rate=out_rate, back_rate=back_rate)


def _on_rank_0(function: Callable[[], Calibration], communicator: Communicator) -> Calibration:
    """Call `function` on rank 0, and return or raise its result on all ranks.

    Least squares may differ in their last bits between machines.
    """
    record, problem = None, ""
    if communicator.rank == 0:
        try:
            record = function().to_record()
        except ValueError as error:
            problem = str(error)
    record, problem = communicator.cpu_group.broadcast_value((record, problem))
    if record is None:
        raise ValueError(problem)
    return Calibration.from_record(record)
