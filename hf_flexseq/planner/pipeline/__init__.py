"""Deciding for pipelines: `make_pipeline_plan` plans one pipeline, `replicas.make_step_plan`
several.

    make          the schedules' common door: arguments, limits, the plan
    auto          our own schedule; greedy plays a step of it
    infinipipe    InfiniPipe re-created; chunking and checkpointing_milp are its parts
    pack, cuts    sequences into units of chunks
    replicas      a step over several pipelines
    problem       the types that all of these share
"""

from hf_flexseq.planner.pipeline.make import SCHEDULES, make_pipeline_plan

__all__ = ["SCHEDULES", "make_pipeline_plan"]
