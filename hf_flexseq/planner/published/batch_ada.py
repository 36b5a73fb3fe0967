"""A baseline: one degree for all groups of a step, chosen anew for every step.

FlexSP's second baseline, FlexSP-BatchAda (arXiv 2412.01523, section 6.1):

1. For every degree that covers the ranks and has memory for the longest sequence, make the plan
   with that degree for everything: groups, packing and sorting are those of `static.py`.
2. Take the plan of least seconds.

The published one tries powers of two; this one tries every degree that covers the ranks.
"""

from collections.abc import Sequence

from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.plan import MicroBatch
from hf_flexseq.planner.static import static_degrees, static_micro_batches
from hf_flexseq.topology import Topology


def batch_ada_micro_batches(
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    strategy: str,
    cap: int,
    sync: str,
) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of the fastest single degree.

    cap: most tokens of a rank in a micro-batch. Every sequence must fit on all ranks together.
    """
    longest = max(lengths)
    plans = []
    for degree in static_degrees(topology):
        fits = -(-longest // degree) <= cap
        allowed = degree == 1 or strategy != "local"
        if fits and allowed:
            plan = static_micro_batches(
                lengths, topology, cost, degree=degree, strategy=strategy, cap=cap
            )
            plans.append(plan)
    return min(plans, key=lambda plan: step_ns(cost, plan, lengths, topology, sync=sync))
