"""An optimizer step before it runs.

    DrawnStep      the sequences that all ranks have drawn
    PlannedStep    these, with their plan
    RankStep       what one rank runs of it, with its tokens (`rank_step.py`)
    StepItem       one of the batches that the Trainer counts (`step_items.py`)

A step is each of these, in this order.
"""

from dataclasses import dataclass
from typing import Any

from hf_flexseq.steps.exchange import SourceRow


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnStep:
    """An optimizer step as drawn, before it is planned."""

    number: int
    """Number of the step among those that run, counted on from the first number."""

    request: int
    """Number by which the planner knows the step. It counts drawn steps that never ran, too."""

    row: SourceRow
    """Sequences that this rank drew, with the columns that the rows of all ranks have."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, of all ranks: by the rank that drew it, then in its order."""

    sources: tuple[int, ...]
    """Rank that drew each sequence."""

    targets: tuple[int, ...]
    """Tokens with a label, of each sequence of all ranks."""

    padding_targets: int = 0
    """Targets next to padding, which were left out, of all ranks."""

    other_rows: int = 0
    """Rows that the user's collator makes differently of a whole batch, of all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """An optimizer step with its plan, before its tokens are dispatched."""

    drawn: DrawnStep

    plan: Any
    """Plan of the whole step, over all ranks."""

    waited_s: float = 0.0
    """Seconds that training waited for the plan."""
