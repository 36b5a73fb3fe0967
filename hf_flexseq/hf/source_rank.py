"""A loss that is not a sum over tokens, as that of TRL's DPOTrainer.

The trainer computes it itself, on its own batches, on the source rank: where the samples were
drawn. Its calls of a model are answered from planned passes (`objectives/planned.py`).
"""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.losses import reads_figures
from hf_flexseq.hf.objectives.planned import PlannedLoss
from hf_flexseq.hf.predictions import TokenPredictions
from hf_flexseq.hf.step_loss import Prediction, StepLoss, StockPrediction, StockPreparation
from hf_flexseq.steps.inputs import Inputs


class LossOnSourceRank(StepLoss):
    """Lets the trainer compute its loss on whole batches."""

    lockstep = False  # the loss runs between the passes

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        super().__init__(trainer, engine)
        self.planned = PlannedLoss(trainer, engine)
        self.has_predictions = reads_figures(trainer)  # TRL's own heads give no logits

    def check_loader(self, dataloader: Any) -> None:
        """Raise ValueError for ranks with different numbers of batches. Collective."""
        self.planned.drawing.check_loader(dataloader)

    def attached(self) -> AbstractContextManager[None]:
        """Surround training or an evaluation: the trainer's other models are attached, too."""
        return self.planned.attached()

    # ---- training

    def next_batches(
        self, iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return the next step's batches and the Trainer's count of targets. Collective."""
        number = self._trainer.state.global_step
        batches = self.planned.drawing.next_batches(iterator, num_batches, first_number=number)
        return batches, self._trainer._get_num_items_in_batch(batches, device)

    def prepare(self, batch: Any, stock_preparation: StockPreparation) -> Any:
        """Return a batch, prepared once; samples are made with the model's own attention."""
        if batch is self.planned.answers.prepared:
            return batch
        with self.planned.preparing():
            return stock_preparation(batch)

    def batches(
        self, model: nn.Module, batch: Any
    ) -> Generator[tuple[nn.Module, Any], None, None]:
        """Take a step's next batch; run the step with the last one. Collective over the world."""
        self.value = torch.zeros((), device=self._trainer.args.device)
        if self.planned.drawing.is_complete(batch):
            yield from self.planned.batches(model, is_last=self._is_last_step)
            self.value = self.planned.logged

    def add(self, loss: torch.Tensor) -> None:
        """Add the trainer's loss of one of its batches, a scalar."""
        self.planned.add(loss)

    # ---- evaluation

    def _evaluation_loader(self, dataloader: Any) -> Any:
        self.check_loader(dataloader)
        return dataloader

    def predict(
        self, model: nn.Module, batch: Any, loss_only: bool, stock: StockPrediction
    ) -> Prediction:
        """Return the Trainer's own result on planned figures. Collective over the world."""
        predicts = self._tokens is not None
        with ExitStack() as answered:
            answered.enter_context(self.planned.answers.answering(model))
            if self.has_predictions:
                batch = self._trainer._prepare_inputs(batch)
                answered.enter_context(self.planned.answers.on_batch(batch))
            found = stock(self._trainer.model, batch, loss_only or predicts)
        if self._tokens is None:
            return found
        return found[0], *self._predict_tokens(self._tokens, model, batch)

    def _predict_tokens(
        self, tokens: TokenPredictions, model: nn.Module, batch: Any
    ) -> tuple[Any, Any]:
        """Return what was predicted of the tokens of a padded batch, and its labels."""

        def forward(micro_batch: Inputs, divisor: torch.Tensor) -> torch.Tensor:
            with self._trainer.compute_loss_context_manager():
                loss: torch.Tensor = model(**micro_batch, use_cache=False).loss
            return loss

        found, _, _ = tokens.predict(batch, forward)
        return found.predictions, found.labels
