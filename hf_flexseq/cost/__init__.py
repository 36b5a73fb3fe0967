"""Costs of work: seconds and bytes of sequences on groups of ranks. Costs of chunks on pipeline
stages are in `hf_flexseq/pipeline/planning/`.

    constants.py       the numbers of a cost model: their meaning, checks and JSON
    kernels.py         attention calls by the lengths of their sequences
    model.py           CostModel: the terms of one sequence on one group
    evaluate.py        groups, micro-batches and steps by a cost model
    terms.py           the terms of a micro-batch, and models with other numbers behind them
    activations.py     a rank's activation bytes in a micro-batch, by the choice for them
    choices.py         cost models under other choices than the user's own; the ladder of choices
    peak.py            bytes per token by the peak that a device has reported
    tower.py           images in a vision tower
    experts.py         layers with experts on several ranks
    sharding.py        FSDP2's trips in a micro-batch, and the policies that a step can afford
    shapes.py          a model's figures
    devices.py         a device's figures
    analytic_model.py  cost models from both
    presets.py         cost models by name
    correction.py      their correction by measured seconds of steps
"""

from hf_flexseq.cost.evaluate import (
    experts_ns,
    free_ns,
    group_ns,
    groups_ns,
    lockstep_ns,
    step_ns,
)
from hf_flexseq.cost.kernels import FloatArray
from hf_flexseq.cost.model import (
    ATTENTION_BACKWARD,
    WIDEST_WITHIN_A_NODE,
    CostModel,
    Int64Array,
    Waits,
    nodes_spanned,
)

__all__ = [
    "ATTENTION_BACKWARD",
    "WIDEST_WITHIN_A_NODE",
    "CostModel",
    "FloatArray",
    "Int64Array",
    "Waits",
    "experts_ns",
    "free_ns",
    "group_ns",
    "groups_ns",
    "lockstep_ns",
    "nodes_spanned",
    "step_ns",
]
