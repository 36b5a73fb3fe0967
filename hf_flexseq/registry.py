"""Strategies by name: the one place that knows the published systems.

    RINGS    how ranks hand keys and values round: `plan.rings`, and their costs: `cost.rings`

Objects are dotted names that are imported when they are first asked for. So the core imports no
published system (an import contract holds this).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# How the ranks of a group share the attention of a sequence. attention/ runs them, plan/shard.py
# says which tokens each rank holds.
STRATEGIES = (
    "local",  # one rank, no sharing
    "ulysses",  # tokens are exchanged for heads: each rank attends with some heads to all tokens
    "zigzag",  # a ring: keys and values go round, each rank has a front and a back chunk
    "balanced",  # LightSeq's ring: ranks that are done help those with more keys to see
    "hybrid",  # Ulysses inside nodes, a ring across them
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingEntry:
    """A ring among the strategies."""

    ring: str
    """`module:name` of its `plan.rings.Ring`: chunks and calls."""
    costs: str
    """`module:name` of its `cost.rings.RingCosts`: traffic and launches."""


RINGS: Mapping[str, RingEntry] = {
    "zigzag": RingEntry(
        ring="hf_flexseq.plan.rings:ZIGZAG",
        costs="hf_flexseq.cost.rings:ZIGZAG",
    ),
    "balanced": RingEntry(
        ring="hf_flexseq.published.lightseq.balanced:RING",
        costs="hf_flexseq.published.lightseq.balanced:COSTS",
    ),
}


def object_of(dotted: str) -> Any:
    """Return the object named `module:name`."""
    module, name = dotted.split(":")
    return getattr(import_module(module), name)
