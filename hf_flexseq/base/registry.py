"""Strategies, planners and pipeline schedules by name: the one place that knows the published
systems.

    STRATEGIES           how the ranks of a group share attention
    RINGS                how ranks exchange keys and values: `plan.rings`
    PLANNERS             functions that form the groups of a step, for `make_plan`
    PIPELINE_SCHEDULES   functions that form chunks and actions, for `make_pipeline_plan`
    PIPELINE_...         objects that take the place of a whole model's where it runs in stages

The options of a run, `make_plan`, the planning process, `compare` and the command line read these
records. Objects are dotted names that are imported on first use. So the core imports neither
published systems (an import contract checks this) nor an unused solver.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hf_flexseq.base.values import one_of

# ---- strategies

# How the ranks of a group share the attention of a sequence. attention/ runs the strategies,
# plan/shard.py defines which tokens each rank holds.
STRATEGIES = (
    "local",  # one rank, no sharing
    "ulysses",  # tokens are exchanged for heads: each rank computes some heads over all tokens
    "zigzag",  # a ring: each rank has a front and a back chunk, keys and values travel
    "balanced",  # LightSeq's ring: ranks that are done help ranks with more keys to read
    "hybrid",  # Ulysses inside nodes, a ring across them
)


# `module:name` of each ring's `plan.rings.Ring`: chunks and calls, traffic and pace.
RINGS: Mapping[str, str] = {
    "zigzag": "hf_flexseq.plan.rings:ZIGZAG",
    "balanced": "hf_flexseq.published.lightseq.balanced_ring:RING",
}


# ---- planners

SOLVER = "highspy"  # module of the MILP solver, an optional dependency


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerEntry:
    """A planner, or a schedule of a pipeline."""

    function: str
    """`module:function` that plans. A planner of groups takes a `PlanTask` and returns
    micro-batches; a schedule takes a `PipelineTask` and returns a `PipelineAnswer`."""
    needs_solver: bool = False
    """True if it needs the solver for integer programs, and seconds per plan."""
    splits: bool = True
    """True if ranks may share a sequence."""
    takes_units: bool = False
    """True if it plans units of rows that share prefixes."""
    takes_choices: bool = False
    """True if its micro-batches may recompute, offload or tile more than is set for the run."""
    stages_per_rank: int = 1
    """Number of pipeline stages per rank."""
    passes: str | None = None
    """`module:class` of the passes over its plans and their programs (`program/passes.py`)."""


PLANNERS: Mapping[str, PlannerEntry] = {
    "auto": PlannerEntry(
        function="hf_flexseq.planner.search.auto:auto_micro_batches",
        takes_units=True,
        takes_choices=True,
    ),
    "static": PlannerEntry(
        function="hf_flexseq.planner.static:static_micro_batches",
        takes_units=True,
        takes_choices=True,
    ),
    "flexsp": PlannerEntry(
        function="hf_flexseq.published.flexsp.planner:flexsp_micro_batches",
        needs_solver=True,
    ),
    "batch-ada": PlannerEntry(
        function="hf_flexseq.published.baselines.batch_ada:batch_ada_micro_batches",
    ),
    "zeppelin": PlannerEntry(
        function="hf_flexseq.published.zeppelin.planner:zeppelin_micro_batches",
        passes="hf_flexseq.published.zeppelin.passes:ZeppelinPasses",
    ),
    "megatron": PlannerEntry(
        function="hf_flexseq.published.baselines.megatron:megatron_micro_batches",
    ),
    "batch-rebalance": PlannerEntry(
        function="hf_flexseq.published.baselines.batch_rebalance:batch_rebalance_micro_batches",
        splits=False,
    ),
}

PIPELINE_SCHEDULES: Mapping[str, PlannerEntry] = {
    "auto": PlannerEntry(function="hf_flexseq.pipeline.planning.auto_schedule:auto_pipeline"),
    "1f1b": PlannerEntry(function="hf_flexseq.pipeline.planning.fixed_orders:whole_pipeline"),
    "seq1f1b": PlannerEntry(function="hf_flexseq.pipeline.planning.fixed_orders:chunked_pipeline"),
    "seq1f1b-i": PlannerEntry(
        function="hf_flexseq.pipeline.planning.fixed_orders:chunked_pipeline",
        stages_per_rank=2,
    ),
    "infinipipe": PlannerEntry(
        function="hf_flexseq.published.infinipipe.planner:infinipipe_pipeline",
        needs_solver=True,
    ),
}


# ---- a model in stages


# By these a pipeline takes the place of a whole model.
# `module:class` of the mixin that comes in front of a trainer's class
PIPELINE_MIXIN = "hf_flexseq.pipeline.trainer.mixin:PipelineMixin"
# `module:class` of a planner's `Job`, of the kind `stages`
PIPELINE_JOB = "hf_flexseq.pipeline.planning.job:StagesJob"
# `module:class` of the plan of one pipeline, as files of plans have it
PIPELINE_PLAN = "hf_flexseq.pipeline.planning.plan:PipelinePlan"
# `module:function` that returns the `Timeline` of such a plan's step
PIPELINE_TIMELINE = "hf_flexseq.pipeline.planning.timeline:timeline_of_step"


# ---- names


def object_of(dotted: str) -> Any:
    """Return the object named `module:name`."""
    module, name = dotted.split(":")
    return getattr(import_module(module), name)


def entry_of(option: str, name: object, entries: Mapping[str, PlannerEntry]) -> PlannerEntry:
    """Return the entry that an option names.

    Raises ValueError for an unknown name, and for a missing solver with the command that installs
    it.
    """
    entry = entries[one_of(option, name, entries)]
    if entry.needs_solver and find_spec(SOLVER) is None:
        raise ValueError(
            f"{option}={name!r} needs {SOLVER}, not installed: "
            f'pip install "hf_flexseq[planner]", or choose another {option}'
        )
    return entry
