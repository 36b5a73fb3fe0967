"""The loss of a model in stages: the last one sums it over tokens, and the engine runs steps."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.hf.engine.dataset_checks import check_first_step
from hf_flexseq.hf.engine.evaluation import EvaluationLoss, PlannedBatches
from hf_flexseq.hf.losses.step_loss import Prediction, RunStep, StepLoss, StockPrediction
from hf_flexseq.pipeline.step import RankChunks
from hf_flexseq.pipeline.trainer.engine import PipelineEngine
from hf_flexseq.steps.logged_loss import StepLosses
from hf_flexseq.steps.step_items import StepItem, step_items


class LossOfStages(StepLoss):
    """Runs planned steps of chunks, of which the Trainer's own `training_step` sees nothing."""

    has_predictions = True  # which are refused
    lockstep = False
    _engine: PipelineEngine

    def __init__(self, trainer: Trainer, engine: PipelineEngine) -> None:
        super().__init__(trainer, engine)
        self._sum = EvaluationLoss()  # of the evaluation that runs
        self._losses = StepLosses()

    def attached(self) -> AbstractContextManager[None]:
        """Return nothing to surround training or an evaluation with."""
        return nullcontext()

    # ---- training

    def next_batches(
        self, iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return `num_batches` items, of which the last one is the planned step, and the step's
        targets, a scalar; no item when no rank has data left. Collective over the world."""
        number = self._trainer.state.global_step
        step = self._engine.next_step(iterator, num_batches, first_number=number)
        if number == 0:
            check_first_step(step, self._trainer)
        if step is None:
            return [], None
        return step_items(step, num_batches), torch.full((), max(step.items, 1), device=device)

    def run_step(self, model: nn.Module, batch: Any, items: Any, run: RunStep) -> torch.Tensor:
        """Run a step at its last item, and return its loss, a scalar; 0 for the items before.
        Collective over the world. run: unused, as the engine runs all of a stage."""
        step = batch.step
        if step is None:
            return torch.zeros((), device=self._trainer.args.device)
        model.train()
        if callable(getattr(self._trainer.optimizer, "train", None)):
            self._trainer.optimizer.train()  # schedule-free optimizers have two modes
        self._engine.run(step, model, is_last=self._is_last_step)
        self._engine.finish(step)
        loss: torch.Tensor = step.final_loss.detach()
        if self._trainer.args.logging_nan_inf_filter:
            steps = self._trainer.state.global_step - self._trainer._globalstep_last_logged
            self._losses.add(loss, steps=steps)
        return loss

    def settle(self, logged: torch.Tensor) -> None:
        """Filter NaN and infinity out of the losses of whole steps. Collective over the world."""
        self._losses.settle(logged, self._engine.communicator)

    # ---- evaluation

    def _evaluation_loader(self, dataloader: Any) -> Any:
        self._sum = EvaluationLoss()
        return PlannedBatches(dataloader, self._engine.evaluation_steps)

    def predict(
        self, model: nn.Module, batch: Any, loss_only: bool, stock: StockPrediction
    ) -> Prediction:
        """Run the forwards of a step, and return its loss, a scalar. Collective over the world."""
        assert isinstance(batch, StepItem), "predictions are refused"
        step = batch.step
        assert isinstance(step, RankChunks), "an evaluation batch without its step"
        self._engine.evaluate(step)
        self._sum.add(step.final_loss, step.items)
        return step.final_loss, None, None

    def evaluated(self, output: Any, name: str) -> Any:
        """Return the output with the mean loss over all targets. Collective over the world."""
        loss = self._sum.mean(self._engine.communicator)
        return output._replace(metrics=output.metrics | {name: loss})
