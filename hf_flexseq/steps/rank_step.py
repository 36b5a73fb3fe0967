"""An optimizer step as one rank runs it: drawn, planned and timed alike, whatever its parts are.
If every rank has the whole model, the parts are micro-batches (`micro_batches.py`).
"""

from typing import Generic, TypeVar

import torch

from hf_flexseq.steps.source_row import PlannedStep
from hf_flexseq.steps.stopwatch import Stopwatch

PlanT = TypeVar("PlanT")


class RankStep(Generic[PlanT]):
    """An optimizer step as one rank runs it: drawn, planned, and timed."""

    def __init__(self, planned: PlannedStep, device: torch.device) -> None:
        """device: runs the step."""
        self.drawn = planned.drawn
        self.number = planned.drawn.number
        self.plan: PlanT = planned.plan  # of the whole step, over all ranks
        self.row = planned.drawn.row  # what this rank itself drew
        self.targets = sum(planned.drawn.targets)  # tokens with a label, over all ranks
        # those of them that the plain Trainer divides a loss in training by
        self.items = self.targets - planned.drawn.counts.uncounted_targets
        self.waited_s = planned.waited_s
        self.stopwatch = Stopwatch(device)
        self.loss: torch.Tensor | None = None  # of this rank, a scalar, as far as it has run
        self.passes = 0  # over the micro-batches so far

    @property
    def tokens(self) -> int:
        """Tokens of the whole step, over all ranks, counted in every row."""
        return sum(self.drawn.lengths)

    @property
    def real_tokens(self) -> int:
        """Tokens of the whole step without virtual ones, over all ranks."""
        return self.tokens - self.row.virtual_tokens * len(self.drawn.lengths)

    @property
    def final_loss(self) -> torch.Tensor:
        """This rank's loss of a step that has run, a scalar."""
        assert self.loss is not None, "every micro-batch has a loss"
        return self.loss

    def begin_ahead(self) -> None:
        """Begin work on this step while the step before it ends; does nothing here."""

    def add(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's loss, a scalar, to the step's."""
        self.loss = loss if self.loss is None else self.loss + loss
