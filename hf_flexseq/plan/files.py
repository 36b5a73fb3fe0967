"""Files of plans: one plan as JSON, several as JSON lines, or a plan trace.

A line of a trace is a plan with more keys: the step's number, its measured seconds, and others.
Values and form of every plan are checked.

A killed run may leave a torn line. Broken lines are skipped with a remark.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from hf_flexseq.base.reading import Limits, parse_json, read_text
from hf_flexseq.base.registry import PIPELINE_PLAN, object_of
from hf_flexseq.base.values import MAX_SECONDS, duration, in_errors, items, one_line, quoted, whole
from hf_flexseq.plan.images import TowerLoad
from hf_flexseq.plan.sequences import Plan

# Broken lines named in a message.
LINES_NAMED = 5


class PlanOfStages(Protocol):
    """A plan of chunks through the stages of a pipeline, as files and pictures know it."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""

    @property
    def stages(self) -> int:
        """Number of stages."""

    @property
    def how(self) -> str:
        """The chunks and stages, in words."""

    @property
    def schedule(self) -> str:
        """Name of the schedule that made the plan."""

    @property
    def objective_s(self) -> float:
        """Predicted seconds of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A step of a file."""

    number: int
    """Number of the step in the training run, or else its index in the file."""
    plan: Plan | PlanOfStages
    measured_s: tuple[float, ...] | None
    """Seconds of each micro-batch, or of a pipeline's whole step; None if unknown."""
    cost: dict[str, Any] | None = None
    """Cost record of the pipeline's stages; None if the file has none."""
    replica: int = 0
    """Index of the pipeline replica that runs the plan."""
    passes: int = 1
    """Number of times that the step's micro-batches ran."""
    waited_s: float | None = None
    """Seconds that training waited for the plan; None if unknown."""
    tower: TowerLoad | None = None
    """The tower's work for the step's images; None without images."""
    learned: dict[str, Any] | None = None
    """Figures of the step from which a cost model learns (`cost/correction.py`); None if the file
    has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsFile:
    """The steps of a file, and its broken lines."""

    steps: list[RecordedStep]
    """The steps, in the order of the file; at least one."""
    broken: list[tuple[int, str]]
    """(number, problem) of each line that is not a step."""

    def step(self, index: int) -> RecordedStep:
        """Return the step with this index. Raises ValueError if the file has fewer."""
        if index >= len(self.steps):
            raise ValueError(f"expected --step below {len(self.steps)}, got {index}")
        return self.steps[index]

    def remark(self) -> str:
        """Return one line about the broken lines, or ""."""
        if not self.broken:
            return ""
        numbers = [str(number) for number, _ in self.broken[:LINES_NAMED]]
        if len(self.broken) > LINES_NAMED:
            numbers.append(f"{len(self.broken) - LINES_NAMED:,} more")
        lines = "line" if len(self.broken) == 1 else "lines"
        number, problem = self.broken[0]
        return (
            f"{lines} {', '.join(numbers)} cannot be read, {len(self.steps):,} can "
            f"(line {number} {problem})"
        )


def read_steps(path: str, limits: Limits) -> StepsFile:
    """Return the steps in a file of one plan (JSON) or of several (JSON lines, a plan trace).

    path: a file; `-` is stdin. Raises ValueError, naming the file, if no step can be read.
    """
    with in_errors(path):
        return parse_steps(read_text(path, limits), limits)


def parse_steps(text: str, limits: Limits) -> StepsFile:
    """Return the steps in the text of a file: one JSON value, spread over lines or not, or one per
    line. Raises ValueError if no step can be read."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError("holds no plan")
    if len(lines) == 1:
        return StepsFile(steps=[_step(0, parse_json(text, limits), limits)], broken=[])
    steps: list[RecordedStep] = []
    broken: list[tuple[int, str]] = []
    for number, line in lines:
        try:
            steps.append(_step(len(steps), parse_json(line, limits), limits))
        except ValueError as error:
            broken.append((number, one_line(str(error))))
            if number == lines[0][0] and line.strip() in ("{", "["):
                break  # one value over many lines
    if steps:
        return StepsFile(steps=steps, broken=broken)
    try:
        record = parse_json(text, limits)
    except ValueError as error:
        number, problem = broken[0]
        raise ValueError(
            f"holds no plan (line {number} {problem}; as a whole it {error})"
        ) from None
    return StepsFile(steps=[_step(0, record, limits)], broken=[])


def _step(index: int, record: Any, limits: Limits) -> RecordedStep:
    """Return the step of one record; `index` counts records."""
    if not isinstance(record, dict):
        raise ValueError(f"not a plan: expected a JSON object, got {type(record).__name__}")
    number = whole("step", record.get("step", index))
    kind: Any = Plan
    if "actions" in record:
        # A word of text becomes a tuple of a dozen times its bytes.
        texts = [line for line in items("actions", record["actions"]) if isinstance(line, str)]
        actions = sum(line.count(" ") + 1 for line in texts)
        limits.refuse_above("work", actions, f"step {number} has {actions:,} actions")
        kind = object_of(PIPELINE_PLAN)
    plan = kind.of_line(record)
    plan.check_form()
    measured = _measured_s(record)
    if isinstance(plan, Plan) and measured is not None:
        count = len(plan.micro_batches)
        if len(measured) != count:
            raise ValueError(
                f"step {number} has {count} micro-batches, {len(measured)} of them measured"
            )
    return RecordedStep(
        number=number,
        plan=plan,
        measured_s=measured,
        cost=_object(record, "pipeline_cost"),
        replica=whole("replica", record.get("replica", 0)),
        passes=whole("passes", record.get("passes", 1), least=1),
        waited_s=_waited_s(record),
        tower=None if record.get("tower") is None else TowerLoad.from_record(record["tower"]),
        learned=_object(record, "learned"),
    )


def _object(record: dict[str, Any], key: str) -> dict[str, Any] | None:
    """Return a JSON object in a record, or None."""
    value = record.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{key}: expected a JSON object, got {type(value).__name__}")
    return value


def _waited_s(record: dict[str, Any]) -> float | None:
    """Return the seconds that training waited for a record's plan, or None."""
    if record.get("waited_s") is None:
        return None
    return duration("waited_s", record["waited_s"])


def _measured_s(record: dict[str, Any]) -> tuple[float, ...] | None:
    """Return the measured seconds in a record, or None."""
    if record.get("measured_s") is None:
        return None
    measured = []
    for index, one in enumerate(items("measured_s", record["measured_s"])):
        measured.append(duration(f"measured_s[{index}]", one))
    if sum(measured) > MAX_SECONDS:
        raise ValueError(
            f"measured_s={quoted(measured)}: a step takes at most {MAX_SECONDS:.0e} s"
        )
    return tuple(measured)
