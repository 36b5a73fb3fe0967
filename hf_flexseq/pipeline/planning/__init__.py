"""Deciding for pipelines: `make_pipeline_plan` plans one pipeline, `replicas.make_step_plan`
several.

    plan, step_plan  plans as data: of one pipeline, of a step over several
    make             `make_pipeline_plan`: arguments, limits, the plan
    auto_schedule    our own schedule; greedy plays a step of it
    fixed_orders     1F1B and Seq1F1B
    pack, cuts       sequences into units of chunks
    replicas         a step over several pipelines
    units            the types that all of these share
    stage_cost       nanoseconds and bytes of a chunk on a stage
    walk             when the actions of a plan happen, and whether they can
    job              a plan asked for by the planning process
    timeline         a plan in pictures
"""

from hf_flexseq.pipeline.planning.make import make_pipeline_plan
from hf_flexseq.pipeline.planning.units import PipelineOptions

__all__ = ["PipelineOptions", "make_pipeline_plan"]
