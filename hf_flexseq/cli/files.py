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
    """A step of a file. number: the step's, counted by its file or by the training run. plan: of
    groups, or of a pipeline. measured_s: of each micro-batch, or of the whole step, None where
    nobody ran it. cost: of the pipeline's stages, where the file says it."""

    number: int
    plan: Plan | PipelinePlan
    measured_s: tuple[float, ...] | None
    cost: PipelineCost | None = None


def read_steps(path: str) -> list[PlannedStep]:
    """The plans in a JSON file, or in JSON lines; of a plan trace with their measurements. `-` is
    stdin."""
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    try:
        steps = [_step(index, record) for index, record in enumerate(_records(text))]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not steps:
        raise ValueError(f"{path}: holds no plan")
    return steps


def write_plans(path: str, plans: Sequence[Plan]) -> None:
    """One plan as JSON, several as JSON lines. `-` is stdout."""
    text = "".join(plan.to_json() + "\n" for plan in plans)
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _records(text: str) -> list[Any]:
    """The JSON value in `text`, spread over lines or not, or one value per line."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _step(index: int, record: Any) -> PlannedStep:
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
    measured, cost = record.get("measured_s"), record.get("pipeline_cost")
    return PlannedStep(
        number=record.get("step", index),
        plan=PipelinePlan.from_record(record),
        measured_s=None if measured is None else tuple(measured),
        cost=None if cost is None else PipelineCost.from_record(cost),
    )
