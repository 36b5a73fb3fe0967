"""A sum over tokens, divided by the targets of the step, that planned steps compute where their
tokens are. A whole model and a model in stages draw such steps alike, and run them differently.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Trainer

from hf_flexseq.hf.engine.dataset_checks import check_first_step
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.evaluation import EvaluationLoss, PlannedBatches
from hf_flexseq.hf.losses.step_loss import StepLoss
from hf_flexseq.steps.logged_loss import StepLosses
from hf_flexseq.steps.step_items import step_items

logger = logging.getLogger(__name__)


class PlannedLoss(StepLoss):
    """Draws planned steps in place of batches, and sums the losses of an evaluation."""

    has_predictions = True

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        super().__init__(trainer, engine)
        self._sum = EvaluationLoss()  # of the evaluation that runs
        self._losses = StepLosses()
        self._had_targets = True

    # ---- training

    def next_batches(
        self, iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return `num_batches` items, of which the last one is the planned step, and the divisor
        of the step's loss, a scalar; no item when no rank has data left. Collective over the
        world."""
        number = self._trainer.state.global_step
        step = self._engine.next_step(iterator, num_batches, first_number=number)
        if number == 0:
            check_first_step(step, self._trainer)
        if step is None:
            return [], None
        if not step.items and self._had_targets:
            self._had_targets = False
            if self._trainer.is_world_process_zero():
                logger.warning(
                    "step %d has no target token (all labels are -100): its loss is 0, where the "
                    "plain Trainer logs NaN; further such steps are not named",
                    number + 1,
                )
        return step_items(step, num_batches), divisor(step.items, device)

    def _note(self, value: torch.Tensor) -> None:
        """Note the loss of a step, a scalar, if the Trainer filters NaN and infinity."""
        if self._trainer.args.logging_nan_inf_filter:
            steps = self._trainer.state.global_step - self._trainer._globalstep_last_logged
            self._losses.add(value, steps=steps)

    def settle(self, logged: torch.Tensor) -> None:
        """Filter NaN and infinity out of the losses of whole steps. Collective over the world."""
        self._losses.settle(logged, self._engine.communicator)

    # ---- evaluation

    @contextmanager
    def evaluating(self, dataloader: Any, *, predicts: bool) -> Iterator[Any]:
        """Surround an evaluation, whose loss is summed anew."""
        self._sum = EvaluationLoss()
        with super().evaluating(dataloader, predicts=predicts) as loader:
            yield loader

    def _evaluation_loader(self, dataloader: Any) -> Any:
        return PlannedBatches(dataloader, self._engine.evaluation_steps)

    def evaluated(self, output: Any, name: str) -> Any:
        """Return the output with the mean loss over all targets. Collective over the world."""
        loss = self._sum.mean(self._engine.communicator)
        return output._replace(metrics=output.metrics | {name: loss})


def divisor(targets: int, device: torch.device) -> torch.Tensor:
    """Return a loss's divisor, a scalar filled on the device: a copy would wait."""
    return torch.full((), max(targets, 1), device=device)
