"""The passes that planners add to their plans, found by name (`program/passes.py`)."""

from importlib import import_module

from hf_flexseq.cost import CostModel
from hf_flexseq.program.passes import PlanPasses
from hf_flexseq.topology import Topology

# By planner, the `module:class` of its passes.
PASSES = {"zeppelin": "hf_flexseq.published.zeppelin.passes:ZeppelinPasses"}


def passes_of(
    planner: str, cost: CostModel, topology: Topology, *, lockstep: bool
) -> PlanPasses | None:
    """Return the passes of a planner; None if it has none.

    lockstep: True if all ranks run every micro-batch together.
    """
    if planner not in PASSES:
        return None
    module, name = PASSES[planner].split(":")
    passes: PlanPasses = getattr(import_module(module), name)(cost, topology, lockstep=lockstep)
    return passes
