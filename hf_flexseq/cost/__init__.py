"""Costs of work: seconds and bytes of sequences on groups of ranks, and of chunks on pipeline
stages.

    model.py      CostModel: one sequence on one group
    constants.py  its constants: their meaning, checks and JSON
    transfers.py  what a group moves, and at what pace
    kinds.py      layers that read a window or a chunk: their pairs and halos
    recurrent.py  layers that scan: their second pass, summaries and halos
    evaluate.py   groups, micro-batches and steps by a cost model
    rings.py      what rings move and launch, by name
    launches.py   what the host does for a group in one layer, counted
    activations.py  what a rank holds of a micro-batch's activations, by the choice made for them
    choices.py    cost models under other choices than the user's own
    tower.py      images in a vision tower
    stages.py     chunks on the stages of a pipeline
    experts.py    layers whose experts lie on several ranks
    sharding.py   FSDP2's trips in a micro-batch, and the policies that a step can afford
    shapes.py     a model's figures
    devices.py    a device's figures
    analytic.py   cost models from both
    presets.py    cost models by name
    terms.py      the terms that seconds are a sum of
    online.py     their correction by what steps take
"""

from hf_flexseq.cost.constants import PIECE_ROWS
from hf_flexseq.cost.evaluate import (
    GroupKind,
    experts_ns,
    free_ns,
    group_ns,
    groups_ns,
    kinds_ns,
    linear_ns,
    lockstep_ns,
    rank_ns,
    slowest_ns,
    step_ns,
)
from hf_flexseq.cost.kinds import FloatArray
from hf_flexseq.cost.model import (
    ATTENTION_BACKWARD,
    CostModel,
    Int64Array,
    Waits,
)
from hf_flexseq.cost.transfers import (
    HEAD_PIECES,
    WIDEST_WITHIN_A_NODE,
    nodes_spanned,
)

__all__ = [
    "ATTENTION_BACKWARD",
    "HEAD_PIECES",
    "PIECE_ROWS",
    "WIDEST_WITHIN_A_NODE",
    "CostModel",
    "FloatArray",
    "GroupKind",
    "Int64Array",
    "Waits",
    "experts_ns",
    "free_ns",
    "group_ns",
    "groups_ns",
    "kinds_ns",
    "linear_ns",
    "lockstep_ns",
    "nodes_spanned",
    "rank_ns",
    "slowest_ns",
    "step_ns",
]
