"""How the loss of a Trainer's steps is computed, in training and in evaluation.

A trainer has one of these for good (`hf/model/loss_kinds.py`):

    NextTokenLoss    a sum over tokens, on the micro-batches of a plan (`next_token.py`)
    LossOfStages     the same sum, on the chunks of a model in stages (`pipeline/trainer/`)
    LossOnSamples    the trainer's own, on its own batches, from figures of their tokens
                     (`on_samples.py`)

`FlexSeqMixin` asks its `StepLoss`, and never which of them it has. The first two draw planned
steps in place of batches: they are a `PlannedLoss`.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.base.patches import Patch
from hf_flexseq.hf.engine.dataset_checks import check_first_step
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.evaluation import EvaluationLoss, PlannedBatches
from hf_flexseq.hf.engine.loaders import CountedBatches, batches_on_host
from hf_flexseq.hf.losses.prediction_checks import check_predictions
from hf_flexseq.hf.losses.predictions import TokenPredictions
from hf_flexseq.steps.logged_loss import StepLosses
from hf_flexseq.steps.step_items import step_items

# The Trainer's own methods.
StockPreparation = Callable[[Any], Any]  # batch -> what the loss gets
Prediction = tuple[Any, Any, Any]  # loss, predictions, labels
RunStep = Callable[[nn.Module, Any, Any], torch.Tensor]  # model, batch, its items -> its loss
# model, batch, True if the loss is all that is wanted -> what the Trainer finds
StockPrediction = Callable[[nn.Module, Any, bool], Prediction]


class StepLoss(ABC):
    """Computes the loss of a trainer's steps."""

    has_predictions: bool
    """True if predictions of tokens are gathered; otherwise they are the Trainer's own."""
    lockstep: bool
    """True if the computation makes all ranks run every micro-batch together."""

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer
        self._engine = engine
        self._tokens: TokenPredictions | None = None  # of the evaluation that runs and predicts

    @property
    def _is_last_step(self) -> bool:
        """True if the current step is the last one."""
        state = self._trainer.state
        return bool(state.global_step + 1 >= state.max_steps)

    # ---- training

    def check_loader(self, dataloader: Any) -> None:
        """Raise ValueError for a loader that the loss cannot use. Collective over the world."""
        return  # any loader will do, unless a subclass disagrees

    @abstractmethod
    def attached(self) -> AbstractContextManager[None]:
        """Surround training or an evaluation, inside the engine's own `attached`."""

    @abstractmethod
    def next_batches(
        self, iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return the batches of the next step for the Trainer, at most `num_batches`, and its
        targets, a scalar; nothing if no rank has data left. Collective over the world."""

    def prepare(self, batch: Any, stock_preparation: StockPreparation) -> Any:
        """Return a batch as the loss gets it."""
        return stock_preparation(batch)

    @abstractmethod
    def run_step(self, model: nn.Module, batch: Any, items: Any, run: RunStep) -> torch.Tensor:
        """Run a whole step with the last of its batches, and return this rank's loss of it, a
        scalar; 0 for a batch before. Collective over the world.

        model: as accelerate has wrapped it. items: the Trainer's count of targets. run: the
        Trainer's own `training_step`.
        """

    def _begin_training(self, model: nn.Module) -> None:
        """Put a model, and an optimizer with two modes (a schedule-free one), into training mode.
        The Trainer's own `training_step` begins so, which comes too late for a step that reads the
        weights before."""
        model.train()
        if callable(getattr(self._trainer.optimizer, "train", None)):
            self._trainer.optimizer.train()

    def settle(self, logged: torch.Tensor) -> None:
        """Correct the Trainer's sum of losses since the last log line. Collective."""
        return  # that of whole batches is right

    # ---- evaluation

    @contextmanager
    def evaluating(self, dataloader: Any, *, predicts: bool) -> Iterator[Any]:
        """Surround an evaluation; the block gets the loader. predicts: True if more than the loss
        is wanted."""
        if not predicts or not self.has_predictions:
            yield self._evaluation_loader(dataloader)
            return
        check_predictions(self._trainer, self._engine.args.pipeline_parallel_size)
        tokens = TokenPredictions(self._trainer, self._engine)
        with Patch(self, _tokens=tokens), tokens.in_loop(), batches_on_host(dataloader):
            yield CountedBatches(dataloader)

    @abstractmethod
    def _evaluation_loader(self, dataloader: Any) -> Any:
        """Return the loader of an evaluation without predictions of tokens."""

    @abstractmethod
    def predict(
        self, model: nn.Module, batch: Any, loss_only: bool, stock: StockPrediction
    ) -> Prediction:
        """Run the forwards of a batch; return loss, a scalar, predictions and labels, None if
        absent. Collective over the world. model: as accelerate has wrapped it."""

    def evaluated(self, output: Any, name: str) -> Any:
        """Return an evaluation's output with its loss under `name`. Collective over the world."""
        return output


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
                    "step %d has no target token: all labels of its %d sequences are -100 (a "
                    "sequence's first token is never predicted). Its loss is 0, where the plain "
                    "Trainer's is NaN; further such steps are not named: check the label masks if "
                    "all are so",
                    *(number + 1, len(step.plan.lengths)),
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
        accelerator = self._trainer.accelerator
        return PlannedBatches(dataloader, self._engine.evaluation_steps, accelerator)

    def evaluated(self, output: Any, name: str) -> Any:
        """Return the output with the mean loss over all targets. Collective over the world."""
        loss = self._sum.mean(self._engine.communicator)
        return output._replace(metrics=output.metrics | {name: loss})


def divisor(targets: int, device: torch.device) -> torch.Tensor:
    """Return a loss's divisor, a scalar filled on the device: a copy would wait."""
    return torch.full((), max(targets, 1), device=device)
