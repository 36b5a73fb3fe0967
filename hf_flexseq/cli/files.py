"""Plans in and out of files."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.plan import Plan
from hf_flexseq.plan.pipeline import PipelinePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A step of a file."""

    number: int
    """Number of the step, as counted by the training run, or else its index in the file."""
    plan: Plan | PipelinePlan
    measured_s: tuple[float, ...] | None
    """Seconds of each micro-batch, or of a pipeline's whole step; None where nobody ran it."""
    cost: PipelineCost | None = None
    """Cost of the pipeline's stages, where the file has it."""


def read_steps(path: str) -> list[PlannedStep]:
    """Return the steps in a file of one plan (JSON) or of several (JSON lines, a plan trace).

    path: of the file; `-` is stdin. Raises ValueError, naming the file, for anything else.
    """
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    try:
        steps = [_step(index, record) for index, record in enumerate(_records(text))]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not steps:
        raise ValueError(f"{path}: holds no plan")
    return steps


def write_plans(path: str, plans: Sequence[Plan]) -> None:
    """Write one plan as JSON, several as JSON lines.

    path: of the file; `-` is stdout.
    """
    text = "".join(plan.to_json() + "\n" for plan in plans)
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _records(text: str) -> list[Any]:
    """Return the JSON value in `text`, spread over lines or not, or one value per line."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _step(index: int, record: Any) -> PlannedStep:
    """Return the step of one record; `index` counts records."""
    if isinstance(record, dict) and "actions" in record:
        return _pipeline_step(index, record)
    plan = Plan.from_record(record)
    measured = record.get("measured_s")
    if measured is not None and len(measured) != len(plan.micro_batches):
        raise ValueError(
            f"step {index} has {len(plan.micro_batches)} micro-batches, "
            f"{len(measured)} of them measured"
        )
    return PlannedStep(
        number=record.get("step", index),
        plan=plan,
        measured_s=None if measured is None else tuple(measured),
    )


def _pipeline_step(index: int, record: dict[str, Any]) -> PlannedStep:
    """Return the step of a record that holds a pipeline's actions."""
    measured, cost = record.get("measured_s"), record.get("pipeline_cost")
    return PlannedStep(
        number=record.get("step", index),
        plan=PipelinePlan.from_record(record),
        measured_s=None if measured is None else tuple(measured),
        cost=None if cost is None else PipelineCost.from_record(cost),
    )
