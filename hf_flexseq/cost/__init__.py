"""What work costs: seconds and bytes of sequences on groups of ranks, and of chunks on pipeline
stages."""

from hf_flexseq.cost.model import (
    HEAD_PIECES,
    PIECE_ROWS,
    RING_STRATEGIES,
    WIDEST_WITHIN_A_NODE,
    CostModel,
    FloatArray,
    Int64Array,
    free_ns,
    group_ns,
    groups_ns,
    linear_ns,
    lockstep_ns,
    nodes_spanned,
    rank_ns,
    remapped_ns,
    ring_stretch,
    slowest_ns,
    step_ns,
)

__all__ = [
    "HEAD_PIECES",
    "PIECE_ROWS",
    "RING_STRATEGIES",
    "WIDEST_WITHIN_A_NODE",
    "CostModel",
    "FloatArray",
    "Int64Array",
    "free_ns",
    "group_ns",
    "groups_ns",
    "linear_ns",
    "lockstep_ns",
    "nodes_spanned",
    "rank_ns",
    "remapped_ns",
    "ring_stretch",
    "slowest_ns",
    "step_ns",
]
