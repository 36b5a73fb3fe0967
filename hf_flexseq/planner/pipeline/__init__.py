"""Deciding for pipelines: `make_pipeline_plan` plans one pipeline, `replicas.make_step_plan`
several.

    pipeline_plan    `make_pipeline_plan`: arguments, limits, the plan
    auto_schedule    our own schedule; greedy plays a step of it
    fixed_orders     1F1B and Seq1F1B
    pack, cuts       sequences into units of chunks
    replicas         a step over several pipelines
    units            the types that all of these share
"""

from hf_flexseq.planner.pipeline.pipeline_plan import make_pipeline_plan
from hf_flexseq.planner.pipeline.units import PipelineOptions

__all__ = ["PipelineOptions", "make_pipeline_plan"]
