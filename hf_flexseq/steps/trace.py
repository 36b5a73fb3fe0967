"""What a step was planned to cost and what it cost, for the log and the plan trace."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_flexseq.cost import CostModel
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.control import gather_objects
from hf_flexseq.plan import Plan
from hf_flexseq.steps.step import OptimizerStep

PREFIX = "flexseq/"


class PlanTrace:
    """A JSONL file with one line per step: the plan, the cost model's digest, and the measured
    seconds."""

    def __init__(self, path: str | None, communicator: Communicator) -> None:
        self.communicator = communicator
        self.path = Path(path) if path and communicator.rank == 0 else None
        # of the one model that all steps share
        self._digest = functools.lru_cache(maxsize=1)(CostModel.digest)

    def record(self, step: OptimizerStep, cost: CostModel) -> dict[str, float]:
        """Gather the ranks' measurements, write the trace, and return the figures to log.
        Collective."""
        by_rank = gather_objects(self.communicator, step.measured_s())
        measured = [max(seconds) for seconds in zip(*by_rank, strict=True)]
        slowest = max(sum(seconds) for seconds in by_rank)
        line = {"step": step.number, "cost_model": self._digest(cost), "measured_s": measured}
        self.append(line, step.plan)
        return step_figures(step, slowest, self.communicator.world_size)

    def append(self, line: dict[str, Any], plan: Any) -> None:
        """Write `line`, joined with the plan's record, where there is a trace and this is rank
        0."""
        if self.path is None:
            return
        line = line | plan.to_record()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def step_figures(step: OptimizerStep, measured_s: float, world_size: int) -> dict[str, float]:
    """The figures of one step under their names in the log."""
    figures = {
        "micro_batches": len(step.plan.micro_batches),
        "imbalance": imbalance(step.plan, world_size),
        "predicted_s": step.plan.objective_s,
        "lower_bound_s": step.plan.lower_bound_s,
        "measured_s": measured_s,
        "planning_ms_exposed": 1e3 * step.waited_s,
        "tokens_per_s": step.tokens / measured_s if measured_s else 0.0,
    }
    figures |= {f"groups_of_{degree}": count for degree, count in step.plan.degrees().items()}
    return {PREFIX + name: float(value) for name, value in figures.items()}


def mean_figures(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every figure over some steps; a degree that a step does not use counts as 0
    groups."""
    names = dict.fromkeys(name for figures in steps for name in figures)
    return {name: sum(figures.get(name, 0.0) for figures in steps) / len(steps) for name in names}


def imbalance(plan: Plan, world_size: int) -> float:
    """Tokens of the fullest rank over those of the mean rank, summed over micro-batches; 1 is
    perfect."""
    fullest = sum(max(mb.tokens_per_rank(plan.lengths, world_size)) for mb in plan.micro_batches)
    return fullest * world_size / sum(plan.lengths)


def plan_line(figures: dict[str, float]) -> str:
    """One step in one line, for people."""
    value = {
        name.removeprefix(PREFIX): figure
        for name, figure in figures.items()
        if name.startswith(PREFIX)
    }
    return (
        f"{_work_line(value)}, predicted {value['predicted_s']:.3f} s, measured "
        f"{value['measured_s']:.3f} s, "
        f"{value['tokens_per_s']:,.0f} tokens/s"
    )


def _work_line(value: dict[str, float]) -> str:
    """What was planned: chunks through a pipeline, or groups in micro-batches."""
    if "chunks" in value:
        return f"{value['chunks']:g} chunk(s) through {value['stages']:g} stages"
    groups = " + ".join(
        f"{count:g} x degree {name.removeprefix('groups_of_')}"
        for name, count in value.items()
        if name.startswith("groups_of_")
    )
    return f"{groups} in {value['micro_batches']:g} micro-batch(es)"
