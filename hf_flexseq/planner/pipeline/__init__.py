"""Deciding for pipelines: `make_pipeline_plan` plans one pipeline, `replicas.make_step_plan`
several."""

from hf_flexseq.planner.pipeline.make import SCHEDULES, make_pipeline_plan

__all__ = ["SCHEDULES", "make_pipeline_plan"]
