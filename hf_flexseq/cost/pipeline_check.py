"""Refuse a pipeline's plan that would compute something wrong, hang, or not fit.

form       chunks and lists of actions are legal (`PipelinePlan.check_form`)
deadlock   all actions can happen when neighbours exchange in the order of their lists
           (`walk.py`)
memory     no rank above its bytes
"""

from collections.abc import Sequence

from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.cost.walk import timed, walk
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.plan.replicas import StepPlan


def check(plan: PipelinePlan) -> None:
    """Raise ValueError, naming chunk or action, unless the plan is legal and runs through."""
    plan.check_form()
    for _ in walk(plan):  # raises where neighbours wait for each other
        pass


def check_step(step: StepPlan) -> None:
    """Raise ValueError unless each sequence is on one replica, and all plans are legal and run."""
    step.check_form()
    for plan in step.plans:
        for _ in walk(plan):
            pass


def check_memory(plan: PipelinePlan, cost: PipelineCost, memory_limit: Sequence[int]) -> None:
    """Raise ValueError, naming the action, if a rank holds more than its `memory_limit` bytes."""
    for done in timed(plan, cost):
        if done.held > memory_limit[done.rank]:
            raise ValueError(
                f"{done.action}: rank {done.rank} holds {done.held} bytes, the limit is "
                f"{memory_limit[done.rank]}"
            )
