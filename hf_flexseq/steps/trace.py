"""Planned and measured costs of a step, for the log and the plan trace.

The figures of a step are numbers by name. The Trainer's log has the figures in `LOGGED`, with
`PREFIX` in front of each name. The plan trace is a JSONL file: a line has the plan, the cost
model's digest, the measured seconds, and the seconds that training waited for the plan.
`trace_file.py` writes it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hf_flexseq.cost import CostModel, FloatArray
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan.images import TowerLoad
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.trace_file import TraceFile

PREFIX = "flexseq/"
SPARED = "tokens_spared"
IMAGES, IMAGE_IMBALANCE = "images", "image_imbalance"
LOGGED = ("micro_batches", "measured_s", "tokens_per_s", SPARED, IMAGES, IMAGE_IMBALANCE)

# Beginnings of names: then comes a degree, or the words of a choice for memory.
GROUPS_OF, CHOSEN = "groups_of_", "chosen: "

LogFigures = dict[str, float]


class Learned(NamedTuple):
    """Figures of a step from which a cost model has learned."""

    sync: str
    """How the ranks wait for each other, in lockstep or free."""
    meetings_s: Sequence[Sequence[float]]
    """Seconds of the ranks that wait for each other, by micro-batch (`cost/correction.py`); on
    rank 0 alone."""
    tower_s: float
    """Seconds that the estimate has for the step's images."""
    predicted_s: float
    """Seconds of the step by all that was learned before it."""


Learn = Callable[[RankMicroBatches, FloatArray, float], Learned]
"""Takes a step that has run, the seconds that each rank has measured, [world, micro-batches], and
the bytes that devices have held for tokens, divided by the predicted bytes. Collective over the
world."""


class PlanTrace:
    """Gathers the ranks' measurements, and writes them with the plan if a trace is wanted."""

    def __init__(self, path: str | None, communicator: Communicator) -> None:
        """Find out if rank 0 can write the trace to `path`, if any. Collective over the world.
        Raises ValueError, on all ranks, if not."""
        self.communicator = communicator
        self._file: TraceFile | None = None
        with ErrorCapture() as opening:
            if path is not None and communicator.rank == 0:
                self._file = TraceFile(path)
        opening.raise_on_all_ranks(communicator.cpu_group.gather_values, "opening the plan trace")
        # All steps share one cost model, whose digest takes longer than a line.
        self.digest = functools.lru_cache(maxsize=1)(CostModel.digest)
        """Returns a cost model's digest."""

    def record(
        self, step: RankMicroBatches, cost: CostModel, learn: Learn | None = None
    ) -> LogFigures:
        """Write a finished step's trace; return its figures. Collective over the world. cost: by
        which the step was planned. learn: told of the step; None where nothing is learned."""
        world_size = self.communicator.world_size
        own = [step.peak_share(cost, world_size), *step.measured_s()]
        gathered = self.communicator.cpu_group.gather_values(own)
        found = np.array(gathered, dtype=np.float64)  # [world, 1 + micro-batches]
        peak_share, by_rank = float(found[:, 0].max()), found[:, 1:]
        slowest = float(by_rank.sum(axis=1).max())
        learned = None if learn is None else learn(step, by_rank, peak_share)
        if self.is_written:
            measured = by_rank.max(axis=0).tolist()  # by micro-batch
            line = {
                "cost_model": self.digest(cost),
                "measured_s": measured,
                "waited_s": step.waited_s,
            }
            if peak_share:
                line["peak_share"] = peak_share
            if learned is not None:
                line["learned"] = learned._asdict()
            if step.passes > 1:
                line["passes"] = step.passes
            if step.images is not None:
                line["tower"] = TowerLoad.of(step.images.plan).to_record()
            self.write(step.number, [line | step.plan.to_record()])
        figures = step_figures(step, slowest)
        if learned is not None:
            figures["predicted_s"] = learned.predicted_s
        return figures

    @property
    def is_written(self) -> bool:
        """True on the rank that writes the trace."""
        return self._file is not None

    def write(self, number: int, lines: Sequence[dict[str, Any]]) -> None:
        """Write the lines of a step."""
        if self._file is not None:
            self._file.append(number, lines)


# ---- figures


def step_figures(step: RankMicroBatches, measured_s: float) -> LogFigures:
    """Return the figures of a step in micro-batches. measured_s: seconds of the slowest rank."""
    figures: LogFigures = {
        "micro_batches": len(step.plan.micro_batches),
        "predicted_s": step.plan.objective_s,
        "measured_s": measured_s,
        "tokens_per_s": step.tokens / measured_s if measured_s else 0.0,
        SPARED: step.plan.tokens_spared,
    }
    if step.images is not None:
        images = step.images.plan
        figures[IMAGES] = len(images.owners)
        figures[IMAGE_IMBALANCE] = images.imbalance
        figures["predicted_s"] += images.seconds
    for degree, count in step.plan.degrees().items():
        figures[f"{GROUPS_OF}{degree}"] = count
    for choice, count in step.plan.choices().items():
        figures[f"{CHOSEN}{choice}"] = count
    return figures


def logged_figures(steps: Sequence[LogFigures]) -> LogFigures:
    """Return mean logged figures over some steps by logged name; pipelines lack micro-batches.
    Spared tokens are left out where there are none."""
    means = {}
    for name in LOGGED:
        values = [figures[name] for figures in steps if name in figures]
        if values and (name != SPARED or any(values)):
            means[PREFIX + name] = sum(values) / len(values)
    return means


# ---- one line for people


def plan_line(figures: LogFigures) -> str:
    """Return the figures of a step in one line, for people."""
    line = (
        f"{_work_line(figures)}, predicted {figures['predicted_s']:.3f} s, "
        f"measured {figures['measured_s']:.3f} s, {figures['tokens_per_s']:,.0f} tokens/s"
    )
    for choice, count in _named(figures, CHOSEN).items():
        line = f"{line}; {count:g} micro-batch(es) with {choice}"
    return line


def _work_line(value: LogFigures) -> str:
    """Return a text of the planned work: chunks through a pipeline, or groups in micro-batches."""
    if "chunks" in value:
        return f"{value['chunks']:g} chunk(s) through {value['stages']:g} stages"
    groups = []
    for degree, count in _named(value, GROUPS_OF).items():
        groups.append(f"{count:g} x degree {degree}")
    return f"{' + '.join(groups)} in {value['micro_batches']:g} micro-batch(es)"


def _named(figures: LogFigures, beginning: str) -> dict[str, float]:
    """Return the figures whose names begin so, by the rest of their names."""
    found = {}
    for name, value in figures.items():
        if name.startswith(beginning):
            found[name.removeprefix(beginning)] = value
    return found
