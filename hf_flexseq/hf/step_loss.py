"""How the loss of a Trainer's steps is computed, in training and in evaluation.

There are two ways, of which a trainer takes one for good (`losses.py` says which):

    LossInOnePass    a sum over tokens, on the micro-batches of a plan (`one_pass.py`)
    LossAtHome       the trainer's own, on its own batches, between planned passes (`at_home.py`)

`FlexSeqMixin` asks its `StepLoss`, and never which of the two it has. Where the Trainer's own
method is to run inside, that is handed on.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.loaders import batches_on_host
from hf_flexseq.hf.predictions import TokenPredictions
from hf_flexseq.hf.refusals.predictions import check_predictions

# The Trainer's own methods.
StockStep = Callable[[nn.Module, Any], torch.Tensor]  # model, batch -> loss, a scalar
StockPreparation = Callable[[Any], Any]  # batch -> what the loss gets
# model, batch, whether the loss is all that is wanted -> loss, predictions, labels
StockPrediction = Callable[[nn.Module, Any, bool], tuple[Any, Any, Any]]


class StepLoss(ABC):
    """Computes the loss of a trainer's steps."""

    has_predictions: bool
    """Whether predictions of tokens come home; otherwise they are the Trainer's own."""

    lockstep: bool
    """Whether the computation makes all ranks run every micro-batch together."""

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer
        self._engine = engine
        self._tokens: TokenPredictions | None = None  # of the evaluation that runs and predicts

    @property
    def _is_last_step(self) -> bool:
        """Whether no step comes after the one that runs."""
        state = self._trainer.state
        return bool(state.global_step + 1 >= state.max_steps)

    # ---- training

    @abstractmethod
    def check_datasets(self, *, resumes: bool) -> None:
        """Raise ValueError for datasets whose examples cannot be trained on."""

    @abstractmethod
    def check_loader(self, dataloader: Any) -> None:
        """Raise ValueError, on all ranks, for a loader that gives them different numbers of
        batches, where the loss cannot do with that. Collective over the world."""

    @abstractmethod
    def attached(self) -> AbstractContextManager[None]:
        """Surround training or an evaluation, inside the engine's own `attached`."""

    @abstractmethod
    def next_batches(
        self, iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return what the Trainer gets as the batches of the next step, at most `num_batches`, and
        the step's target tokens, a scalar; nothing where no rank has data left. Collective over
        the world."""

    @abstractmethod
    def prepare(self, batch: Any, stock_preparation: StockPreparation) -> Any:
        """Return a batch as the loss gets it."""

    @abstractmethod
    def train(self, model: nn.Module, batch: Any, stock_step: StockStep) -> torch.Tensor:
        """Run a step with the last of its batches, and return this rank's loss, a scalar; 0 for
        the batches before. Collective over the world.

        model: as accelerate has wrapped it.
        """

    @abstractmethod
    def settle(self, logged: torch.Tensor) -> None:
        """Make what the Trainer has added up of this rank's losses since the last log line, a
        scalar, what it should log. Collective over the world."""

    # ---- evaluation

    @contextmanager
    def evaluating(self, dataloader: Any, *, predicts: bool) -> Iterator[Any]:
        """Surround an evaluation; the block gets the loader that it iterates over.

        predicts: whether more than the loss is wanted.
        """
        if not predicts or not self.has_predictions:
            yield self._evaluation_loader(dataloader)
            return
        check_predictions(self._trainer, self._engine.args.pipeline_parallel_size)
        self._tokens = TokenPredictions(self._trainer, self._engine)
        try:
            with self._tokens.in_loop(), batches_on_host(dataloader):
                yield dataloader
        finally:
            self._tokens = None

    @abstractmethod
    def _evaluation_loader(self, dataloader: Any) -> Any:
        """Return what an evaluation without predictions of tokens iterates over."""

    @abstractmethod
    def predict(
        self, model: nn.Module, batch: Any, loss_only: bool, stock_prediction: StockPrediction
    ) -> tuple[Any, Any, Any]:
        """Run the forwards of a batch; return its loss, a scalar, its predictions and its labels,
        None for what there is not or is not wanted. Collective over the world.

        model: as accelerate has wrapped it.
        """

    @abstractmethod
    def evaluated(self, output: Any, name: str) -> Any:
        """Return the output of an evaluation with the loss under its `name` as it should be.
        Collective over the world."""
