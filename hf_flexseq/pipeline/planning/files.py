"""A pipeline's step in a file of plans."""

from typing import Any

from hf_flexseq.base.reading import Limits
from hf_flexseq.base.values import items, whole
from hf_flexseq.pipeline.planning.plan import PipelinePlan
from hf_flexseq.plan.files import RecordedStep, measured_s, waited_s


def pipeline_step(number: int, record: dict[str, Any], limits: Limits) -> RecordedStep:
    """Return the step of a record that holds a pipeline's actions. Raises ValueError for another
    record."""
    # A word of text becomes a tuple of a dozen times its bytes.
    texts = [line for line in items("actions", record["actions"]) if isinstance(line, str)]
    actions = sum(line.count(" ") + 1 for line in texts)
    limits.refuse_above("work", actions, f"step {number} has {actions:,} actions")
    plan = PipelinePlan.of_line(record)
    plan.check_form()
    cost = record.get("pipeline_cost")
    if cost is not None and not isinstance(cost, dict):
        raise ValueError(f"pipeline_cost: expected a JSON object, got {type(cost).__name__}")
    return RecordedStep(
        number=number,
        plan=plan,
        measured_s=measured_s(record),
        cost=cost,
        replica=whole("replica", record.get("replica", 0)),
        waited_s=waited_s(record),
    )
