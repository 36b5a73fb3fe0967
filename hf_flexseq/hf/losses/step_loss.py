"""How the loss of a Trainer's steps is computed, in training and in evaluation.

A trainer has one of these for good (`hf/model/loss_kinds.py`):

    NextTokenLoss    a sum over tokens, on the micro-batches of a plan (`next_token.py`)
    LossOnSamples    the trainer's own, on its own batches, from figures of their tokens
                     (`on_samples.py`)
    LossOfStages     a sum over tokens, on the chunks of a model in stages (`pipeline/trainer/`)

`FlexSeqMixin` asks its `StepLoss`, and never which of them it has. `planned_loss.py` has the part
that the two sums share.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.loaders import CountedBatches, batches_on_host
from hf_flexseq.hf.losses.prediction_checks import check_predictions
from hf_flexseq.hf.losses.predictions import TokenPredictions

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
        self._tokens = TokenPredictions(self._trainer, self._engine)
        try:
            with self._tokens.in_loop(), batches_on_host(dataloader):
                yield CountedBatches(dataloader)
        finally:
            self._tokens = None

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
