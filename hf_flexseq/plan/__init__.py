"""Decisions as frozen data: plans of sequences on groups, and shards.

    groups.py      Group, MicroBatch: which ranks work together on which sequences
    memory.py      MemoryChoice: activations that a micro-batch keeps, offloads or computes again
    sequences.py   Plan: the micro-batches of an optimizer step
    records.py     Record: JSON and digest of every plan
    check.py       check: whether a topology can run a plan of groups
    shard.py       which tokens each rank holds of a micro-batch

Planners make the decisions; this package only stores and checks them.
"""

from hf_flexseq.plan.check import check
from hf_flexseq.plan.groups import Group, MicroBatch, widest_first
from hf_flexseq.plan.sequences import Plan, PlanInfeasible

__all__ = [
    "Group",
    "MicroBatch",
    "Plan",
    "PlanInfeasible",
    "check",
    "widest_first",
]
