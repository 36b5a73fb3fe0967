"""Correct the bytes per token by a device's measured peak in micro-batches that have run.

Bytes of activations are counted or computed before a run. Kernels and code that the count does not
know keep more or less. A device that reports its peak says how much, as a share of the prediction:

    share = (peak - bytes allocated before) / (tokens of the rank x bytes per token)

A micro-batch says nothing if little of the memory was to be filled, since buffers that do not grow
with the tokens would count as theirs, nor if it has left much behind, such as the first gradients,
which the peak may have in it. The highest share of all ranks counts: memory has to suffice for the
fullest one.
"""

from dataclasses import replace
from typing import NamedTuple

from hf_flexseq.cost.choices import token_bytes
from hf_flexseq.cost.model import CostModel
from hf_flexseq.plan.memory import MemoryChoice

# Share of the memory beside model states that a micro-batch is predicted to fill, at least.
FULL = 0.25
# Share of the bytes at the peak that a micro-batch leaves behind, at most.
LEFT = 0.1

# Bounds of the correction: beyond them something else than tokens takes the memory.
LEAST_FACTOR, MOST_FACTOR = 0.8, 1.5


class Peak(NamedTuple):
    """Bytes that a device has allocated around one micro-batch."""

    before: int
    """When it began."""
    most: int
    """At its peak."""
    after: int
    """When it had ended."""


def peak_share(
    cost: CostModel, peak: Peak, tokens: int, choice: MemoryChoice | None, world_size: int
) -> float:
    """Return the bytes that a micro-batch has held of a rank's tokens, over those predicted; 0.0
    where it says nothing. choice: for its activations; None as set for the run."""
    predicted = tokens * token_bytes(cost, choice)
    held = peak.most - peak.before
    if predicted < FULL * cost.free_bytes(world_size) or peak.after - peak.before > LEFT * held:
        return 0.0
    return held / predicted


def with_measured_peak(cost: CostModel, share: float) -> CostModel:
    """Return `cost` with the bytes per token that devices have held, under every choice.

    share: the highest one by `peak_share` and this `cost`; 0.0 for none, which changes nothing.
    """
    if share <= 0:
        return cost
    factor = min(MOST_FACTOR, max(LEAST_FACTOR, share))
    return replace(cost, token_bytes=factor * cost.token_bytes)
