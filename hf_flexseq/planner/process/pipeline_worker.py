"""Planning of pipelined steps in a process of its own; the protocol is that of
`hf_flexseq.planner.process.worker`, but for the first line: {"cost": {...}, "options": {...}}, the
fields of a PipelineCost and options of make_step_plan."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.planner.pipeline.replicas import make_step_plan
from hf_flexseq.planner.process.client import PlannerWorker
from hf_flexseq.planner.process.worker import serve


class PipelineWorker(PlannerWorker):
    """The training process's end."""

    MODULE = "hf_flexseq.planner.process.pipeline_worker"
    PLAN = StepPlan

    def __init__(self, cost: PipelineCost, **options: Any) -> None:
        self._start({"cost": cost.to_record(), "options": options})


def make_planner(configuration: dict[str, Any]) -> Callable[[list[int]], StepPlan]:
    """The planner that the first line asks for."""
    cost = PipelineCost.from_record(configuration["cost"])
    return partial(make_step_plan, cost=cost, **configuration["options"])


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout, make_planner)
