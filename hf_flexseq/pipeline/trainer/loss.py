"""The loss of a model in stages: the last one sums it over tokens, and the engine runs steps."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from hf_flexseq.hf.losses.step_loss import PlannedLoss, Prediction, RunStep, StockPrediction
from hf_flexseq.pipeline.step import RankChunks
from hf_flexseq.pipeline.trainer.engine import PipelineEngine
from hf_flexseq.steps.step_items import StepItem


class LossOfStages(PlannedLoss):
    """Runs planned steps of chunks, of which the Trainer's own `training_step` sees nothing."""

    lockstep = False
    _engine: PipelineEngine

    def attached(self) -> AbstractContextManager[None]:
        """Return nothing to surround training or an evaluation with."""
        return nullcontext()

    # ---- training

    def run_step(self, model: nn.Module, batch: Any, items: Any, run: RunStep) -> torch.Tensor:
        """Run a step at its last item, and return its loss, a scalar; 0 for the items before.
        Collective over the world. run: unused, as the engine runs all of a stage."""
        step = batch.step
        if step is None:
            return torch.zeros((), device=self._trainer.args.device)
        self._begin_training(model)
        self._engine.run(step, model, is_last=self._is_last_step)
        self._engine.finish(step)
        loss: torch.Tensor = step.final_loss.detach()
        self._note(loss)
        return loss

    # ---- evaluation

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
