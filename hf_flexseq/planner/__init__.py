"""Deciding: from the lengths of one optimizer step to its plan. `make_plan` is the entry."""

from hf_flexseq.planner.make import make_plan

__all__ = ["make_plan"]
