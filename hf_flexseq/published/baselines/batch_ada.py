"""A baseline: one degree for all groups of a step, chosen anew for every step.

FlexSP's second baseline, FlexSP-BatchAda (arXiv 2412.01523, section 6.1):

1. For every degree that covers the ranks and has memory for the longest sequence, make the plan
   with that degree for everything: groups, packing and sorting come from `static.py`.
2. Take the plan of least seconds.

The published one tries powers of two; this one tries every degree that covers the ranks.
"""

from dataclasses import replace

from hf_flexseq.cost import step_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.planner.static import static_micro_batches
from hf_flexseq.planner.task import PlanTask


def batch_ada_micro_batches(task: PlanTask) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of the fastest single degree."""
    longest = max(task.lengths)
    best: tuple[MicroBatch, ...] = ()
    least_ns = None
    for degree in task.topology.degrees():
        fits = -(-longest // degree) <= task.cap
        allowed = degree == 1 or task.strategy != "local"
        if not fits or not allowed:
            continue
        plan = static_micro_batches(replace(task, sp_degree=degree))
        nanoseconds = step_ns(task.cost, plan, task.lengths, task.topology, sync=task.sync)
        if least_ns is None or nanoseconds < least_ns:
            best = plan
            least_ns = nanoseconds
    return best
