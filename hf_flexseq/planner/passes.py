"""The passes that planners add to their plans, by name in the registry (`program/passes.py`)."""

from hf_flexseq.base.registry import PLANNERS, object_of
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.program.passes import PlanPasses


def passes_of(
    planner: str, cost: CostModel, topology: Topology, *, lockstep: bool
) -> PlanPasses | None:
    """Return the passes of a planner; None if it has none.

    lockstep: True if all ranks run every micro-batch together.
    """
    dotted = PLANNERS[planner].passes
    if dotted is None:
        return None
    passes: PlanPasses = object_of(dotted)(cost, topology, lockstep=lockstep)
    return passes
