"""A baseline: one degree for all groups of a step, chosen anew for every step.

FlexSP's second baseline, FlexSP-BatchAda (arXiv 2412.01523, section 6.1): its groups, its packing
and its sorting are those of `static.py`. The published one tries powers of two; this one tries
every degree that covers the ranks.
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
    """The micro-batches of the fastest single degree. Every sequence must fit on all ranks
    together."""
    degrees = [
        d
        for d in static_degrees(topology)
        if -(-max(lengths) // d) <= cap and (d == 1 or strategy != "local")
    ]
    plans = [
        static_micro_batches(lengths, topology, cost, degree=degree, strategy=strategy, cap=cap)
        for degree in degrees
    ]
    return min(plans, key=lambda plan: step_ns(cost, plan, lengths, topology, sync=sync))
